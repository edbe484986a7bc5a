"""Bytes of one rank, kind by kind: states, activations, buffers, what offload moves."""
