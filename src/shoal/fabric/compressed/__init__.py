"""Compressed all-reduces of gradients: codecs with error feedback, and PowerSGD."""
