"""Data types that every package shares: layouts, plans, shards, events, errors, units. No torch."""
