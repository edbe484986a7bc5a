"""The default micro-batch after memory ran out, and on nodes that come and go."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from counting_run import COUNTING, leg
from elastic import HERE, Nodes, rounds, wait_for
from netns import Forbidden, skip

HUNGRY = (
    COUNTING
    + '''
class Hungry(Counting):
    """After step 2 rank 1 asks for a pebibyte where a pass has over 3 samples."""
    def forward(self, x):
        saved = os.path.exists("runs/run/checkpoints/step-2")
        if self.training and saved and len(x) > 3 and os.environ["RANK"] == "1":
            torch.empty(2**50, dtype=torch.uint8)
        return super().forward(x)

def build():
    return Hungry()
'''
)


@pytest.mark.proof("share")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_halved_choice_is_kept_on_other_ranks(tmp_path: Path, strategy: str) -> None:
    """12 of a share of 12 do not fit, nor do 6; on 3, 4 and 1 ranks no pass has over 3 again."""
    (tmp_path / "counting.py").write_text(HUNGRY)
    samples: list[int] = []
    for number, (processes, size) in enumerate(((2, 12), (2, 3), (3, 2), (4, 2), (1, 2))):
        layout = f"layout.strategy={strategy if processes > 1 else 'single'}"
        passes, output = leg(tmp_path, processes, 2 * number + 2, layout, "train.on_oom=halve")
        assert {len(ids) for ids in passes} == {size}, output
        said = "masks of dropout and statistics of BatchNorm" in " ".join(output.split())
        assert said == (number in (1, 2)), output
        samples += [one for ids in passes for one in ids]
    for epoch in (samples[:120], samples[120:]):
        assert Counter(epoch) == Counter(range(120))


def committed(found: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The samples of all ranks in each step, as the run that is left took it."""
    kept: dict[int, list[int]] = {}
    for one in found:
        if one["rank"] == 0:
            kept = {step: ids for step, ids in kept.items() if step <= one["start"]}
            rest = [two for two in found if two["meets"] == one["meets"]]
            for row in one["steps"]:
                same = [two for of in rest for two in of["steps"] if two["step"] == row["step"]]
                kept[row["step"]] = sorted(n for two in same for n in two["samples"])
    return kept


@pytest.mark.proof("share")
def test_nodes_come_and_go(tmp_path: Path) -> None:
    """One node trains on passes of 24; from the second node on they are 12, also when it is lost."""
    logs, steps = tmp_path / "logs", 60
    logs.mkdir()
    command = [
        str(HERE / "elastic_loop.py"), str(steps), "0.3", str(logs), str(tmp_path / "run"), "open"
    ]  # fmt: skip
    try:
        nodes = Nodes(tmp_path, command)
    except Forbidden as why:
        skip("nodes that come and go NOT TESTED", str(why))
    with nodes:

        def told() -> str:
            return f"{rounds(logs)}\n{nodes.said(0)[-3000:]}\n{nodes.said(1)[-3000:]}"

        def began(size: int, count: int) -> bool:
            """Whether so many processes of worlds of this size took steps, and saved after the fourth."""
            worlds = [one for one in rounds(logs) if one["size"] == size and len(one["steps"]) > 6]
            return len(worlds) >= count

        nodes.start(0)
        wait_for(lambda: began(1, 1), 120, told)
        nodes.start(1)
        wait_for(lambda: began(2, 2), 120, told)
        nodes.kill(1)
        wait_for(lambda: began(1, 2), 120, told)
        (logs / "fast").touch()
        assert nodes.agents[0].wait(120) == 0, told()
    found = rounds(logs)
    assert [(one["size"], one["micro_batch"]) for one in found] == [
        (1, 24), (2, 12), (2, 12), (1, 12)
    ]  # fmt: skip
    taken = committed(found)
    assert sorted(taken) == list(range(1, steps + 1))
    for first in range(1, steps, 5):
        epoch = [n for step in range(first, first + 5) for n in taken[step]]
        assert Counter(epoch) == Counter(range(120)), f"steps {first} to {first + 4}"
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    lines = [" ".join(json.loads(line).get("differs", [])) for line in events]
    changed = [line for line in lines if "micro_batch:" in line]
    assert len(changed) == 1, lines
    assert "micro_batch: 24 → 12" in changed[0]
