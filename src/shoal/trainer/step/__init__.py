"""One optimizer step: the batch, its micro-batches, the sums over ranks, skipped updates."""
