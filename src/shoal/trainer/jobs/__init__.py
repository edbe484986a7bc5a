"""Jobs of the command line: train, validate, forecast, find a rate, generate text."""
