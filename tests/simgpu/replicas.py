"""`dp` over several simulated devices of one process, held against one process: {check: what went wrong}.

python replicas.py CHECK …     CASE-DEVICES of the battery, or a check by name; the last line is JSON
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "worlds"))

import shoal
import trajectory
from shoal.base.errors import PlanError
from shoal.fabric import start_world
from shoal.fabric.device import peak_bytes
from shoal.proof.battery import SGD
from shoal.view.proof_lines import proof_text

STEPS = 3
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Adds to the table."""
    CHECKS[function.__name__] = function
    return function


def equals_one_process(case: str, devices: int) -> None:
    """By design §6, in float64: losses, gradients and weights of whole steps and a short one."""
    report = trajectory.prove(start_world({}), case, "dp", devices, steps=STEPS, optimizer=SGD)
    assert report["verdict"] == "equal", proof_text(report)
    assert report["layout"] == f"dp (threads = {devices})"


class Own(nn.Module):
    """A module with what makes replicas differ: each by a switch.

    moving   a moving mean of its own, in a buffer · drawn  hides inputs by Python's generator
    table    a tensor that is no buffer
    """

    def __init__(self, *switches: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.head, self.switches, self.factor = nn.Linear(16, 1), switches, 1.0
        self.register_buffer("mean", torch.zeros(6))
        self.kept = {"table": [torch.linspace(0.5, 1.5, 6, dtype=torch.float64)]}
        self.ran_on: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran_on.append(str(x.device))
        if "table" in self.switches:
            x = x * self.kept["table"][0]
        if "moving" in self.switches and self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            x = x - self.mean
        if "drawn" in self.switches:
            x = x * (1.0 if random.random() < 0.5 else 0.25)
        return self.head(self.layers(x)) * self.factor


def batch(step: int, samples: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randn(samples, 7, generator=torch.Generator().manual_seed(step)).double()
    return drawn[:, :6], drawn[:, 6:]


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighed by counts that differ between micro-batches."""
    weights = (targets > 0).to(outputs)
    return (weights * (outputs - targets) ** 2).sum(), weights.sum()


def run_of(layout: Any, *switches: str, **asked: Any) -> Any:
    model = Own(*switches).double().to("cuda:0")
    model.kept["table"] = [one.to("cuda:0") for one in model.kept["table"]]
    return shoal.parallelize(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        **{"loss": loss, "batch": 12, "micro_batch": 2, "precision": "fp64", **asked},
        layout=layout,
        world=start_world({}),
    )


def trained(layout: Any, *switches: str, between: Callable[[Any, int], None] | None = None) -> Any:
    """(losses, all weights and buffers) of four steps, one of them short."""
    run, losses = run_of(layout, *switches), []
    for step in range(4):
        if between is not None:
            between(run, step)
        losses.append(run.step(batch(step, 12 if step != 2 else 6)).loss)
    state = {name: one.cpu().clone() for name, one in run.model.state_dict().items()}
    run.close()
    return losses, state, run


def same(*switches: str, devices: int = 2, **how: Any) -> Any:
    """One process and `dp` compute the same; gives the run of `dp`."""
    losses, state, _ = trained("single", *switches, **how)
    ours, held, run = trained({"threads": devices}, *switches, **how)
    assert ours == pytest.approx(losses, rel=1e-12, abs=0)
    for name, one in state.items():
        torch.testing.assert_close(held[name], one, rtol=1e-12, atol=1e-14, msg=name)
    return run


def replicas_of(run: Any) -> Any:
    return run.program.run.__self__


@check
def a_module_of_ones_own() -> None:
    run = same("table", devices=4)
    assert not replicas_of(run).in_turn
    for number, module in enumerate(replicas_of(run).modules):
        assert set(module.ran_on) == {f"cuda:{number}"}


@check
def buffers_without_a_rule_are_handed_on() -> None:
    assert replicas_of(same("moving", devices=3)).in_turn


@check
def draws_of_the_host_belong_to_no_thread() -> None:
    assert replicas_of(same("drawn")).in_turn


@check
def replicas_follow_what_a_loop_changes() -> None:
    def between(run: Any, step: int) -> None:
        run.model.factor = 1.0 + step
        run.model.layers[1].train(step != 1)
        if step == 3:
            with torch.no_grad():
                run.model.mean.fill_(2.0)
                run.model.head.bias.fill_(0.5)

    run = same(between=between)
    for module in replicas_of(run).modules[1:]:
        assert module.factor == 4.0
        assert float(module.mean.sum()) == 12.0


@check
def a_buffer_that_changes_late_ends_the_run() -> None:
    run = run_of({"threads": 2})
    run.step(batch(0))
    for module in replicas_of(run).modules:
        module.switches = ("moving",)
    with pytest.raises(PlanError, match=r"changed the buffer mean for the first time after its fi"):
        run.step(batch(1))
    run.close()


@check
def too_many_replicas_are_refused() -> None:
    told = (
        r"^layout.threads = 5: dp has a replica on each of so many devices, and this process sees "
        r'4; try: layout={"threads": 4}$'
    )
    with pytest.raises(PlanError, match=told):
        run_of({"threads": 5})
    with pytest.raises(PlanError, match='^offload = activations: .*layout="ddp"$'):
        run_of({"threads": 2}, offload="activations")


@check
def a_loss_with_tensors_of_one_device_is_told() -> None:
    weights = torch.ones((), dtype=torch.float64, device="cuda:0").expand(2, 1)
    own = lambda y, t: (weights * (y - t) ** 2).sum(1)  # noqa: E731
    run = run_of({"threads": 2}, loss=own)
    with pytest.raises(PlanError, match=r"the replica on cuda:1 met a tensor of another device"):
        run.step(batch(0))
    run.close()


@check
def bytes_and_memory_are_as_foreseen() -> None:
    """Weights out and gradients back, once a step; the optimizer's state on the first alone."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512))

    run = shoal.parallelize(
        build, lambda p: torch.optim.AdamW(p, lr=1e-3), loss=lambda y, t: ((y - t) ** 2).mean(1),
        layout={"threads": 4}, batch=8, micro_batch=1, world=start_world({}),
    )  # fmt: skip
    size = 4 * sum(p.numel() for p in run.model.parameters())
    data = torch.randn(8, 512), torch.randn(8, 512)
    run.step(data)
    traffic = run.world.traffic
    traffic.pop_counts()
    traffic.pop_counts = lambda: ({}, 0.0)  # else the row of metrics.jsonl has it
    for index in range(4):
        torch.cuda.reset_peak_memory_stats(index)
    run.step(data)
    assert dict(traffic.sent_bytes) == {"broadcast": 3 * size, "send": 3 * size}
    peaks = [peak_bytes(torch.device("cuda", index)) for index in range(4)]
    assert peaks[0] - max(peaks[1:]) > 1.9 * size
    # Weights and gradients, and a second micro-batch's gradients before they are added: 2.75 here.
    assert max(peaks[1:]) < 2.9 * size
    run.close()


def main() -> None:
    torch.set_num_threads(1)
    wrong: dict[str, str] = {}
    names = sys.argv[1:] or list(CHECKS)
    for name in names:
        case, _, devices = name.partition("-")
        try:
            with sdpa_kernel(SDPBackend.MATH):  # what the device has
                CHECKS[name]() if name in CHECKS else equals_one_process(case, int(devices))
        except Exception:
            wrong[name] = traceback.format_exc()
    print(json.dumps({"checks": names, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
