"""The parts are no test modules: `run.py` starts them, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

collect_ignore = [p.name for p in Path(__file__).parent.glob("*.py") if p.name[:5] != "test_"]
