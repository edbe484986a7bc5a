"""Exchanges over a world: all-to-all, rings, point to point, timed collectives."""
