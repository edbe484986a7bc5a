"""Build and load a model: mapped memory, one build per machine, pretrained weights."""
