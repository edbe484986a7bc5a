"""Save checkpoints: beside training, on shared disks or on each node alone."""
