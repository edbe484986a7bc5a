"""Plans: the program of a run, as plain data that can be saved, compared and executed."""
