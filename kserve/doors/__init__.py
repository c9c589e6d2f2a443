"""Doors for code that was written for something else: the import line is the only change."""
