"""Broadcast a micro-batch of one rank to ranks that have none, in a run's first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.base.errors import ConfigError
from shoal.fabric import World


def broadcast_spare_batch(world: World, own: Any) -> Any:
    """Return, on every rank, the last micro-batch of the first rank that has one.

    Args:
        world: the ranks that make this call together.
        own: this rank's last micro-batch, or None.

    Raises:
        ConfigError: it holds other objects than tensors, numbers and texts; on all ranks.
    """
    source = -world.all_reduce_max(-(world.size if own is None else world.rank))
    tensors: list[torch.Tensor] = []
    told = world.broadcast_json(_describe_batch(own, tensors), source)
    if told is None:
        raise ConfigError(
            "the first step has no sample for some ranks, which must run the model with the "
            "others, and what others have is more than tensors, numbers and texts in tuples, "
            "lists and dicts; try: a smaller micro_batch, or layout zero2"
        )
    held = iter(tensors)

    def receive(kind: str, shape: list[int]) -> torch.Tensor:
        if world.rank == source:
            sent = next(held)
        else:
            sent = torch.zeros(shape, dtype=getattr(torch, kind))
        raw = sent.detach().contiguous().reshape(-1).view(torch.uint8).to(world.device)
        if raw.numel():
            world.broadcast(raw, source)
        return raw.to(sent.device).view(sent.dtype).reshape(sent.shape)

    return _rebuild_batch(told, receive)


def _describe_batch(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a micro-batch as JSON, its tensors as dtype and shape; None if impossible."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if value is None or isinstance(value, str | bool | int | float):
        return ["plain", value]
    if type(value) in (tuple, list):
        parts = [_describe_batch(one, tensors) for one in value]
        return None if None in parts else [type(value).__name__, parts]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        named = {key: _describe_batch(one, tensors) for key, one in value.items()}
        return None if None in named.values() else ["dict", named]
    return None


def _rebuild_batch(told: Any, receive: Callable[[str, list[int]], torch.Tensor]) -> Any:
    """Rebuild a micro-batch from its description."""
    kind, *said = told
    if kind == "tensor":
        return receive(*said)
    if kind == "plain":
        return said[0]
    if kind == "dict":
        return {key: _rebuild_batch(one, receive) for key, one in said[0].items()}
    parts = [_rebuild_batch(one, receive) for one in said[0]]
    return tuple(parts) if kind == "tuple" else parts
