"""Goodput of a run: the share of its wall time that is in committed steps, and where the rest went.

`compute_goodput(folder)` returns it; its parts add up to the wall time.
"""

from shoal.report.goodput.wall_time import Goodput, compute_goodput

__all__ = ["Goodput", "compute_goodput"]
