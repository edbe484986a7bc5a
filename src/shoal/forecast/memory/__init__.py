"""Predicted bytes of one rank: states, activations, buffers and offloaded tensors."""
