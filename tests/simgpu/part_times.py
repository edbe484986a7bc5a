"""Parts of a step timed by a device's events: what the pages of a run hold, and what the host waited for.

Two runs of the same steps, the second with a page, in one process. The last line is {"waits":
[operators for which the host waited in each], "late": per step, the newest step of the page's rows
just after it, "rows": seconds by part of each step, "whole_s": of all steps by the host, "timed_by": of
both runs' lines, "behind": rows of steps that a device had not done when it was asked, "actions": record
of two actions of a pipeline}.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from own_loop import Tokens, launched, module_of, since

import shoal
from shoal.base.plans.pipeline_actions import Action
from shoal.fabric import start_world
from shoal.fabric.device import synchronize
from shoal.launch.watch.page_reader import OwnedPage
from shoal.parallel.pipeline.action_times import ActionTimes
from shoal.trainer.device_timer import DevicePartTimer
from shoal.wire.watch_page import PAGE_VARIABLE, WatchPage, attach_page

STEPS = 6


def trained(world: Any, page: OwnedPage | None, folder: str) -> tuple[dict[str, Any], list[int]]:
    """What the steps launched and waited for, and the newest row after each."""
    run = shoal.parallelize(
        module_of("ddp"),
        lambda parameters: torch.optim.AdamW(parameters, 1e-3, foreach=True),
        batch=8,
        micro_batch=4,
        precision="fp32",
        world=world,
        folder=folder,
    )
    before, late = launched(world), []
    for batch in run.loader(Tokens(STEPS)):
        run.step(batch)
        if page is not None:
            rows = page.rank_steps(0, after_s=0.0)
            late.append(rows[-1].step if rows else 0)
    told = since(before, launched(world))
    run.close()
    return told, late


class NeverDone:
    """An event of a device that is far behind."""

    def __init__(self, enable_timing: bool) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: Any) -> None:
        """Nothing."""

    def query(self) -> bool:
        """No."""
        return False

    def elapsed_time(self, other: Any) -> float:
        """Never asked: it would wait."""
        raise AssertionError


def time_actions(device: torch.device) -> dict[str, Any]:
    """Time two actions, each of which multiplies after its wait."""
    times, a = ActionTimes(device), torch.ones(64, 64, device=device)
    times.request_step()
    times.start_actions([Action("F", 0, 0), Action("B", 0, 0)])
    for _ in range(2):
        times.read()
        times.read()
        a = a @ a
        times.read()
    return times.pop_step()


def main() -> None:
    """See the module."""
    world = start_world()
    with tempfile.TemporaryDirectory() as place:
        without, _ = trained(world, None, f"{place}/a")
        page = OwnedPage("rank 0")
        opened = WatchPage.open({PAGE_VARIABLE: page.path})
        assert opened is not None
        attach_page(opened)
        began_s = time.perf_counter()
        told, late = trained(world, page, f"{place}/b")
        whole_s = time.perf_counter() - began_s
        synchronize(world.device)  # as a save at the end of a run does
        opened.close()
        rows = page.rank_steps(0, after_s=0.0)
        opened.timer = behind = DevicePartTimer(world.device)
        behind._make_event = NeverDone
        for step in (STEPS + 1, STEPS + 2, STEPS + 3):
            opened.record_step_end(step)
        lines = [json.loads(x) for x in Path(f"{place}/b/metrics.jsonl").read_text().splitlines()]
        clocks = [json.loads(x) for x in Path(f"{place}/a/metrics.jsonl").read_text().splitlines()]
        print(
            json.dumps(
                {
                    "waits": [one["waits"] for one in (without, told)],
                    "late": late,
                    "rows": {row.step: row.seconds for row in rows},
                    "whole_s": whole_s,
                    "timed_by": [clocks[0]["timed_by"], *(row["timed_by"] for row in lines)],
                    "behind": [step for step in page.steps() if step > STEPS],
                    "actions": time_actions(world.device),
                }
            )
        )


if __name__ == "__main__":
    main()
