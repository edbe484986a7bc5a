"""The label engine: one layer computed by several processes, each with a part of its tensors."""
