"""Label the values of a traced layer (replicated, split, partial) by running its operations."""
