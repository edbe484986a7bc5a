"""Sections of a report: each a function from what a run folder holds to HTML."""
