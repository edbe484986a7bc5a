"""Forecasts: memory, time and bytes of a run on a machine, by arithmetic. No torch."""
