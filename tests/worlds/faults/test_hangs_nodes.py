"""A loop of the user's own on two nodes: who hangs is told from outside, and all start again.

Every kind of hang on either node: tests/proof/hangs_nodes.py. `make test` has the same without torch,
in tests/cli/test_beside.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from netns import Forbidden, skip
from nodes_hang import STEPS, on_two_nodes
from test_hangs import WHY


@pytest.mark.proof
def test_rank_0_is_stopped_with_the_store_that_it_holds(tmp_path: Path) -> None:
    asked = {"kind": "stopped", "place": "forward", "rank": 0, "after": 60}
    try:
        found = on_two_nodes(tmp_path, asked)
    except Forbidden as why:
        skip("hangs on several nodes NOT TESTED", str(why))
    assert (tmp_path / "hung").exists(), found["said"]
    told, same = found["told"]
    assert told == same, "one file, which all see"
    (told,) = told
    assert (told["rank"], told["why"], told["ends_in_s"]) == (0, WHY["stopped"], 0.0)
    assert told["deadline_s"] < 60, "learnt from the run"
    assert told["waited_s"] <= told["deadline_s"] + 2
    assert f"rank 0 on {told['host']} (pid {told['pid']})" in found["said"][found["node"][0]]
    assert "trainer/step/optimizer_step.py" in found["accounts"][0], (
        "where the rank waits that is not at fault"
    )
    assert found["codes"] == [0, 0], found["said"]
    assert found["steps"][0] == list(range(1, STEPS + 1))
    assert not found["left"]
