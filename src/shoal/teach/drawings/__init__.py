"""Pictures as text and SVG: timelines, tables of ranks and their tensors, curves, screens."""
