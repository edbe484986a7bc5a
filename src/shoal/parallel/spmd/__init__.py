"""Label engine for tensor parallelism: each rank computes a layer with its part of the tensors."""
