"""Lets the tests here import `deal_ranks`, data ranks as threads."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
