"""How long a step takes whose states wait on the host: our own copies and waits, on a clock.

The code that runs is the code that trains; only its lane counts seconds. Kernels and copies last as
the planner has them for a 13B on one named GPU, at the sizes of a small twin whose bytes each stand
for as many more. A stream does one thing after the other; waits are those that the code asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.base.estimates.estimate import PlanningCase
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.memory.offloaded_bytes import predict_copies
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.forecast.time.step_time import predict_time
from shoal.models.catalog import build
from shoal.models.loss import token_loss
from shoal.parallel.offload import optimizer_state, parameters
from shoal.parallel.offload.copy_stream import CopyStream
from shoal.parallel.offload.optimizer_state import stream_state
from shoal.parallel.placement_rows import ModelDivision, derive_placements
from shoal.parallel.program import bind_placements, make_undivided_program
from shoal.planning.gradient_buckets import BUCKET_BYTES, plan_buckets

CPU = torch.device("cpu")


class Clock(CopyStream):
    """A lane whose copies and kernels take time: three streams, and the same things in a row."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(CPU)
        self.bytes_per_s = bytes_per_s
        self.at = {"compute": 0.0, "out": 0.0, "back": 0.0}
        self.serial_s = 0.0

    def copy_to_host(
        self, tensor: torch.Tensor, host: torch.Tensor | None = None
    ) -> tuple[Any, Any]:
        return super().copy_to_host(tensor, host)[0], self._takes("out", tensor)

    def copy_to_device(
        self, host: torch.Tensor, into: torch.Tensor | None = None
    ) -> tuple[Any, Any]:
        return super().copy_to_device(host, into)[0], self._takes("back", host)

    def wait(self, event: float) -> None:
        self.at["compute"] = max(self.at["compute"], event)

    def kernels(self, seconds: float) -> None:
        self.at["compute"] += seconds
        self.serial_s += seconds

    @property
    def makespan_s(self) -> float:
        return max(self.at.values())

    def _takes(self, stream: str, tensor: torch.Tensor) -> float:
        seconds = tensor.nbytes / self.bytes_per_s
        # As `CopyStream._copy`: not before what was computed so far.
        self.at[stream] = max(self.at[stream], self.at["compute"]) + seconds
        self.serial_s += seconds
        return self.at[stream]


SEQUENCE, VOCABULARY, ROUNDS = 8, 61, 2
TWIN = {"dim": 32, "layers": 40, "heads": 4}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def case() -> PlanningCase:
    """llama-2-13b on one RTX 4090, as `shoal plan` proposes it."""
    cluster = parse_machines("1xRTX4090-24GB")
    model = transformer_facts(published_shape("llama-2-13b"), 2048, 2)
    plan = Plan(Layout(), 8, 4, ROUNDS, compute="bf16", recompute="full", offload="parameters")
    return PlanningCase(model, cluster, plan)


