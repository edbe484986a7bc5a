"""Checkpoints in remote folders: upload, fetch, list."""
