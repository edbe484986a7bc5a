"""Report of runs as one HTML file, and the verdict that comes first in it; no torch.

It reads run folders only, through `shoal.view` and `shoal.base`, also while their runs write.
"""
