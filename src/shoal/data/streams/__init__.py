"""Streams without a length: shards dealt to ranks, WebDataset, Hugging Face streams."""
