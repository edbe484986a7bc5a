"""Collectives of gloo and NCCL as Shoal calls them, counted and logged."""
