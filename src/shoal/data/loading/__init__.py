"""Loaders: order of samples, fetching, worker processes, seeds, samples that fail."""
