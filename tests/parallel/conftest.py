"""Puts the models that tests of this room share within reach."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
