"""Lets the tests of this folder share `trainer_small`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
