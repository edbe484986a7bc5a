"""Run a user's module and restore its state: copies, fake tensors, saved state."""
