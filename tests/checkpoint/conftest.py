"""Lets the checkpoint tests and the script that they start share `checkpoint_cases`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
