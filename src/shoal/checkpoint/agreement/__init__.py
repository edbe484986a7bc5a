"""What ranks agree on before a save or load: who writes and reads which slice."""
