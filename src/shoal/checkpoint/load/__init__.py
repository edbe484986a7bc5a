"""Load checkpoints on any layout."""
