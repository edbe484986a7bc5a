"""Where the time of a step goes: a profile of each program of the speed comparison, and the first cause.

Only the device and the runtime's calls are profiled, since recording operators slows the host. A CPU
and a simulated device have no kernels in a profile: there the same lines read one that was made.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from child import Sheet
from device import ON_GPU, pick, synchronize
from profile_reading import Reading, compare, first_cause, read_profile
from speed import WARM_UP, data_of
from training_programs import ARGUMENTS, Setting, alone, initial_weights, make, micro_batch, timed

STEPS = pick(3, 1)
MADE = Path(__file__).resolve().parent / "made_profiles"
PEERS = ("fsdp2", "pytorch")
CPU, CUDA = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA


def profiles(sheet: Sheet) -> None:
    """A row for each program, then what both comparisons say in words."""
    setting = Setting(ARGUMENTS, micro_batch())
    world = alone()
    weights, _ = initial_weights(setting)
    data = data_of(setting, world)
    readings: dict[str, Reading] = {}
    for name in ("shoal", *PEERS):
        with sheet.row(f"profile of {name}") as told:
            program = make(name, setting, world, weights, "single")
            for n in range(WARM_UP):
                program.step(*data[n])
            seconds = [timed(lambda made=program: made.step(*data[0])) for _ in range(2 * STEPS)]
            reading, told["made"] = profiled(program, data, statistics.median(seconds), setting)
            told.update(setting.as_json(), cause=first_cause(reading), **reading.as_json())
            readings[name] = reading
            del program
    with sheet.row("the first cause") as told:
        ours = readings["shoal"]
        told["made"], told["cause"] = not kernels_in_profiles(), first_cause(ours)
        for peer in PEERS:
            told[f"beside {peer}"] = compare(ours, readings[peer], peer)


def kernels_in_profiles() -> bool:
    """Whether the profiler sees kernels here."""
    return ON_GPU and CUDA in torch.profiler.supported_activities()


def profiled(
    program: Any, data: list[Any], step_s: float, setting: Setting
) -> tuple[Reading, bool]:
    """(the reading of some steps, whether a made profile was read, for want of kernels)."""
    kinds = [CUDA] if kernels_in_profiles() else [CPU]
    events = profiled_events(program, data, kinds)
    if kinds == [CPU]:
        return read_made(json.loads((MADE / "launches.json").read_text())), True
    if not any(one.get("cat") == "kernel" for one in events):  # a profiler that wants both
        events = profiled_events(program, data, [CPU, CUDA])
    passes = setting.block_passes
    return read_profile(events, step_s=step_s, steps=STEPS, block_passes=passes), False


def profiled_events(program: Any, data: list[Any], kinds: list[Any]) -> list[dict[str, Any]]:
    """The trace of some steps."""
    synchronize()
    with torch.profiler.profile(activities=kinds) as profile:
        for n in range(STEPS):
            program.step(*data[n])
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def read_made(made: dict[str, Any]) -> Reading:
    """The reading of a made profile."""
    return read_profile(
        made["traceEvents"],
        step_s=made["step_s"],
        steps=made["steps"],
        block_passes=made["block_passes"],
    )
