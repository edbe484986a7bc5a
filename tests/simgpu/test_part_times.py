"""Parts of a step timed by events on a device: one step later, and the host waits for nothing more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.wire.phases import BACKWARD, PASSES, SUM, UPDATE
from shoal.wire.watch_page import WAIT


@pytest.mark.parametrize("mode", ["drawn", pytest.param("lazy", marks=pytest.mark.proof)])
def test_parts_are_the_devices_and_come_one_step_later(forks: Any, mode: str) -> None:
    done = forks.run("part_times.py", SIM_MODE=mode, SIM_DEVICES="1")
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    without, timed = told["waits"]
    assert timed == without, "what the host waited for, with and without events"
    assert told["late"] == [0, 1, 2, 3, 4, 5], "the newest row after each of six steps"
    assert told["timed_by"] == ["host", *["device"] * 6]
    rows = {int(step): seconds for step, seconds in told["rows"].items()}
    assert sorted(rows) == [1, 2, 3, 4, 5, 6], "the last one by the end of the run"
    for seconds in rows.values():
        assert min(seconds) >= 0
        assert all(seconds[part] > 0 for part in (PASSES, BACKWARD, SUM, UPDATE))
        assert seconds[WAIT] == 0, "one process"
    assert sum(map(sum, rows.values())) <= told["whole_s"], "each moment counts once"
    assert told["behind"] == [], "no row where the device was behind, and nobody waited for it"
    actions = told["actions"]
    assert actions["timed_by"] == "device"
    assert [row[0] for row in actions["actions"]] == ["F0@0", "B0@0"]
    times_s = [second for row in actions["actions"] for second in row[1:]]
    assert times_s == sorted(times_s)
    assert 0 <= times_s[0] < times_s[-1] < 10
