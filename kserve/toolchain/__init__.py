"""The compilers. Everything here runs inside a worker process, except the records of base.py."""
