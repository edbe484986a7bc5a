"""Find parts of a model: blocks, trunk, experts, embeddings."""
