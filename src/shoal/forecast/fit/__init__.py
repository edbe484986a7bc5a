"""Peak memory at each instant of a run, and whether it fits."""
