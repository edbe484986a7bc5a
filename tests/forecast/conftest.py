"""Lets the tests of this room share what stands beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(
    str(Path(__file__).parents[2] / "benchmarks" / "planner")
)  # fit.py, planned_case.py
