"""Configurations of other libraries, read as keys of a run.toml. No torch."""
