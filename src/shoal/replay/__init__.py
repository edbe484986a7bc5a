"""Replay of steps of an earlier run: the same samples and bits, to look at or to compare."""
