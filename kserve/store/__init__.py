"""Where bytes lie."""
