"""Jobs of the command line: train, validate, forecast, find a learning rate, generate text."""
