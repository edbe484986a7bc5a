"""Traces of all ranks: read, aligned, merged to one file, summed up and checked; no torch."""
