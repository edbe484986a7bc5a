"""Model facts for predictions: parameters, FLOP and activations, of own and published models."""
