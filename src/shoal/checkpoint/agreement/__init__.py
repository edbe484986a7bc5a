"""Agreement of the ranks before a save or load: the rank that writes or reads each slice."""
