"""Data parallel: every rank holds the whole model, gradients are summed while backward still runs.

Each bucket of the plan is one flat buffer, and every `parameter.grad` is a view into it, so
gradients exist once in memory and accumulation happens in place. In the step's last backward pass
a post-accumulate hook counts the gradients that are ready; a full bucket's all-reduce starts at
once, always in the plan's order, which is the same on every rank and cannot deadlock. Earlier
micro-batches send nothing. The sum is not divided: the step divides by the global count of targets.

Source: Li et al. 2020 (PyTorch Distributed); differs from torch's DDP in fixed buckets (DDP
rebuilds them after step 1, which changes the rounding of sums on resume) and in never averaging.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from shoal.base.errors import PlanError
from shoal.base.plan import Bucket
from shoal.fabric import World
from shoal.parallel.program import Program


def apply(program: Program) -> Program:
    """Give the program a reducer that sums over all ranks in the plan's buckets."""
    reducer = BucketReducer(program.parameters, program.plan.buckets, program.world)
    return replace(program, reducer=reducer, on_close=(*program.on_close, reducer.close))


class BucketReducer:
    """The reducer of `ddp`; see `program.Reducer` for the order of calls."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], buckets: tuple[Bucket, ...], world: World
    ) -> None:
        self.parameters = parameters
        self.world = world
        self.flats: list[torch.Tensor] = []
        self.views: dict[str, torch.Tensor] = {}
        self.bucket_of: dict[str, int] = {}
        self.members: list[int] = []
        for number, bucket in enumerate(buckets):
            flat = torch.zeros(
                bucket.elements, dtype=getattr(torch, bucket.dtype), device=world.device
            )
            place = 0
            for name in bucket.names:
                parameter = parameters[name]
                part = flat[place : place + parameter.numel()]
                self.views[name] = _laid_out_like(parameter, part)
                self.bucket_of[name] = number
                place += parameter.numel()
            self.flats.append(flat)
            self.members.append(len(bucket.names))
        self.active = False
        self.armed = False
        self.seen: set[str] = set()
        self.missing: list[int] = []
        self.pending: list[dist.Work | None] = []
        self.norms: list[torch.Tensor] = []
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in parameters.items()
        ]

    def begin(self) -> None:
        """Zero the buffers and make every gradient a view into them."""
        torch._foreach_zero_(self.flats)
        for name, parameter in self.parameters.items():
            parameter.grad = self.views[name]
        self.active, self.armed = True, False
        self.seen, self.pending, self.norms = set(), [], []

    def arm(self) -> None:
        """Count ready gradients from here on and send full buckets."""
        self.armed = True
        self.missing = list(self.members)

    def finish(self) -> None:
        """Send what is left, in order, and wait for everything; the wait counts as exposed."""
        self.armed = False
        while len(self.pending) < len(self.flats):
            self._send()
        with self.world.traffic.waiting():
            for work in self.pending:
                if work is not None:
                    work.wait()
        # A work that is kept would keep its process group alive beyond `destroy`.
        self.pending = [None] * len(self.flats)
        self.active = False
        for name, parameter in self.parameters.items():
            # A tensor that is not the view was never summed: some code replaced it.
            if parameter.grad is not self.views[name]:
                raise PlanError(
                    f"{name}.grad was replaced during the backward pass (by a hook or by the "
                    f"model): its gradient is not in the buffer that ranks sum; leave .grad alone"
                )

    def close(self) -> None:
        """Leave the parameters as plain PyTorch has them: no hooks, no views into buffers."""
        for hook in self.hooks:
            hook.remove()
        for name, parameter in self.parameters.items():
            if parameter.grad is self.views[name]:
                parameter.grad = None

    def used(self) -> list[bool]:
        """Which parameters got a gradient on this rank."""
        return [name in self.seen for name in self.parameters]

    def local_norms(self) -> list[torch.Tensor]:
        """Norm of each bucket as this rank computed it."""
        return self.norms

    def buffers(self) -> list[torch.Tensor]:
        """The flat buffers."""
        return self.flats

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if not self.active:
                return
            self.seen.add(name)
            if not self.armed:
                return
            bucket = self.bucket_of[name]
            if bucket < len(self.pending) or self.missing[bucket] == 0:
                raise PlanError(
                    f"{name}: a second gradient arrived after its bucket was sent; the model runs "
                    f"backward twice within one micro-batch (checkpointing with use_reentrant=True "
                    f"does); use use_reentrant=False"
                )
            self.missing[bucket] -= 1
            while len(self.pending) < len(self.flats) and self.missing[len(self.pending)] == 0:
                self._send()

        return ready

    def _send(self) -> None:
        flat = self.flats[len(self.pending)]
        # Read before the sum mixes ranks: it tells whose numbers broke.
        self.norms.append(torch.linalg.vector_norm(flat))
        self.pending.append(self.world.sum(flat, wait=False))


def _laid_out_like(parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """`part` of a flat buffer, seen with the parameter's shape and order of elements in memory.

    torch's fused CPU kernels walk weight and gradient side by side in memory and ignore strides: a
    channels_last weight with a gradient in row order would get other elements' updates, silently.
    """
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return part.view_as(parameter)  # gaps or overlaps: autograd keeps row order for these too
    return part.as_strided(parameter.shape, parameter.stride())
