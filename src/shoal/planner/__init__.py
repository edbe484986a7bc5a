"""Facts in, plans out: pure arithmetic, no torch."""
