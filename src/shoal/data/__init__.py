"""Data loading: opens data, orders it by one integer, and yields it step by step for any layout."""
