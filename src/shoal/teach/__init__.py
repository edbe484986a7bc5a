"""Teaching material: step-throughs, puzzles, calculators and their screens; a top layer."""
