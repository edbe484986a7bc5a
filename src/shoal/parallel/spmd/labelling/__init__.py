"""Label the values of a traced layer (whole, slice or summand) by running its operations."""
