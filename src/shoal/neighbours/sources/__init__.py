"""Facts of a script's source, read before the script trains."""
