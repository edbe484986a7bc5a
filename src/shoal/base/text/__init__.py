"""Text for people: units, user frames, terminal encodings, sentences for events."""
