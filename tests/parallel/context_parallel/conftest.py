"""Puts the world of threads within reach: tensor parallelism's, and what a ring adds to it."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "spmd")]
