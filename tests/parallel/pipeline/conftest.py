"""Puts the chain of stages within reach; one thread, since two cores are shared."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
