"""Private names of torch's `fully_shard` and DTensor; tested on 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor


@contextmanager
def allow_plain_tensors() -> Iterator[None]:
    """Let DTensor operations take plain tensors as replicated ones, equal on all ranks.

    torch's own context manager imports kernels of attention with it.
    """
    dispatcher: Any = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


def scattered_sizes(unit: Any) -> list[int]:
    """Return the sizes of the tensors that make up a rank's part of a unit's gradients, in order.

    Args:
        unit: one FSDPModule; its part is the padded rows of every trainable parameter.
    """
    state = unit._get_fsdp_state()  # 2.13 has several groups of parameters, earlier ones one
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [
        held.padded_sharded_param_size.numel()
        for group in filter(None, groups)
        for held in group.fsdp_params
        if held.sharded_param.requires_grad
    ]
