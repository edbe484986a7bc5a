"""One side of the comparison: the processes and the layout on which a trial trains.

A trial is a function that makes one run or several (a GAN) with `side.parallelize` and trains them.
It yields each run's label and result right after its every step. It is called twice, once per
side, and must do the same both times: nothing in it may look at ranks.

Before training, every parameter gets a small noise, keyed by its name. Biases that start at 0, norm
gains at 1 and symmetric weights would hide gradients that are 0 or equal by accident.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.base.layouts.layout import Layout
from shoal.base.plans.batches import default_turn
from shoal.base.plans.plan import Plan
from shoal.fabric import World
from shoal.parallel.buffers.sync_batch_norm import joins_ranks
from shoal.proof.reduced_model import cut_blocks, cuts_text
from shoal.proof.reference_limits import CannotProveError
from shoal.trainer.argument_checks import DEFAULT_BATCH
from shoal.trainer.guards.optimizer_checks import ScheduleLength
from shoal.trainer.parallelize import start_run
from shoal.trainer.run import Run
from shoal.trainer.step.call_contract import BuildOptimizer, Loss
from shoal.trainer.step.optimizer_step import StepResult

JITTER = 2.0**-50
"""A share of a weight: its last bits in float64, about what adding dozens of numbers in another
order makes."""

NOISE_SHARE, NOISE_FLOOR = 0.05, 0.01
"""Root mean square of the noise = floor + share of the parameter's. It is uniform: a normal number
in float64 takes four times as long, and every rank of a small model draws all of them."""

NOISE_ELEMENTS = 2**16
"""Elements of noise drawn at once: below the size from which tensors are built in a mapped file."""


@dataclass
class TrialSide:
    """Processes, layout and policies of one side of a trial.

    Attributes:
        world, layout: the processes and the layout, as `shoal.parallelize` takes them.
        optimizer: `params -> optimizer` of this trajectory.
        steps: optimizer steps of each run.
        clip: largest gradient norm.
        policies: more of `shoal.parallelize`'s arguments (defer_sync, recompute, …).
        on_run: called with every run as it is made, before its first step.
        runs: filled by `parallelize`: label → run.
        jitter: every weight is changed in its last bits: the resulting difference is rounding,
            and no mistake of a layout.
        blocks: blocks of a kind that a cut model keeps at least; 0: models stay whole.
        said: changes of the models for the proof.
    """

    world: World
    layout: str | Mapping[str, Any]
    optimizer: BuildOptimizer
    steps: int
    precision: str = "fp64"
    clip: float = 0.5
    seed: int = 3
    on_run: Callable[[str, Run], None] = lambda label, run: None
    policies: Mapping[str, Any] = field(default_factory=dict)
    jitter: bool = False
    blocks: int = 0
    runs: dict[str, Run] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def parallelize(
        self,
        build: Callable[[], nn.Module],
        loss: Loss | None = None,
        *,
        label: str = "",
        batch: int | None = None,
        micro_batch: int | None = None,
        call: str = "single",
        sample: Any = None,
    ) -> Run:
        """Make a run of this side over a freshly built, perturbed module.

        Without a micro-batch all layouts and the one process have an eighth of the batch.

        Args:
            build: returns a new module with the same weights at every call (it is called under
                `torch.manual_seed`).
            label: names the run where a trial has several.

        Raises:
            ShoalError: as `shoal.parallelize`.
            CannotProveError: the model computes over the micro-batches of several ranks.
        """

        def made() -> nn.Module:
            module = build()
            if self.precision == "fp64":
                self.said += unfuse_experts(module, self.undo)
            if self.blocks:
                self.said.append(cuts_text(cut_blocks(module, self.blocks)))
            perturb(module, label)
            return jitter_weights(module) if self.jitter else module

        plan = Plan(
            Layout(),
            batch or 0,
            micro_batch or default_turn(batch or DEFAULT_BATCH),
            compute=self.precision,
            clip=self.clip,
            seed=self.seed,
            skip_limit=self.steps + 1,
            call=call,
            **self.policies,
        )
        portions = {"batch": batch, "micro_batch": micro_batch}
        run = start_run(
            made,
            self.optimizer,
            loss,
            plan,
            self.layout,
            given=[name for name, value in portions.items() if value],
            length=ScheduleLength(),
            sample=sample,
            world=self.world,
        )
        if any(map(joins_ranks, run.model.modules())):
            raise CannotProveError(
                "the model's BatchNorm takes its statistics over all ranks (SyncBatchNorm, "
                "sync_batch_norm), and one process runs each rank's micro-batches by themselves; "
                "try: a proof of the model with nn.BatchNorm"
            )
        run.guards.writes.watching = False  # a proof says itself what differs, and where
        self.runs[label] = run
        self.on_run(label, run)
        return run

    def is_finished(self) -> bool:
        """Return whether every run has taken its steps."""
        return all(run.step_count >= self.steps for run in self.runs.values())

    def release(self) -> None:
        """Remove hooks from the modules; keep the world, since others use it."""
        for run in self.runs.values():
            for undo in run.program.on_close:
                undo()
        for undo in self.undo:
            undo()
        self.runs, self.undo = {}, []


Trial = Callable[[TrialSide], Iterable[tuple[str, StepResult]]]
"""Makes runs, trains them, yields (label, result) after every step of each; may go on for ever."""


def unfuse_experts(module: nn.Module, undo: list[Callable[[], None]]) -> list[str]:
    """Let transformers' expert layers compute one expert at a time: grouped products lack float64.

    Args:
        undo: gets a function that restores the model's configuration, which other models may share.

    Returns:
        The changes, as lines for the verdict.
    """
    kind, plain = "_experts_implementation", "eager"
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    found = [c for c in configs.values() if getattr(c, kind, plain) not in (plain, None)]
    for config in found:
        undo.append(partial(setattr, config, kind, getattr(config, kind)))
        setattr(config, kind, plain)
    return ["experts computed one by one (their grouped product has no float64)"] if found else []


def perturb(module: nn.Module, label: str = "") -> nn.Module:
    """Add keyed noise to every parameter, the frozen ones too, in place; return the module.

    Tied parameters get it once. The noise depends on the parameter's name and shape alone, hence
    not on layout, rank or order.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.is_floating_point() or not parameter.numel() or parameter.is_meta:
                continue  # without numbers: another rank's are put in (shared_build.py)
            key = hashlib.blake2b(f"{label}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
            stored = collapse_expanded(parameter.detach())
            size = float(torch.linalg.vector_norm(stored, dtype=torch.float64))
            scale = NOISE_FLOOR + NOISE_SHARE * size / stored.numel() ** 0.5
            # In rows: float64 noise for a whole table of fp32 would take twice its memory.
            rows = stored if stored.dim() else stored.view(1)
            for part in rows.split(max(1, NOISE_ELEMENTS * rows.shape[0] // rows.numel())):
                noise = torch.rand(part.shape, generator=generator, dtype=torch.float64)
                part.add_(noise.sub_(0.5).mul_(scale * 12**0.5).to(part))
    return module


def jitter_weights(module: nn.Module) -> nn.Module:
    """Change every number of every parameter by `JITTER`, up and down; return the float64 module.

    >>> module = nn.Linear(2, 1, bias=False)
    >>> before = module.weight.detach().double()
    >>> [
    ...     round(share)
    ...     for share in ((jitter_weights(module).weight / before - 1) / JITTER)[0].tolist()
    ... ]
    [1, -1]
    """
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                stored = collapse_expanded(parameter.detach())
                at = torch.arange(stored.numel(), device=stored.device).view(stored.shape)
                stored.mul_(1 + (1 - 2 * (at % 2).double()) * JITTER)
    return module


def collapse_expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of an expanded tensor in which every stored number appears once.

    >>> collapse_expanded(torch.zeros(3, 1).expand(3, 5)).shape
    torch.Size([3, 1])
    """
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and step == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
