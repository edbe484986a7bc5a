"""Models as numbers: parameters, work and activations, of ours and of published ones."""
