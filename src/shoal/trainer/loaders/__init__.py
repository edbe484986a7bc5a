"""Data loaders of a run, its epochs, and the check that a dataset is the same after a restart."""
