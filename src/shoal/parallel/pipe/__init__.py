"""Pipelines: a model's blocks dealt to stages, and what one stage does with the user's forward."""
