"""Record one forward pass, and follow values through it."""
