"""Make an optimizer over whole parameters step this rank's pieces of them instead.

It stays the same object with the same groups in the same order, so learning-rate schedulers and
other holders go on working. Existing state is cut like the parameters. Optimizers step 1-D views of
flat buffers as fast as plain tensors, and much faster than DTensors (0.88 against 2.55 ms for the
same weights, design §4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.base.errors import BugError, PlanError
from shoal.optim.named_state import inner_optimizers, sliced_keys

Cut = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(whole parameter, tensor of its shape) → this rank's part of the tensor, as its piece is cut."""


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    local: Mapping[Any, nn.Parameter | None],
    cut: Cut,
) -> None:
    """Replace an optimizer's parameters by the pieces that this rank steps, and cut its state.

    Args:
        local: parameter that the optimizer holds → the piece that this rank steps, None if it steps
            no piece of it; a parameter may map to itself. Frozen ones may be missing.
        cut: returns the part of a state tensor that belongs to a piece, in any shape; its elements
            are copied, so that the whole can be freed.

    Note:
        Changes the optimizer in place: groups stay, even empty ones; numbers and 0-dim state are
        kept. State is read from `optimizer.state`, and from that of inner optimizers.

    Raises:
        PlanError: state that cannot be cut: its shape is neither the parameter's nor a number's.
        BugError: a trainable parameter is not in `local`. Either is raised before any change.
    """
    states = {id(one.state): one for one in (optimizer, *inner_optimizers(optimizer))}
    moved = [(one, _cut_state(one, local, cut)) for one in states.values()]
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            if parameter not in local and parameter.requires_grad:
                raise BugError(
                    f"optimizer: the layout has no piece for a trainable parameter, place {place}, "
                    f"shape {list(parameter.shape)}"
                )
    for group in optimizer.param_groups:
        _replace(group, local)
    for one, state in moved:
        one.state.clear()  # the same dict: an inner optimizer may share it
        one.state.update(state)


def _replace(group: dict[str, Any], local: Mapping[Any, nn.Parameter | None]) -> None:
    pieces = [local.get(parameter, parameter) for parameter in group["params"]]
    if "param_names" in group:  # made from named_parameters(): keep the names in step
        pairs = zip(group["param_names"], pieces, strict=True)
        group["param_names"] = [name for name, piece in pairs if piece is not None]
    group["params"][:] = [piece for piece in pieces if piece is not None]


def _cut_state(
    optimizer: torch.optim.Optimizer,
    local: Mapping[Any, nn.Parameter | None],
    cut: Cut,
) -> dict[Any, Any]:
    """Return the optimizer's state by piece; entries under other keys are kept."""
    sliced = sliced_keys(optimizer)
    state: dict[Any, Any] = {}
    for parameter, entries in optimizer.state.items():
        piece = local.get(parameter, parameter)
        if piece is parameter:
            state[parameter] = entries
        elif piece is not None:
            state[piece] = {
                key: _cut_value(optimizer, parameter, piece, (key, value), key in sliced, cut)
                for key, value in entries.items()
            }
    return state


def _cut_value(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    piece: torch.Tensor,
    entry: tuple[str, Any],
    sliced: bool,
    cut: Cut,
) -> Any:
    key, value = entry
    if not isinstance(value, torch.Tensor):
        return value
    if sliced and value.shape == parameter.shape:
        part = torch.empty_like(piece, dtype=value.dtype, requires_grad=False)
        return part.copy_(cut(parameter, value).reshape(piece.shape))
    if value.ndim == 0 or piece.shape == parameter.shape:
        return value
    raise PlanError(
        f"optimizer: {type(optimizer).__name__} has stepped already and keeps {key} of shape "
        f"{list(value.shape)} for a parameter of shape {list(parameter.shape)}, which cannot be "
        f"cut with it; hand over an optimizer that has not stepped; try: layout ddp"
    )
