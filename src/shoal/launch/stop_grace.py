"""Time that workers get to save after a stop request.

A run that is killed while it saves loses the steps since the save before. A short limit has no use:
what ends the run early is a scheduler, whose limit the user passes as `launch.grace_s`.
"""

from __future__ import annotations

from pathlib import Path

from shoal.base.runlog.damaged_lines import is_number, iter_lines_backward, parse_event

LEAST_S = 60.0
"""Seconds before any measurement: for a first step that is compiled, and a first save."""
SAVES, EVENTS = 3, 300
"""Longest saves that the time covers in addition · newest events to read for them."""


class StopGrace:
    """Time limit for the workers of a run in `folder` to save and stop.

    Args:
        fixed_s: set by the user; 0: learnt.
        steps: that may have to be made before a save.
    """

    def __init__(self, folder: Path, fixed_s: float, steps: int) -> None:
        self.folder, self.fixed_s, self.steps = folder, fixed_s, steps

    def seconds(self, step_s: float) -> float:
        """Return the seconds from the request to the kill.

        Args:
            step_s: the longest of the last steps; 0: none was made.
        """
        if self.fixed_s:
            return self.fixed_s
        return LEAST_S + self.steps * step_s + SAVES * longest_save_s(self.folder)


def longest_save_s(folder: Path) -> float:
    """Return the seconds of the longest of the last saves in events.jsonl; 0 without one."""
    longest = 0.0
    try:
        with (folder / "events.jsonl").open("rb") as file:
            for (_, line), _ in zip(iter_lines_backward(file), range(EVENTS), strict=False):
                event = parse_event(line) if b"checkpoint_saved" in line else None
                if event is not None and is_number(event.get("seconds")):
                    longest = max(longest, event["seconds"])
    except OSError:
        return 0.0
    return longest
