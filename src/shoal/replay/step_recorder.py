"""Record digests of the tensors of a replayed step: weights, outputs of parts, gradients.

Weights and gradients are gathered whole, one tensor at a time, on rank 0, so they are the same on
every layout but for rounding. Outputs are recorded where the model's own modules are called: each
rank's in its order, joined to one digest per part. A step's gradients are gathered before the
update and divided by the step's targets: clipping would spread a difference over all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shoal.parallel.build.full_state import iterate_gradients, iterate_weights
from shoal.parallel.compare_weights import tensor_digest
from shoal.replay.step_marks import (
    AFTER,
    BEFORE,
    FORWARD,
    GRADIENTS,
    Marks,
    StepMarks,
    TensorMark,
)
from shoal.trainer._torch import pytree
from shoal.trainer.run import Run
from shoal.trainer.step.optimizer_step import StepResult

DIGITS = 16
"""Hex digits of a digest: by chance two of a million tensors agree once in 10⁷ records."""
SKETCHES, SKETCH_WIDTH = 4, 1024


class StepRecorder:
    """Recorder of the tensors of some steps of a run (collective: every rank makes one).

    Args:
        first_step: tensors of steps before it are not recorded.
        nudge: share of each weight by which it is moved before the first step; 0: none is.
        on_step: called after each step.
        before_step: called with the number of each step, before it.

    Attributes:
        environment: versions of libraries and digests of the user's sources, as a checkpoint's
            record has them.
    """

    def __init__(
        self,
        first_step: int,
        *,
        nudge: float = 0.0,
        on_step: Callable[[], object] = lambda: None,
        before_step: Callable[[int], object] = lambda step: None,
    ) -> None:
        self.first_step, self.nudge = first_step, nudge
        self.on_step, self.before_step = on_step, before_step
        self.steps: list[StepMarks] = []
        self.environment: dict[str, Any] = {}
        self._weights: Marks | None = None
        self._gradients: Marks = {}
        self._outputs: OutputDigests | None = None

    def begin(self, run: Run) -> None:
        """Prepare the first step, before it; weights are gathered if it is to be recorded."""
        self.environment = {key: run.extra_record.get(key) for key in ("versions", "code")}
        self._observe_updates(run)
        if self.nudge:
            nudge_weights(run.program.parameters.values(), self.nudge)
        self._prepare(run, run.step_count + 1)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Record a step that was just taken, and prepare the next one."""
        self.on_step()
        if result.step >= self.first_step:
            outputs = self._outputs.collect_marks(run) if self._outputs is not None else {}
            gradients, self._gradients = self._gradients, {}
            before, after = self._weights or {}, mark_tensors(iterate_weights(run.program))
            marks = {BEFORE: before, FORWARD: outputs, GRADIENTS: gradients, AFTER: after}
            self.steps.append(StepMarks(result.step, marks))
            self._weights = after
        self._prepare(run, result.step + 1)

    def _observe_updates(self, run: Run) -> None:
        """Record the gradients of each step that is to be recorded, before its update."""
        right = run.update_weights

        def update_weights() -> StepResult:
            tally = run.step_state.tally
            if tally is not None and run.step_count + 1 >= self.first_step:
                divisor = float(tally.count) * run.scale or 1.0
                each, _ = iterate_gradients(run.program)
                self._gradients = mark_tensors((name, one / divisor) for name, one in each)
            return right()

        vars(run)["update_weights"] = update_weights

    def after_rewind(self, run: Run) -> None:
        """Prepare the next step of a run that went back to a checkpoint."""
        self._weights = None
        if self._outputs is not None:
            self._outputs.collect_marks(run)
        self._prepare(run, run.step_count + 1)

    def _prepare(self, run: Run, step: int) -> None:
        self.before_step(step)
        if step < self.first_step:
            return
        if self._weights is None:
            self._weights = mark_tensors(iterate_weights(run.program))
        if self._outputs is None:
            self._outputs = OutputDigests(run.model)


