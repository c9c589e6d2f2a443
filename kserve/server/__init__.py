"""The daemon's HTTP side."""
