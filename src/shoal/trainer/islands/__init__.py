"""Islands of a run: their connection, training between merges, and the common state."""
