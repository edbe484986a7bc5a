"""Two sides of a habit: a run on ranks, and plain PyTorch on the whole batch in one process.

    script.begin(model, optimizer, loss)    a `shoal.Run`, or a `PlainRun` with the same methods
    script.batch(step)                      this rank's samples of a step, or all of them
    script.note(x)                          a number that the user reads: both sides must agree

A habit is one function, which both sides run. Shares of ranks are uneven (5 and 3 samples) and cut
into micro-batches of 2, so that a mean of means, a coupling of samples and a count that does not add
up give other numbers than the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.fabric import World

DRAWN = torch.Generator().manual_seed(5)
X = torch.randn(64, 6, generator=DRAWN, dtype=torch.float64)
Y = X[:, :3] * 2 + torch.randn(64, 3, generator=DRAWN, dtype=torch.float64)
CLASSES = torch.randint(3, (64,), generator=DRAWN)
SEQUENCES = 0.5 * torch.randn(64, 4, 6, generator=DRAWN, dtype=torch.float64)
NEXT = SEQUENCES[..., :3] * 2 + SEQUENCES[..., 3:].cumsum(1)
"""Sequences of four tokens and their targets, for cp; a step's gradients are as large as above."""
ROWS = 8
"""Samples of a step over all ranks."""
CUTS = {1: (0, 8), 2: (0, 5, 8), 4: (0, 3, 4, 6, 8)}
"""Bounds of the samples of a step, by the number of shares."""


class Block(nn.Module):
    """A residual MLP, as tensor parallelism splits it."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Chain(nn.Module):
    """Four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


class LongBlock(Block):
    """Causal attention over tokens, then the residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (  # the gradient of a key's bias would be zero
            nn.Linear(6, 6, bias=name != "key") for name in ("query", "key", "value")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = [one(x).unsqueeze(1) for one in (self.query, self.key, self.value)]
        seen = F.scaled_dot_product_attention(*mixed, is_causal=True).squeeze(1)
        return super().forward(x + seen)


class LongChain(Chain):
    """Four blocks with attention and a head, on sequences [sample, token, feature]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(LongBlock() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != SEQUENCES.ndim:
            raise NotApplicableError
        return super().forward(x)


class Stack(nn.Module):
    """Two experts, stacked; each token has one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(0.3 * torch.randn(2, *s)) for s in ((6, 8), (8, 6)))

    def forward(self, x: Any, chosen: Any, weights: Any) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number in range(len(self.up)):
            rows, place = torch.where(chosen == number)
            one = (x[rows] @ self.up[number]).tanh() @ self.down[number]
            out = out.index_add(0, rows, one * weights[rows, place, None])
        return out


class Mixture(Chain):
    """Four blocks, a mixture of two experts and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 2), Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        weights, chosen = self.router(x).softmax(-1).topk(1)
        return self.head(x + self.experts(x, chosen, weights))


@dataclass(frozen=True)
class Setting:
    """A layout of the matrix.

    Attributes:
        layout: as `shoal.parallelize` takes it.
        ranks: processes.
        shares: into how many shares a step's samples are cut; ranks of tp and pp hold equal ones.
        share: the share of a rank.
        model: takes the place of `Chain`, which this layout cannot split.
        columns: inputs and targets of all samples.
    """

    layout: Any
    ranks: int = 2
    shares: int = 2
    share: Callable[[int], int] = int
    model: type[nn.Module] | None = None
    columns: tuple[torch.Tensor, ...] = (X, Y)


