"""How long workers may take to save after a stop was asked for.

A run that is killed while it saves loses what it did since the save before. Nobody is served by a
short patience of its own: what ends it early is a scheduler, whose patience `launch.grace_s` tells.
"""

from __future__ import annotations

from pathlib import Path

from shoal.base.runlog.damaged_lines import is_number, lines_from_end, parse_event

LEAST_S = 60.0
"""Where nothing was measured yet: a first step that is compiled, a first save."""
SAVES, EVENTS = 3, 300
"""Longest saves that fit in besides · newest events among which they are looked for."""


class Grace:
    """The patience with the workers of a run in `folder`.

    Args:
        fixed_s: said by the user; 0: learnt.
        steps: that may have to be made before a save.
    """

    def __init__(self, folder: Path, fixed_s: float, steps: int) -> None:
        self.folder, self.fixed_s, self.steps = folder, fixed_s, steps

    def seconds(self, step_s: float) -> float:
        """From the request to the kill. step_s: the longest of the last steps; 0: none was made."""
        if self.fixed_s:
            return self.fixed_s
        return LEAST_S + self.steps * step_s + SAVES * longest_save_s(self.folder)


def longest_save_s(folder: Path) -> float:
    """Seconds of the longest of the last saves that events.jsonl tells; 0 where there is none."""
    longest = 0.0
    try:
        with (folder / "events.jsonl").open("rb") as file:
            for (_, line), _ in zip(lines_from_end(file), range(EVENTS), strict=False):
                event = parse_event(line) if b"checkpoint_saved" in line else None
                if event is not None and is_number(event.get("seconds")):
                    longest = max(longest, event["seconds"])
    except OSError:
        return 0.0
    return longest
