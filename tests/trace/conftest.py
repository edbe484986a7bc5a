"""Puts the models that tests of `parallel` share within reach."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