LONG = partial(Setting, model=LongChain, columns=(SEQUENCES, NEXT))
SETTINGS = {
    "single": Setting("single", 1, 1),
    **{name: Setting(name) for name in ("ddp", "zero2", "fsdp")},
    **{name: Setting(name, shares=1, share=lambda rank: 0) for name in ("tp", "pp")},
    "zero1": Setting("zero1"),
    "hsdp": Setting({"dp_replicate": 2, "dp_shard": 2}, 4, 4),
    "tp_fsdp": Setting({"dp_shard": 2, "tp": 2}, 4, share=lambda rank: rank // 2),
    "tp_ddp": Setting({"dp_replicate": 2, "tp": 2}, 4, share=lambda rank: rank // 2),
    "pp_ddp": Setting({"pp": 2, "dp_replicate": 2}, 4, share=lambda rank: rank % 2),
    "pp_fsdp": Setting({"pp": 2, "dp_shard": 2}, 4, share=lambda rank: rank % 2),
    "cp": LONG({"cp": 2}, shares=1, share=lambda rank: 0),
    "cp_fsdp": LONG({"cp": 2, "dp_shard": 2}, 4, share=lambda rank: rank // 2),
    "ep": Setting({"dp_replicate": 2, "ep": 2}, model=Mixture),
    "ep_fsdp": Setting({"dp_shard": 4, "ep": 2}, 4, 4, model=Mixture),
}
"""Layouts by name; the first six are those of every habit. In cp and ep a habit with a model or
data of its own is not applicable."""


class NotApplicableError(Exception):
    """A habit has a model or data that the layout cannot take."""


PLACE = {"layout": "single"}
"""The layout whose habit runs now; `net` makes the model that it can split."""


def net(kind: Callable[[], nn.Module] = Chain) -> nn.Module:
    torch.manual_seed(0)
    other = SETTINGS[PLACE["layout"]].model
    if other is not None and kind is not Chain:
        raise NotApplicableError
    return (other or kind)().double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs - targets).square().sum(), len(targets)


@dataclass
class PlainRun:
    """The script in plain PyTorch: one process, the whole batch, one backward pass a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], Any]
    clip: float = 0.0
    call: str = "single"

    def _outputs(self, inputs: Any) -> Any:
        return self.model(**inputs) if self.call == "kwargs" else self.model(inputs)

    def forward_backward(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        inputs, targets = (batch, batch) if isinstance(batch, dict) else batch
        found = self.loss(self._outputs(inputs), targets)
        total, count = found[:2] if isinstance(found, tuple) else (found.sum(), found.numel())
        self._last = total / count
        self._last.backward()

    def update(self) -> Any:
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return SimpleNamespace(loss=float(self._last))

    def step(self, batch: Any) -> Any:
        self.forward_backward(batch)
        return self.update()

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        self.optimizer.zero_grad()
        self._last = torch.zeros(())
        inputs, targets = (batch, batch) if isinstance(batch, dict) else batch
        yield SimpleNamespace(inputs=inputs, targets=targets, index=0)

    def backward(
        self, loss: torch.Tensor, count: Any = None, *, retain_graph: bool = False
    ) -> None:
        one = loss if count is None else loss / count
        self._last = self._last + one.detach()
        one.backward(retain_graph=retain_graph)

    def total(self, count: Any) -> float:
        return float(count)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def clip_grad_value_(self, clip_value: float) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), clip_value)

    def evaluate(self, data: Any, metrics: Any = None) -> dict[str, float]:
        samples = [data[place] for place in range(len(data))]
        inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
        self.model.eval()
        with torch.no_grad():
            outputs = self.model(inputs)
            found = {"loss": self.loss(outputs, targets)}
            found |= {name: one(outputs, targets) for name, one in (metrics or {}).items()}
        self.model.train()
        return {name: float(total) / float(count) for name, (total, count) in found.items()}

    def predict(self, inputs: Any) -> Any:
        self.model.eval()
        with torch.no_grad():
            outputs = self.model(inputs)
        self.model.train()
        return outputs

    def whole_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: one.detach() for name, one in self.model.state_dict().items()}


@dataclass
class Script:
    """One side of a habit.

    Attributes:
        world: the ranks; None: plain PyTorch.
        layout: the layout of the run.
        noted: numbers that the user reads.
        notes_alone: rank 0 alone notes them.
        run: the last run that began.
    """

    world: World | None
    layout: str
    noted: list[float] = field(default_factory=list)
    notes_alone: bool = False
    run: Any = None

    @property
    def plain(self) -> bool:
        return self.world is None

    @property
    def rank(self) -> int:
        return 0 if self.world is None else self.world.rank

    @property
    def shares(self) -> int:
        """Return the number of shares of a step's samples under the layout, on both sides."""
        return SETTINGS[self.layout].shares

    @property
    def own_share(self) -> int:
        """Return the number of this rank's share; 0 in plain PyTorch."""
        return 0 if self.plain else SETTINGS[self.layout].share(self.rank)

    @property
    def alone(self) -> bool:
        """Return whether this side holds every sample of a step."""
        return self.plain or self.shares == 1

    def begin(
        self,
        model: nn.Module | None = None,
        optimizer: Any = sgd,
        loss: Any = squares,
        *,
        sample: Any = None,
        **more: Any,
    ) -> Any:
        """Begin a run, or the plain script; `optimizer` is an optimizer or a function."""
        model = net() if model is None else model
        if type(model) is not (SETTINGS[self.layout].model or type(model)):
            raise NotApplicableError
        if self.world is None:
            keys = {key: more[key] for key in ("clip", "call") if key in more}
            made = optimizer
            if not isinstance(made, torch.optim.Optimizer):
                made = optimizer(p for p in model.parameters() if p.requires_grad)
            self.run = PlainRun(model, made, loss, **keys)
            return self.run
        if any(axis in self.layout for axis in ("tp", "pp", "cp", "ep")):
            more["sample"] = self.batch(0) if sample is None else sample
        more.setdefault("micro_batch", 2)
        self.run = shoal.parallelize(
            model,
            optimizer,
            loss,
            SETTINGS[self.layout].layout,
            world=self.world,
            precision="fp64",
            **more,
        )
        return self.run

    def share(self, step: int, *columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return this side's rows of a step, of every column."""
        first, rows = step * ROWS % 64, slice(0, ROWS)
        if not self.alone:
            rows = slice(*CUTS[self.shares][self.own_share :][:2])
        return tuple(column[first : first + ROWS][rows] for column in columns)

    def batch(self, step: int) -> tuple[torch.Tensor, ...]:
        return self.share(step, *SETTINGS[self.layout].columns)

    def note(self, *values: Any) -> None:
        """Keep numbers that both sides must have in common."""
        for value in values:
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                self.noted += whole.detach().double().flatten().tolist()
            else:
                self.noted.append(float(value))

    def is_only_reader(self) -> bool:
        """Return whether this side is the only one that notes numbers: rank 0, or plain PyTorch."""
        self.notes_alone = True
        return self.rank == 0

    def train(self, run: Any, steps: int = 3, batch: Any = None) -> None:
        """Take steps by `run.step`, and note their losses."""
        for step in range(steps):
            self.note(run.step((batch or self.batch)(step)).loss)

    def passes(self, run: Any, step: int, batch: Any = None) -> None:
        """Write out the passes of a step: forward, loss, backward; no update."""
        for micro in run.micro_batches((batch or self.batch)(step)):
            total, count = squares(run.model(micro.inputs), micro.targets)
            run.backward(total, count)

    def result(self) -> dict[str, list[float]]:
        """Return the weights and the noted numbers."""
        found = {
            name: one.detach().double().flatten().tolist()
            for name, one in self.run.state_dict().items()
        }
        return {**found, "noted": self.noted}
