"""Optimizers: built by name or rebound from the user's, learning-rate schedules, named state."""
