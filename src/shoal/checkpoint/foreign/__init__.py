"""Weights that other tools wrote: torch, DCP, DeepSpeed; pickles read as data."""
