"""State of a run in checkpoints: saving, loading, and the return to an earlier checkpoint."""
