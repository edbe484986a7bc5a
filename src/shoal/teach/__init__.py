"""For learners: step-throughs, puzzles, calculators, their screens; nothing below imports it."""
