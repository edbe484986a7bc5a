"""Textbook formulas of distributed training on plain numbers, one file per topic."""
