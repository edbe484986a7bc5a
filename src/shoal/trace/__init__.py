"""Record of a model (blocks, calls, random draws, costs), traced without computing it whole."""
