"""Several runs in one report: one axis, keys that differ, steps from which losses differ."""
