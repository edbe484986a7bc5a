"""Measures a machine and a model with torch; gives plain facts."""
