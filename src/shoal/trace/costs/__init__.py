"""Count what a model costs: operations, bytes, kept activations."""
