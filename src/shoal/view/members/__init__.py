"""Members of runs of islands, read from run folders."""
