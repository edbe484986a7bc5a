"""Rooms of `src` that train nothing, on simulated devices: what they say of a device, and refuse there.

One process; prints {check: what went wrong}. `device_lines.py` counts the lines that are reached here.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import shoal
from shoal.base.errors import ConfigError, PlanError
from shoal.checkpoint.agreement.rank_pieces import HeldSlice
from shoal.checkpoint.format import boxes
from shoal.checkpoint.save.host_copy import HostCopy
from shoal.cli.workers import find_batch_worker
from shoal.fabric import device as devices
from shoal.fabric import start_world
from shoal.machine import matmul, measure
from shoal.machine.device_pool import AllocatorPool, describe_pool, read_device_pool
from shoal.machine.process_memory import peak_memory_bytes, reset_peak_memory
from shoal.machine.states import measure_peak_bytes
from shoal.models.catalog import build
from shoal.parallel.compiling import check_compiler
from shoal.proof import loop_proof
from shoal.trace.isolation.stream_weights import stream_weights
from shoal.trainer.statistics.tensor_statistics import squared_norms

MIB = 2**20
HERE = torch.device("cuda", 0)
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Adds to the table."""
    CHECKS[function.__name__] = function
    return function


def run_of(layout: str = "single", **asked: Any) -> Any:
    """A small Llama and AdamW on this device."""
    sizes = {"dim": 256, "layers": 2, "heads": 4}
    return shoal.parallelize(
        functools.partial(build, "llama", sizes, vocabulary=64, sequence=16),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        layout=layout,
        batch=2,
        **asked,
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1], rows[:, 1:]


def lacking(device: torch.device) -> int:
    raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")


@check
def statistics_of_a_devices_tensors_are_those_of_the_hosts() -> None:
    values = [torch.randn(3, 4), torch.randn(5)]
    found = squared_norms([one.to(HERE) for one in values])
    assert found.device.type == HERE.type
    torch.testing.assert_close(found.cpu(), squared_norms(values), rtol=1e-6, atol=0)


@check
def a_device_tells_what_it_is() -> None:
    assert devices.select_local_device(0, 1, bound=False) == HERE
    assert devices.pick_device(0, 2, devices=1, bound=True) == HERE
    assert devices.pick_device(0, 1, devices=0, bound=False) == devices.HOST
    with pytest.raises(PlanError, match="try: launch.processes=4, or CUDA_VISIBLE"):
        devices.select_local_device(0, 5, bound=False)
    assert devices.process_group_backend(HERE) == "cpu:gloo,cuda:nccl"
    assert devices.device_name(HERE) == "simulated"
    able = devices.get_device_capabilities(HERE)
    assert able == devices.DeviceCapabilities(fused=able.fused)
    lacks = "" if able.fused else "simulated: no fused optimizers: one kernel per operation"
    assert devices.missing_capabilities_line(HERE) == lacks
    assert devices.supports_flash(torch.zeros(1, 64, dtype=torch.bfloat16, device=HERE))
    assert not devices.supports_flash(torch.zeros(1, 60, dtype=torch.bfloat16, device=HERE))
    assert devices.missing_capabilities_line(devices.HOST) == ""
    assert devices.device_utilisation(HERE) == 0.5
    known, torch.cuda.utilization = torch.cuda.utilization, lacking
    assert devices.device_utilisation(HERE) is None
    torch.cuda.utilization = known
    assert devices.total_bytes(HERE) == torch.cuda.mem_get_info(HERE)[1]
    assert devices.device_generators() == list(torch.cuda.default_generators)
    assert devices.device_generators(HERE) == [torch.cuda.default_generators[0]]


