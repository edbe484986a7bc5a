"""From a difference to its cause: gradients, norms, clues."""
