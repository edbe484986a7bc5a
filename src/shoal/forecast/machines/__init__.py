"""Hardware facts for predictions: accelerators, links, and measurements of this machine."""
