"""Forecast memory, time and traffic of a run on a machine, by arithmetic and without torch."""
