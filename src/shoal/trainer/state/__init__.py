"""The state of a run in checkpoints: save it, load it, go back to an earlier one."""
