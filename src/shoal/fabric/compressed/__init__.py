"""Compressed sums of gradients: codes with error feedback, and PowerSGD."""
