"""Layouts beside one process in float64: the battery of `shoal prove`, on devices.

On one GPU all ranks share it and their tensors travel by way of the host (`host_group.py`); with a
GPU each they use NCCL. A row that a rank does not answer ends its world; the next row has a new one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from child import Sheet
from device import GPUS, ON_GPU, PATIENCE, pick
from shoal.view.proof_lines import verdict_line
from worlds import Members

HERE = Path(__file__).resolve().parent
ROW_S = 50.0 * PATIENCE  # a row that hangs leaves time for others

DEALT = ("fsdp", "zero1", "zero2", "ddp")
DATA_PARALLEL = [(layout, "llama") for layout in DEALT]
FURTHER = pick([(layout, case) for case in ("cnn", "mlp") for layout in DEALT], [])
TWO = [
    ("tp2", "our llama"),
    ("pp2", "our llama"),
    ("cp2", "our llama"),
    ("ep2", "our moe"),
    *pick([("tp2", "our gpt"), ("pp2", "our gpt"), ("tp2", "our vit"), ("pp2", "our moe")], []),
]
FOUR = [("tp2 pp2", "our llama"), ("tp2 fsdp2", "our llama"), ("pp2 fsdp2", "our llama")]
EIGHT = [("tp2 pp2 dp2", "our llama"), ("tp2 pp2 dp2", "our gpt")]


class Ranks(Members):
    """Members of a world on GPUs."""

    program = HERE / "member.py"


class Worlds:
    """The world of a size, started when first asked, and anew after a row that broke it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.by_size = folder, {}

    @staticmethod
    def shared(size: int) -> bool:
        """Whether its ranks share a device; one rank alone has it for itself, and needs no group."""
        return size > (GPUS if ON_GPU else 1)

    def __call__(self, size: int) -> Ranks:
        if size not in self.by_size:
            os.environ["SHOAL_TEST_SHARED"] = "1" if self.shared(size) else "0"
            self.by_size[size] = Ranks(size, self.folder)
        return self.by_size[size]

    def drop(self, size: int) -> None:
        """Kill a world of which nobody knows what it still does."""
        if world := self.by_size.pop(size, None):
            world.kill()


def prove(worlds: Worlds, size: int, function: str, **arguments: Any) -> dict[str, Any]:
    """The battery's verdict on one row; anything but "equal" fails it."""
    try:
        report = worlds(size).call(function, deadline_s=ROW_S, **arguments)[0]
    except Exception:
        worlds.drop(size)
        raise
    largest = {t["optimizer"]: t["largest"] for t in report["trajectories"]}
    assert report["verdict"] == "equal", verdict_line(report)
    return {"largest": largest, "device": report["device"], "shared": worlds.shared(size)}


def rows(
    sheet: Sheet, size: int, dealt: list[tuple[str, str]], split: list[tuple[str, str]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        worlds = Worlds(Path(folder))
        for layout, case in dealt:
            with sheet.row(f"{layout} × {size}, {case}") as told:
                told.update(prove(worlds, size, "trajectory:prove", case=case, layout=layout))
        for layout, model in split:
            with sheet.row(f"{layout}, {model}") as told:
                told.update(prove(worlds, size, "any_case:prove", model=model, layout=layout))
        worlds.drop(size)


def two_ranks(sheet: Sheet) -> None:
    """Data parallelism, and a layer, a model, a sequence and experts in two parts."""
    rows(sheet, 2, DATA_PARALLEL, TWO)
    rows(sheet, 2, FURTHER, [])


def four_ranks(sheet: Sheet) -> None:
    """Shards in replicas, unequal shards, and two axes at a time."""
    rows(sheet, 4, [("hsdp", "llama"), *pick([("zero1", "mlp"), ("fsdp", "mlp")], [])], FOUR)


def eight_ranks(sheet: Sheet) -> None:
    """Three axes at a time, where eight GPUs are."""
    if ON_GPU and GPUS < 8:
        with sheet.row("not run") as told:
            told["reason"] = f"this machine has {GPUS} GPUs"
        return
    rows(sheet, 8, [], pick(EIGHT, EIGHT[:1]))
