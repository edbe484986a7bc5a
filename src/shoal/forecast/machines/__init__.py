"""Machines as numbers: accelerators, links, what was measured here."""
