"""Rules of `shoal runs` and `shoal diagnose`: the state of a run, the meaning of its events."""
