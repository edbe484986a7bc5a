"""What a wrong gradient is made of: shares of the gradients that single micro-batches gave.

A right gradient is the sum of the micro-batches' gradients, each taken once. In one process they
can be had one by one: G₀, G₁, …. A gradient g that a layout got wrong is then solved for shares,

    g ≈ c₀·G₀ + c₁·G₁ + …        least squares over all elements of all parameters

and the shares tell the mistake: all ½, a rank's micro-batches missing, weights that follow ranks.
If nothing but noise fits, the residual says so.

A wrong loss is no sum of right ones. There the step's forward passes are run once more in the one
process, with a suspected mistake made on purpose: one that gives the layout's very loss is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from shoal.parallel.program import Pass, Program, Reducer
from shoal.proof.trajectory_record import Tensors
from shoal.trainer._torch import pytree
from shoal.trainer.micro_batch import MicroBatch
from shoal.trainer.run import Run

SOLVABLE = 1e-12
"""Smallest ratio of eigenvalues of the Gram matrix for which shares are trusted."""


@dataclass
class Atoms:
    """Gradients of the loss sums of one step's micro-batches.

    gradients   one dict per micro-batch, in their order · ranks  how many the layout has: rank r
                runs micro-batches r, r + ranks, … · again  the step's forward passes, once more
    """

    ranks: int
    gradients: list[Tensors] = field(default_factory=list)
    again: Again | None = None

    def total(self) -> Tensors:
        """Their sum: what every rank should hold before it is divided by the count of targets."""
        return self.summed(range(len(self.gradients)))

    def summed(self, numbers: Sequence[int]) -> Tensors:
        """The sum over some micro-batches; parameters that none of them used are missing."""
        found: Tensors = {}
        for number in numbers:
            for name, gradient in self.gradients[number].items():
                found[name] = found[name] + gradient if name in found else gradient
        return found

    def by_rank(self) -> Atoms:
        """One atom per rank, where single micro-batches cannot be told apart."""
        count = len(self.gradients)
        each = [self.summed(range(rank, count, self.ranks)) for rank in range(self.ranks)]
        return Atoms(self.ranks, each)

    def rank_of(self, number: int) -> int:
        """The data rank that runs micro-batch `number`."""
        return number % self.ranks


class Again:
    """The forward passes of one step of one process, to be run again with a mistake in them."""

    def __init__(self, program: Program, passes: Sequence[MicroBatch]) -> None:
        """Called before the step: weights and buffers are kept as they are now."""
        self.program = program
        self.passes = [replace(one, program=program) for one in passes]
        self.kept = {name: tensor.detach().clone() for name, tensor in self._tensors()}

    @torch.no_grad()
    def loss(self, mistake: Callable[[nn.Module], AbstractContextManager[None]]) -> float:
        """The step's mean loss while `mistake` is made in the module."""
        module = self.program.module
        for name, tensor in self._tensors():
            tensor.copy_(self.kept[name])
        sums = torch.zeros(2, dtype=torch.float64, device=self.program.world.device)
        for begin in self.program.on_begin:
            begin()
        with mistake(module):
            for one in (replace(one, sums=sums) for one in self.passes):
                with one.entered():
                    one.total(one.outputs(module))
        total, count = sums.tolist()
        return float(total / count) if count else float("nan")

    @property
    def tokens(self) -> int:
        """The length of the step's first input along its second dim; 0 if it has none."""
        leaves = [t for t in pytree.tree_leaves(self.passes[0].parts[0]) if hasattr(t, "shape")]
        return leaves[0].shape[1] if leaves and leaves[0].dim() > 1 else 0

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.program.module.named_parameters()
        yield from self.program.module.named_buffers()


@dataclass(frozen=True)
class Shares:
    """How much of each micro-batch's gradient is in a gradient, and what they leave unexplained.

    values     one per micro-batch, 1.0 where it is right, NaN where it had no gradient here; None
               if they cannot be told apart
    residual   norm of what no shares explain over the norm of the gradient
    """

    values: tuple[float, ...] | None
    residual: float


def watch_micro_batches(run: Run, label: str, step: int, atoms: Atoms) -> None:
    """Fill `atoms` while `run`, which is one process, takes its step number `step` (from 1)."""
    program, passes = run.program, run.program.run
    before: Tensors = {}

    def noted(now: Program, given: Sequence[Pass], reducer: Reducer) -> None:
        mine = [one for one in given if isinstance(one, MicroBatch) and one.step + 1 == step]
        if mine:
            atoms.again = Again(program, mine)
        passes(now, given, reducer)

    @contextmanager
    def around(now: int, index: int) -> Iterator[None]:
        yield
        if now + 1 != step:
            return
        if not atoms.gradients:
            before.clear()
        mine: Tensors = {}
        for name, parameter in program.parameters.items():
            if parameter.grad is None:
                continue
            total = parameter.grad.detach().cpu().double().clone()
            full = f"{label}/{name}" if label else name
            mine[full] = total - before[full] if full in before else total
            before[full] = total
        atoms.gradients.append(mine)

    # Nothing is taken away from the module at the end: generators stay keyed for `atoms.again`.
    run.program = replace(program, around=(*program.around, around), run=noted, on_close=())


def shares(gradient: Tensors, atoms: Atoms, names: Sequence[str]) -> Shares:
    """Solve `gradient` for shares of the atoms over the parameters `names`."""
    count = len(atoms.gradients)
    gram = torch.zeros(count, count, dtype=torch.float64)
    right = torch.zeros(count, dtype=torch.float64)
    for name in names:
        rows = _rows(atoms, name, gradient[name])
        gram += rows @ rows.T
        right += rows @ gradient[name].double().flatten()
    size = torch.diagonal(gram).sqrt()
    active = size > 0
    if not bool(active.any()):
        return Shares(None, 1.0)
    scaled = gram[active][:, active] / size[active].outer(size[active])
    eigenvalues = torch.linalg.eigvalsh(scaled)
    if float(eigenvalues[0]) < SOLVABLE * float(eigenvalues[-1]):
        return Shares(None, 1.0)
    values = torch.zeros(count, dtype=torch.float64)
    values[active] = torch.linalg.solve(scaled, right[active] / size[active]) / size[active]
    left = whole = 0.0
    for name in names:
        wanted = gradient[name].double().flatten()
        rest = wanted - values @ _rows(atoms, name, gradient[name])
        left += float(rest @ rest)
        whole += float(wanted @ wanted)
    residual = (left / whole) ** 0.5 if whole else 0.0
    values[~active] = torch.nan
    return Shares(tuple(values.tolist()), residual)


def _rows(atoms: Atoms, name: str, like: torch.Tensor) -> torch.Tensor:
    """The atoms of one parameter, one row per micro-batch: [micro-batches, elements]."""
    none = torch.zeros(like.numel(), dtype=torch.float64)
    return torch.stack([g[name].flatten() if name in g else none for g in atoms.gradients])
