"""An island of a run: join the others, train between merges, keep the common state."""
