"""Configuration of `shoal train`: typed sections of run.toml and overrides. Imports no torch."""
