"""Records of traced steps: parts of a step, micro-batches, stages, and collectives in flight."""
