"""Lets the tests of the views share one stream that claims to be a terminal."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
