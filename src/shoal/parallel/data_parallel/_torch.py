"""What torch's fully sharded units keep in private names, for codes of gradients; 2.11 and 2.13."""

from __future__ import annotations

from typing import Any


def scattered_sizes(unit: Any) -> list[int]:
    """Give the sizes of the tensors that a rank's part of a unit's gradients consists of, in order.

    Args:
        unit: one FSDPModule; its part is padded rows of every parameter that trains.
    """
    state = unit._get_fsdp_state()  # 2.13 has several groups of parameters, earlier ones one
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [
        held.padded_sharded_param_size.numel()
        for group in filter(None, groups)
        for held in group.fsdp_params
        if held.sharded_param.requires_grad
    ]
