"""Decide what a run does: layout, micro-batches, gradient buckets, schedule; without torch."""
