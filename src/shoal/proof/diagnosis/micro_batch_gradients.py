"""Composition of a wrong gradient: shares of the gradients of single micro-batches.

A right gradient is the sum of the micro-batches' gradients, each taken once. In one process they
can be had one by one: G₀, G₁, …. A gradient g that a layout got wrong is then solved for shares,

    g ≈ c₀·G₀ + c₁·G₁ + …        least squares over all elements of all parameters

and the shares identify the mistake: all ½, a rank's micro-batches missing, weights that follow
ranks. If nothing but noise fits, the residual is large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from shoal.proof.tensor_spill import Tensors, TensorSpill
from shoal.trainer.run import Run

SOLVABLE = 1e-12
"""Smallest ratio of eigenvalues of the Gram matrix for which shares are trusted."""


@dataclass
class MicroBatchGradients:
    """Gradients of the loss sums of one step's micro-batches.

    Attributes:
        gradients: one dict per micro-batch, in their order.
        ranks: number in the layout: rank r runs micro-batches r, r + ranks, …
        shelf: where the tensors are stored.
    """

    ranks: int
    gradients: list[Tensors] = field(default_factory=list)
    shelf: TensorSpill = field(default_factory=TensorSpill)

    def sum_gradients(self, numbers: Sequence[int]) -> Tensors:
        """Return the sum over some micro-batches, without parameters that none of them used."""
        some = [self.gradients[number] for number in numbers]
        names = dict.fromkeys(name for one in some for name in one)
        return self.shelf.keep(
            (n, sum_tensors([one[n] for one in some if n in one])) for n in names
        )

    def by_rank(self) -> MicroBatchGradients:
        """Return one atom per rank, for micro-batches that cannot be told apart."""
        count = len(self.gradients)
        each = [self.sum_gradients(range(rank, count, self.ranks)) for rank in range(self.ranks)]
        return MicroBatchGradients(self.ranks, each, self.shelf)

    def rank_of(self, number: int) -> int:
        """Return the data rank that runs micro-batch `number`."""
        return number % self.ranks


@dataclass(frozen=True)
class GradientShares:
    """Share of each micro-batch's gradient in a gradient, and the unexplained residual.

    Attributes:
        values: one per micro-batch, 1.0 where it is right, NaN where it had no gradient here; None
            if they cannot be told apart.
        residual: norm of the unexplained part over the norm of the gradient.
    """

    values: tuple[float, ...] | None
    residual: float


def watch_micro_batches(
    atoms: MicroBatchGradients, label: str, step: int, of: str, run: Run
) -> None:
    """Fill `atoms` while a run of one process takes a step.

    Args:
        label, step: the run, and which of its steps, from 1.
        of, run: the label and the run as it is made.
    """
    if of != label:
        return
    program = run.program
    before: dict[str, torch.Tensor] = {}

    @contextmanager
    def around(now: int, index: int) -> Iterator[None]:
        yield
        if now + 1 != step:
            return
        if not atoms.gradients:
            before.clear()
        mine = atoms.shelf.keep(())
        for name, parameter in program.parameters.items():
            if parameter.grad is None:
                continue
            total = parameter.grad.detach().cpu().double().clone()
            full = f"{label}/{name}" if label else name
            mine.add(full, total - before[full] if full in before else total)
            before[full] = total
        atoms.gradients.append(mine)

    run.program = replace(program, around=(*program.around, around))


def sum_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of some tensors, one at least."""
    first, *others = tensors
    for tensor in others:
        first = first + tensor
    return first


def solve_shares(
    gradient: Tensors, atoms: MicroBatchGradients, names: Sequence[str]
) -> GradientShares:
    """Solve `gradient` for shares of the micro-batches' gradients over the parameters `names`."""
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
        return GradientShares(None, 1.0)
    scaled = gram[active][:, active] / size[active].outer(size[active])
    eigenvalues = torch.linalg.eigvalsh(scaled)
    if float(eigenvalues[0]) < SOLVABLE * float(eigenvalues[-1]):
        return GradientShares(None, 1.0)
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
    return GradientShares(tuple(values.tolist()), residual)


def _rows(atoms: MicroBatchGradients, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the atoms of one parameter, one row per micro-batch: [micro-batches, elements]."""
    none = torch.zeros(like.numel(), dtype=torch.float64)
    return torch.stack([g[name].flatten() if name in g else none for g in atoms.gradients])
