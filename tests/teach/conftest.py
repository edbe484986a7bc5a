"""Lets the tests of this room share the stream that claims to be a terminal."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "view")]
