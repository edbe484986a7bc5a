"""A layer as a graph of torch operations."""
