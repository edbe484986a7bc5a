"""A guard is one file and one row: it is called at its places, in order, where it is due."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_small import linear, pair, run_of

from guard_off import guard_classes
from shoal.base.errors import ConfigError
from shoal.trainer.guards.guard import Guard
from shoal.trainer.step.step_vector import Invariant, StepNumbers


class Toy(Guard):
    """Notes where it is called; ends the run where a loss is larger than a limit."""

    def __init__(self, every: int = 1, limit: float = 1e9) -> None:
        self.every, self.limit = every, limit
        self.calls: list[str] = []

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def before(self, step: int, batch: Any) -> None:
        self.calls.append(f"before {step}")

    @contextmanager
    def around(self, step: int, micro_batches: int) -> Iterator[None]:
        self.calls.append(f"enter {micro_batches}")
        yield
        self.calls.append("leave")

    def sums(self, step: int) -> Mapping[str, Sequence[float]]:
        self.calls.append("sums")
        return {"toy": [2.0]}

    def invariants(self, step: int) -> Sequence[Invariant]:
        self.calls.append("invariants")
        return [Invariant("toy", step, None)]

    def agree(self, step: int, numbers: StepNumbers) -> None:
        self.calls.append(f"agree {numbers.sums('toy')[0]:g} {numbers.invariants.by_rank('toy')}")
        loss_sum, count = numbers.sums("loss_and_count")
        if loss_sum / count > self.limit:
            raise ConfigError(f"step {step}: toy")

    def between(self, step: int) -> None:
        self.calls.append("between")

    def updating(self, step: int) -> None:
        self.calls.append("updating")

    def updated(self, step: int, *, skipped: bool) -> None:
        self.calls.append(f"updated {skipped}")

    def close(self) -> None:
        self.calls.append("close")


class Idle(Guard):
    """Overrides nothing."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("before", "around", "sums", "invariants", "agree", "updating", "updated"):
            raise AssertionError(f"{name} of a guard that has nothing to do there")
        return super().__getattribute__(name)


PASSES = ["enter 1", "sums", "invariants", "leave"]
"""Of `run.step`, whose passes and sum are one call; written-out passes are left before the sum."""


def test_a_guard_is_called_at_its_places_in_order() -> None:
    run, toy = run_of(linear()), Toy()
    run.guards.add(toy)
    run.guards.add(Idle())
    run.step(pair(4))
    step = ["before 1", *PASSES, "agree 2 [1]", "updating", "updated False"]
    assert toy.calls == step
    run.forward_backward(pair(4))
    run.update()
    halves = ["before 2", *PASSES, "agree 2 [2]", "between", "updating", "updated False"]
    assert toy.calls == [*step, *halves]
    toy.calls.clear()
    for micro in run.micro_batches(pair(4)):
        run.backward(((run.model(micro.inputs) - micro.targets) ** 2).sum(), 4)
    run.update()
    written = ["before 3", *PASSES, "agree 2 [3]", "between", "updating", "updated False"]
    assert toy.calls == written
    run.close()
    assert toy.calls[-1] == "close"


def test_a_guard_that_is_not_due_is_not_called() -> None:
    run, toy = run_of(linear()), Toy(every=2)
    run.guards.add(toy)
    for _ in range(3):
        run.step(pair(4))
    assert [call for call in toy.calls if call.startswith("before")] == ["before 2"]


def test_what_a_guard_finds_ends_the_step_before_its_update() -> None:
    run = run_of(linear())
    run.guards.add(Toy(limit=0.0))
    before = {name: value.clone() for name, value in run.state_dict().items()}
    with pytest.raises(ConfigError, match="step 1: toy"):
        run.step(pair(4))
    assert all(torch.equal(value, before[name]) for name, value in run.state_dict().items())


def test_an_update_that_is_refused_leaves_no_step_behind() -> None:
    run = run_of(linear())
    run.step(pair(4))
    run.forward_backward(pair(4))
    for parameter in run.model.parameters():
        parameter.grad = None
    with pytest.raises(ConfigError, match="gradients were set to None or zero"):
        run.update()
    with pytest.raises(ConfigError, match=r"run\.update was called before run\.forward_backward"):
        run.update()
    assert run.step(pair(4)).step == 2


def test_guards_that_are_off_compute_the_same_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    losses = {}
    for guards in ("on", "off"):
        run, toy = run_of(linear(), guards=guards), Toy()
        run.guards.add(toy)
        losses[guards] = [run.step(pair(4)).loss for _ in range(3)]
        assert bool(toy.calls) is (guards == "on")
        with torch.no_grad():
            next(iter(run.model.parameters())).grad = torch.ones(8, 4)
        if guards == "on":
            with pytest.raises(ConfigError, match="gradients were changed beside the run"):
                run.step(pair(4))
        else:
            run.step(pair(4))
            run.close()
            assert toy.calls == ["close"]
    assert losses["on"] == losses["off"]
    told = [record.getMessage() for record in caplog.records if "guards" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("shoal: guards = off: mistakes that change numbers are not")
    with pytest.raises(ConfigError, match="guards = of: not one of on, off; try: off"):
        run_of(linear(), guards="of")


def test_every_guard_has_tests_that_fail_without_it() -> None:
    """As `make proof PART=guards` found: a new guard comes with its tests."""
    kept = json.loads((Path(__file__).parents[2] / "proof" / "results" / "guards.json").read_text())
    assert set(kept) == set(guard_classes())
    assert all(kept.values())
