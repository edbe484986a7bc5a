"""Plans: what a run does, as plain data that can be saved, compared and executed."""
