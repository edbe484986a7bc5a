"""Reads run.toml and overrides into typed sections; refuses what it does not know. No torch."""
