"""Diagnosis of a difference: gradients, norms, clues, and the likely cause."""
