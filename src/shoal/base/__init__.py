"""Nouns that every room shares: layouts, plans, shards, events, errors, units. Stdlib only."""
