"""Files of a run folder: events, metrics, records of ranks, and how each is read and cut back."""