@check
def a_group_that_exists_sends_from_the_device() -> None:
    torch.distributed.init_process_group(
        devices.process_group_backend(HERE),
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    assert devices.device_of_group() == HERE
    assert devices.supports_host_tensors(None)
    assert devices.runs_messages_in_order(None, HERE)
    torch.distributed.destroy_process_group()


@check
def steps_are_recorded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = run_of(folder=folder, trace="2:2")
        for _ in range(3):
            run.step(batch())
        run.close()
        traces = Path(folder) / "traces"
        told = json.loads((traces / "steps-2-2-rank-0.json").read_text())
        names = {one.get("name") for one in told["traceEvents"]}
        assert {"step 2"} == {name for name in names if str(name).startswith("step ")}
        held = json.loads((traces / "steps-2-2-rank-0-memory.json").read_text())
        assert sum(one["allocated_size"] for one in held) > 0


@check
def memory_is_counted() -> None:
    reset_peak_memory(HERE)
    before = devices.allocated_bytes(HERE)
    assert measure_peak_bytes(lambda: torch.zeros(MIB, device=HERE).add_(1), HERE) == 4 * MIB
    assert peak_memory_bytes(HERE) == before + 4 * MIB
    reserved = torch.cuda.memory_reserved(HERE)
    devices.empty_cache()
    assert torch.cuda.memory_reserved(HERE) <= reserved
    pool = read_device_pool(HERE)
    assert pool is not None
    assert pool.allocated_bytes == devices.allocated_bytes(HERE)
    assert describe_pool(pool).endswith(f"largest hole {describe_pool(pool).rsplit('hole ')[-1]}")
    assert "expandable_segments" in describe_pool(AllocatorPool(6 * MIB, 10 * MIB, 4 * MIB, MIB))
    assert devices.non_torch_bytes(HERE) == 0


@check
def weights_on_the_host_are_lent_to_a_pass() -> None:
    norm = nn.BatchNorm1d(4)
    sparse = torch.eye(3).to_sparse()
    with stream_weights(norm, HERE):
        out = norm(torch.arange(8.0, device=HERE).view(2, 4))
        assert norm.weight.device == HERE
        assert norm.weight.is_cuda
        assert norm.weight.to("cpu") is norm.weight
        assert copy.deepcopy(norm.running_mean).device == HERE
        norm.running_var.fill_(3.0)
        assert torch.equal(torch.sparse.mm(sparse, torch.eye(3)), torch.eye(3))
    assert out.device == HERE
    assert norm.running_var.tolist() == [3.0] * 4
    assert norm.running_var.device.type == "cpu"


@check
def a_machine_is_measured() -> None:
    world = start_world()
    sizes = measure.MeasurementSizes((32, 64, 2**15), (2**14, 2**16), (2**12,), 2**12, 1, 0.001, 1)
    measure.LONGEST_S, before = 1e9, torch.cuda.memory_reserved()
    with tempfile.TemporaryDirectory() as folder:
        told = measure.measure_machine(world, Path(folder), sizes)
        assert (told["kind"], told["device"]) == ("gpu", "simulated")
        assert told["memory_bytes"] == devices.total_bytes(HERE)
        assert [len(told["matrix"][kind]) for kind in ("fp64", "bf16")] == [2, 2], (
            "no room for more"
        )
        assert torch.cuda.memory_reserved() <= before, "what was measured with is kept"
        matmul.LARGEST, matmul.LONG_S = 2048, {"accelerator": 60.0}
        assert matmul.matmul_flops_per_s(world, "fp32", Path(folder)) > 0
    assert max(measure.quick_sizes(HERE).products) > max(measure.QUICK.products)


@check
def a_try_of_a_micro_batch_holds_no_more_than_it_may() -> None:
    told: list[tuple[float, torch.device]] = []
    known = torch.cuda.set_per_process_memory_fraction
    torch.cuda.set_per_process_memory_fraction = lambda *given: told.append(given)
    find_batch_worker.limit_memory(devices.total_bytes(HERE) // 4, HERE)
    torch.cuda.set_per_process_memory_fraction = known
    assert told == [(0.25, HERE)]


@check
def copies_are_pinned_until_they_grow_or_go() -> None:
    kept = HostCopy()
    for elements in (100, 1000):
        source = torch.arange(float(elements), device=HERE)
        shape = (elements,)
        block = HeldSlice("x", shape, "float32", boxes.whole(shape), source, 0, None)
        (copied,) = kept.copy_blocks([block])
        source.zero_()
        kept.wait_until_copied()
        assert torch.equal(copied.data, torch.arange(float(elements)))
    kept.free()


@check
def what_a_device_cannot_do_is_refused() -> None:
    with pytest.raises(PlanError, match="on a GPU torch.compile needs Triton"):
        check_compiler(HERE)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "triton.py").touch()
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        check_compiler(HERE)
        sys.path.remove(folder)
        importlib.invalidate_caches()
    with pytest.raises(PlanError, match="states in files are stepped by the CPU"):
        run_of(offload="optimizer", offload_to="files")


@check
def masters_that_were_loaded_are_read_by_the_next_pass() -> None:
    policies = ("parameters", "optimizer", "activations")
    for offload, precision in (*((one, "fp64") for one in policies), ("parameters", "bf16")):
        with tempfile.TemporaryDirectory() as folder:
            run = run_of(precision=precision, offload=offload)
            run.step(batch())
            run.save(folder)
            ours = [run.step(batch()).loss for _ in range(2)]
            assert run.restore(folder)
            again = [run.step(batch()).loss for _ in range(2)]
            run.close()
            assert ours == again, (offload, ours, again)


@check
def auto_means_bf16_here() -> None:
    run = run_of()
    assert run.plan.compute == "bf16"
    run.step(batch())
    run.close()


@check
def a_proof_that_does_not_fit_beside_the_run_is_left_out() -> None:
    run = run_of()
    with (
        patch.object(loop_proof, "free_device_bytes", return_value=0),
        pytest.raises(ConfigError, match="memory: one process in float64 takes"),
    ):
        loop_proof.refuse_device_shortage(run)
    run.close()


@check
def a_module_on_a_device_is_not_shared() -> None:
    from shoal.parallel.build.mmap_init import OpenFiles
    from shoal.parallel.build.weight_tables import SharedBuildError, make_weight_table

    with pytest.raises(SharedBuildError, match="weight is on cuda:0"):
        make_weight_table(nn.Linear(64, 64, device=HERE), OpenFiles())


def main() -> None:
    """All checks."""
    wrong = {}
    for name, function in CHECKS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        try:
            function()
        except Exception:
            wrong[name] = traceback.format_exc()
    print(json.dumps({"checks": list(CHECKS), "wrong": wrong}))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
