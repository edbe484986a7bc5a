"""Experts on other ranks: found in any model, checked, and reached by all-to-all."""
