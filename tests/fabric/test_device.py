"""Devices are known in one room: no other file spells a vendor's name, and what is missing is said."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shoal
from shoal.base.errors import PlanError
from shoal.fabric import device as devices
from shoal.fabric.device import (
    device_generators,
    get_device_capabilities,
    pick_device,
    process_group_backend,
)

SOURCE = Path(shoal.__file__).parent
NAMES = ("cuda", "nccl", "xpu", "hip")
MAY = {
    "base/estimates/facts.py": "a variable of the environment that a finished run writes down; knows no torch",
    "forecast/machines/catalogue.py": "sources of a catalogue's figures; knows no torch",
    "teach/screens/links.py": "what learners read",
    "launch/worker_failures.py": "words in the texts of exceptions; the room knows no torch",
    "trainer/step_trace.py": "a snapshot of memory that CUDA's allocator alone gives",
    "machine/device_pool.py": "a setting of CUDA's own allocator, and the only kind that has it",
    "trace/isolation/stream_weights.py": "names of the properties by which a tensor says where it is",
    "view/diagnosis/death_rules.py": "the settings of its allocator, in a command to type; the room knows no torch",
    "neighbours/without_cuda.py": "answers what scripts ask of it where it is not",
    "neighbours/flower.py": "refuses a process in which CUDA has begun, by CUDA's name",
    "neighbours/deepspeed.py": "the same, by DeepSpeed's names for it",
    "neighbours/accelerate.py": "the name of the file above",
    "neighbours/accelerate_state.py": "Accelerate's own names for kinds of runs",
    "view/traces/merged_trace.py": "names of a backend's ranges in a trace of torch's profiler",
    "view/traces/trace_summary.py": "names of a backend's kernels in such a trace",
    "replay/replay_lines.py": "whose sums repeat their bits only if asked, by ranks.json's names",
    "parallel/spmd/sequence_shards.py": "names of every attribute of a tensor that moves no data",
}
"""Files outside of fabric that spell a vendor's name in code, and why."""


def spelt(tree: ast.Module) -> Iterator[str]:
    """Names, attributes and texts of a file that contain a vendor's name; prose may."""
    prose = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        words = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
        if id(node) not in prose:
            yield from (word for word in words if set(NAMES) & set(parts(word)))


def parts(word: str) -> list[str]:
    """cudaHostRegister, is_cuda, "cuda:0" contain the same name; "ship" does not contain hip."""
    lower = word.lower()
    return [n for n in NAMES if n in lower and (n != "hip" or lower == n)]


def test_no_other_room_spells_a_vendors_name() -> None:
    found = {
        str(path.relative_to(SOURCE)): sorted(set(words))
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent.name != "fabric"
        and any(name in (text := path.read_text()).lower() for name in NAMES)
        and (words := list(spelt(ast.parse(text))))
    }
    assert set(found) == set(MAY), found


def test_groups_carry_host_tensors_and_a_devices() -> None:
    assert process_group_backend(torch.device("cpu")) == "gloo"
    assert process_group_backend(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert process_group_backend(torch.device("xpu", 0)) == "cpu:gloo,xpu:xccl"


def test_more_processes_than_devices_are_refused() -> None:
    told = (
        r"^launch.processes = 3: this machine shows 2 GPUs; try: launch.processes=2, or "
        r"CUDA_VISIBLE_DEVICES= to train on the CPU$"
    )
    with pytest.raises(PlanError, match=told):
        pick_device(0, 3, devices=2, bound=False)
    with pytest.raises(PlanError, match=r"launch.processes=1$"):
        pick_device(0, 3, devices=1, bound=False, kind="npu")
    assert pick_device(2, 3, devices=1, bound=True, kind="xpu") == torch.device("xpu", 0)


def test_what_a_device_lacks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(
        is_bf16_supported=lambda: False, get_device_name=lambda device: "Older 16GB"
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: older)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(devices, "accelerator_type", lambda: "cuda")
    get_device_capabilities.cache_clear()
    try:
        assert devices.missing_capabilities_line(torch.device("cuda", 0)) == (
            "Older 16GB: no bf16: precision.compute = auto means fp32; no flash attention: "
            "memory-efficient kernels or matrix products"
        )
    finally:
        get_device_capabilities.cache_clear()
    assert devices.missing_capabilities_line(torch.device("cpu")) == ""


def test_shapes_alone_are_no_device() -> None:
    assert not devices.is_accelerator(torch.device("meta"))
    assert not get_device_capabilities(torch.device("meta")).fused
    assert device_generators(torch.device("meta")) == []
