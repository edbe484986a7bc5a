"""Weights of ZeRO stage 3 as DeepSpeed's scripts gather them: `zero.GatheredParameters`.

Inside of the context a parameter, which is a rank's part, answers every function of torch as the
whole tensor, and the module's `state_dict()` has whole tensors on one rank alone, too. Nothing is
put in the module's place: a script holds the parameter itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shoal.parallel._torch import pytree
from shoal.trainer.full_state_dict import GIVE_COPIES
from shoal.trainer.run import Run

_wholes: dict[int, torch.Tensor] = {}
"""Gathered parameters by their ids → the whole tensor."""


class GatheredWeight(DTensor):
    """A parameter while it is gathered."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the function on whole tensors."""

        def swap(one: Any) -> Any:
            return _wholes.get(id(one), one) if isinstance(one, cls) else one

        args, kwargs = pytree.tree_map(swap, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextlib.contextmanager
def gather_parameters(
    parameters: Sequence[DTensor], run: Run, modifier_rank: int | None
) -> Iterator[None]:
    """Hold parameters whole on every rank while open; every rank calls it.

    Args:
        parameters: of the run's model, sharded over ranks.
        run: the run.
        modifier_rank: at the end its values are those of all ranks; None: changes are lost, as in
            DeepSpeed.
    """
    held = [one for one in parameters if id(one) not in _wholes]
    modules = [one for one in run.model.modules() if one not in GIVE_COPIES]
    kinds = [type(one) for one in held]
    with torch.no_grad():
        for one in held:
            one.__class__ = DTensor
            whole = one.full_tensor().detach().clone()
            _wholes[id(one)] = torch.nn.Parameter(whole, one.requires_grad)
            one.__class__ = GatheredWeight
    GIVE_COPIES.update(modules)
    try:
        yield
    finally:
        GIVE_COPIES.difference_update(modules)
        wholes = [_wholes.pop(id(one)) for one in held]
        for one in held:
            one.__class__ = DTensor
        if modifier_rank is not None:
            _scatter(held, wholes, run, modifier_rank)
        for one, kind in zip(held, kinds, strict=True):
            one.__class__ = kind


@torch.no_grad()
def _scatter(
    held: Sequence[DTensor], wholes: Sequence[torch.Tensor], run: Run, source: int
) -> None:
    """Write a rank's whole tensors into all ranks' parts."""
    with run.guards.writes.mark_own_step():
        for one, whole in zip(held, wholes, strict=True):
            told = whole.detach().contiguous()
            run.world.broadcast(told, source)
            copies = [Replicate()] * one.device_mesh.ndim
            replicated = DTensor.from_local(told, one.device_mesh, copies, run_check=False)
            parts = replicated.redistribute(placements=one.placements)
            one.to_local().copy_(parts.to_local())
