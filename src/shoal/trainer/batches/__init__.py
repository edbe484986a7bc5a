"""Batches of the user: how many samples one holds, and how it is cut into micro-batches."""
