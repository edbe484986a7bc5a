"""Every statement that only a device reaches is in the committed table: reached, or excused by a reason."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import device_lines

HERE = Path(__file__).resolve().parent
TABLE = HERE.parents[1] / "proof" / "results" / "device-lines.json"
MOST_EXCEPTIONS = 150
AGAIN = "python tests/simgpu/device_lines.py --out proof/results/device-lines.json"

SAMPLE = """
import torch
from shoal.fabric.device import accelerator_type, is_accelerator

def is_there(device):
    return device.type not in ("cpu", "meta")

def helper(x):
    return x + 1

def wait(self, device, x):
    on = bool(x) and is_there(device)
    if on and x:
        first()
    if not is_there(device):
        return 0
    second = helper(x)
    if x.type == "meta":
        third()
    return second

class Kept:
    def __init__(self):
        self.event = None
        self.count, self.other = 0, None

    def told(self):
        if device.type == "cuda":
            self.event = made()
        if self.event is not None:
            fourth()
        if self.count or self.other:
            fifth()
"""


def test_the_table_is_of_this_source() -> None:
    """A statement for devices that is new, or written anew, must have run on one."""
    table = json.loads(TABLE.read_text())["files"]
    told = {(file, key) for file, keys in table.items() for key in keys}
    gc.disable()  # it would look at the nodes of all files again for every few that are new
    try:
        here = {(one.file, one.key) for one in device_lines.statements()}
    finally:
        gc.enable()
    assert here == told, f"not in {TABLE.name}: {here - told}; gone: {told - here}; again: {AGAIN}"


def test_what_was_not_reached_has_a_reason() -> None:
    table = json.loads(TABLE.read_text())
    reasons = [why for keys in table["files"].values() for why in keys.values() if why is not None]
    assert len(reasons) == table["not reached"] <= MOST_EXCEPTIONS
    assert all(reasons)


def test_statements_are_found_through_names_functions_and_attributes(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(SAMPLE)
    found = [one.key for one in device_lines.statements(tmp_path)]
    assert found == [
        "helper: return x + 1",
        "wait: first()",
        "wait: second = helper(x)",
        "wait: if x.type == 'meta':",
        "wait: third()",
        "wait: return second",
        "Kept.told: self.event = made()",
        "Kept.told: fourth()",
    ]
