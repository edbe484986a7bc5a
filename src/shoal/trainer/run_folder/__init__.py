"""Run folder of a training run: its lease, saves, extra files, and the checks of a resume."""
