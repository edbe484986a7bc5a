"""Search for the fastest layouts that fit, with reasons for the choice."""
