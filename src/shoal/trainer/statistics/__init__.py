"""Statistics of tensors in some steps of a run: `train.statistics = 100`."""
