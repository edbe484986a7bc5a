"""Search for the fastest layouts that fit, and explain the choice."""
