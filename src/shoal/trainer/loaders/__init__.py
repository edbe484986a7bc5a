"""Loaders of a run, its epochs, and how a dataset is recognised after a restart."""
