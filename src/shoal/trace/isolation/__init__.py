"""Run a module of the user and leave no trace: copies, fakes, saved state."""
