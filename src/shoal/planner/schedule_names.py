"""The names of pipeline schedules, and other names under which people know them: base/schedules."""

from __future__ import annotations

from shoal.base.schedules import ALIASES, SCHEDULES, canonical

__all__ = ["ALIASES", "SCHEDULES", "canonical"]
