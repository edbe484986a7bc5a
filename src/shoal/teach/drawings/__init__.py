"""Pictures as text and SVG: timelines, tables of who holds what, curves, screens of figures."""