class OutputDigests:
    """Digests of the outputs of a model's parts: its children, and members of its lists of layers.

    Args:
        model: the module as this rank calls it; parts that a layout replaces are not called, and
            have no digest.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, Any] = {}
        self.sums: dict[str, list[float]] = {}  # squares, elements, sketch
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, part in list_parts(model):
            part.register_forward_hook(self._make_hook(name))

    def _make_hook(self, name: str) -> Any:
        def add(module: nn.Module, inputs: Any, outputs: Any) -> None:
            del inputs
            if not module.training or not torch.is_grad_enabled():
                return
            for tensor in pytree.tree_leaves(outputs):
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    seen = self.calls.setdefault(name, hashlib.sha256())
                    seen.update(tensor_digest(tensor).encode())
                    sums = self.sums.setdefault(name, [0.0] * (2 + SKETCHES))
                    each = (_square(tensor), tensor.numel(), *sketch_tensor(tensor))
                    sums[:] = [old + new for old, new in zip(sums, each, strict=True)]
                    self.shapes.setdefault(name, tuple(tensor.shape))

        return add

    def collect_marks(self, run: Run) -> Marks:
        """Return the marks of all outputs since the last call, joined over ranks (collective)."""
        mine = {
            name: [seen.hexdigest(), self.sums[name], list(self.shapes[name])]
            for name, seen in self.calls.items()
        }
        self.calls, self.sums, self.shapes = {}, {}, {}
        ranks = run.world.gather_json(mine)
        found: Marks = {}
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            held = [rank[name] for rank in ranks if name in rank]
            joined = hashlib.sha256("".join(one[0] for one in held).encode()).hexdigest()
            square, count, *sketch = (
                sum(each) for each in zip(*(one[1] for one in held), strict=True)
            )
            found[name] = TensorMark(
                tuple(held[0][2]), joined[:DIGITS], square**0.5, int(count), tuple(sketch)
            )
        return found


def list_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the parts whose outputs are recorded: children, or the layers in lists of layers.

    >>> layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    >>> [name for name, _ in list_parts(nn.ModuleDict({"embed": nn.Embedding(4, 2), "h": layers}))]
    ['embed', 'h.0', 'h.1']
    """
    for name, child in model.named_children():
        has_lists = any(isinstance(one, nn.ModuleList) for one in child.modules())
        if isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict) or has_lists:
            yield from ((f"{name}.{inner}", part) for inner, part in list_parts(child))
        else:
            yield name, child


def nudge_weights(weights: Iterable[torch.Tensor], share: float) -> None:
    """Move each weight by a share of it, at least by one rounding: one up, the next one down.

    What one rounding does to later steps is what rounding does to them on any layout.
    """
    for weight in weights:
        local = weight.detach()
        signs = torch.ones(local.numel(), dtype=local.dtype, device=local.device)
        signs[1::2] = -1
        local.mul_(1 + max(share, torch.finfo(local.dtype).eps) * signs.view(local.shape))


def mark_tensor(tensor: torch.Tensor) -> TensorMark:
    """Return a tensor's shape, digest, norm and sketch."""
    digest, norm = tensor_digest(tensor)[:DIGITS], _square(tensor) ** 0.5
    return TensorMark(tuple(tensor.shape), digest, norm, tensor.numel(), sketch_tensor(tensor))


def mark_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Marks:
    """Return the marks of named tensors, in their order."""
    return {name: mark_tensor(tensor) for name, tensor in named}


def sketch_tensor(tensor: torch.Tensor) -> tuple[float, ...]:
    """Return sums of a tensor's elements under fixed random signs: [sketches].

    The sign of element i is a product of two, sᵢ = a[i mod w]·b[i // w], so no vector of the
    tensor's size is drawn. E(Σ sᵢ·xᵢ)² = ‖x‖².
    """
    flat = tensor.detach().reshape(-1).double()
    rows = -(-flat.numel() // SKETCH_WIDTH)
    padded = torch.nn.functional.pad(flat, (0, rows * SKETCH_WIDTH - flat.numel()))
    across, down = (_draw_signs(size).to(flat.device) for size in (SKETCH_WIDTH, rows))
    sums = (padded.view(rows, SKETCH_WIDTH) @ across * down).sum(0)
    return tuple(sums.tolist())


def _draw_signs(size: int) -> torch.Tensor:
    """Return random signs that depend on the size alone: [size, sketches], of 1 and −1."""
    keys = torch.Generator().manual_seed(size)
    return torch.randint(0, 2, (size, SKETCHES), generator=keys).double() * 2 - 1


def _square(tensor: torch.Tensor) -> float:
    return float(torch.sum(tensor.detach().double() ** 2))
