"""Lets the tests of reports share made run folders."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
