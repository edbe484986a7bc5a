"""Files of a run folder: events, metrics, records of ranks; their readers and truncation."""
