"""Models of the table of any module, for tests that need no other process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shoal.trainer.step.call_contract import split_batch

sys.path.append(str(Path(__file__).parents[1] / "worlds"))

import any_case

LAYOUTS = any_case.LAYOUTS


def model_of(name: str) -> tuple[torch.nn.Module, Any, str]:
    """The model in float64, inputs of three samples, how it is called."""
    if name in any_case.OURS:
        build, data = any_case._our_model(name)
        few = torch.utils.data.default_collate([data[k] for k in range(3)])
        call = "single"
    else:
        example = any_case.examples()[name]
        build, data = example.build, any_case.Samples(example.inputs)
        few = any_case.joined([data[k] for k in range(3)])
        call = "kwargs" if isinstance(data.whole, dict) else "single"
    torch.manual_seed(0)
    inputs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, split_batch(few)[0]
    )
    return build().double(), inputs, call