class Twin:
    """A small model, on a clock that runs slower by the ratio of their sizes."""

    def __init__(self, case: PlanningCase) -> None:
        self.case, self.parts = case, predict_time(case).parts
        torch.manual_seed(0)
        self.module = build("llama", TWIN, vocabulary=VOCABULARY, sequence=SEQUENCE)
        plan = replace(case.plan, placements=(), buckets=())
        program = make_undivided_program(self.module, plan, World(ProcessInfo(), CPU, None))
        self.elements = sum(p.numel() for p in self.module.parameters())
        real = sum(unit.count * unit.parameters for unit in case.model.units)
        self.clock = Clock(case.cluster.host_bytes_per_s * self.elements / real)
        program = bind_placements(
            program, derive_placements(self.module, plan, ModelDivision(), CPU).values()
        )
        bucket_bytes = BUCKET_BYTES * self.elements // real
        buckets = plan_buckets(program.plan.placements, plan.layout, 0, bucket_bytes)
        self.program = program.but(buckets=buckets)

    def step(self, monkeypatch: pytest.MonkeyPatch) -> float:
        """Run a whole step of streamed parameters; seconds of its passes alone."""
        monkeypatch.setattr(parameters, "CopyStream", lambda device: self.clock)
        program = parameters.apply(self.program)
        reducer: Any = program.reducer
        for block in program.blocks:
            self._computes(self.module.get_submodule(block))
        tokens = torch.randint(VOCABULARY, (2, SEQUENCE))
        reducer.start_step(ROUNDS)
        for index in range(ROUNDS):
            reducer.prepare_backward(index == ROUNDS - 1)
            with torch.autocast("cpu", torch.bfloat16):
                total, _ = token_loss(self.module(tokens), tokens)
            total.backward()
            reducer.end_backward(True)
        reducer.finish()
        passes_s = self.clock.makespan_s
        assert set(self.clock.at.values()) != {0.0}
        self.clock.at = dict.fromkeys(self.clock.at, passes_s)  # the host has waited
        masters = [local.parameter for local in program.local.values()]
        self.update(masters, program.reducer.weights)
        reducer.publish()
        return passes_s

    def update(self, masters: list[nn.Parameter], weights: Any, *, pieces: int = 60) -> None:
        """The optimizer's step, twice: in the first one there is no state to bring yet."""
        optimizer = torch.optim.AdamW(masters, lr=1e-3)
        optimizer.register_step_pre_hook(self._steps)
        size_bytes = 4 * self.elements // pieces
        stream_state(optimizer, CPU, weights, piece_bytes=size_bytes, least_bytes=1)
        counted = dict(self.clock.at), self.clock.serial_s
        optimizer.step()
        self.clock.at, self.clock.serial_s = counted
        optimizer.step()

    def _steps(self, optimizer: torch.optim.Optimizer, *given: Any) -> None:
        held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        self.clock.kernels(self.parts["optimizer"] * held / self.elements)

    def _computes(self, block: nn.Module) -> None:
        """Kernels of a block and its layers, behind what it waits for: its hooks were hung before.

        A quarter is forward; of the backward pass a third is the forward pass again, at its start.
        """
        names = ("matrix", "elementwise", "recompute")
        each_s = sum(self.parts.get(name, 0.0) for name in names) / ROUNDS / TWIN["layers"]
        self._takes(block, 0.0, each_s / 4)
        whole = sum(p.numel() for p in block.parameters())
        for part in block.modules():
            share = sum(p.numel() for p in part.parameters(recurse=False)) / whole
            if share:
                self._takes(part, share * each_s / 4, share * each_s / 2)

    def _takes(self, part: nn.Module, forward_s: float, backward_s: float) -> None:
        part.register_forward_pre_hook(lambda *_: self.clock.kernels(forward_s))

        def behind(part: nn.Module, inputs: Any, outputs: torch.Tensor) -> None:
            outputs.register_hook(lambda gradient: self.clock.kernels(backward_s))

        part.register_forward_hook(behind)


def test_a_13b_on_one_device_takes_six_tenths_of_its_parts_in_a_row(
    case: PlanningCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(case)
    passes_s = twin.step(monkeypatch)
    share = twin.clock.makespan_s / twin.clock.serial_s
    assert 0.4 < share <= 0.6, (share, passes_s, twin.clock.makespan_s, twin.clock.serial_s)
    # The planner foresees the same, but for the host's own pass over the sums.
    found = predict_copies(
        case, 13.0e9, 0.0, twin.parts["optimizer"], case.cluster.host_bytes_per_s
    )
    scaled_s = 2 * 13.0e9 * 4 / case.cluster.host_bytes_per_s
    foreseen_s = found.optimizer_s + found.offload_s - scaled_s
    assert twin.clock.makespan_s - passes_s == pytest.approx(foreseen_s, rel=0.1)
    assert passes_s == pytest.approx(
        sum(twin.parts.get(name, 0.0) for name in ("matrix", "elementwise", "recompute")), rel=0.1
    )


def test_state_comes_and_goes_at_once(case: PlanningCase) -> None:
    """memory.offload = optimizer: the step alone, which nothing but itself can hide."""
    twin = Twin(case)
    masters = list(twin.module.parameters())
    for parameter in masters:
        parameter.grad = torch.zeros_like(parameter)

    def lane(device: torch.device) -> Clock:
        return twin.clock

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_state, "CopyStream", lane)
        twin.update(masters, None)
    assert twin.clock.makespan_s / twin.clock.serial_s <= 0.6
    found = predict_copies(
        case.but(offload="optimizer"), 13.0e9, 0.0, twin.parts["optimizer"],
        case.cluster.host_bytes_per_s,
    )  # fmt: skip
    assert twin.clock.makespan_s == pytest.approx(found.optimizer_s + found.offload_s, rel=0.1)
