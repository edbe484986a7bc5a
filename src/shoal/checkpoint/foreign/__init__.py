"""Import of weights that other tools wrote: torch, DCP, DeepSpeed; pickles are read as data."""
