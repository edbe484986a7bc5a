"""Save checkpoints: in the background of training, on shared disks or on each node's own."""
