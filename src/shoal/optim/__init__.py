"""Optimizers: construction by name, sharding, learning-rate schedules, named state."""
