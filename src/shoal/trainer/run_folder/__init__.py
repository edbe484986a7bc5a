"""The run folder: its lease, saves, extra files, and checks of a run that resumes."""
