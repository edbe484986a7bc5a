"""Counts the forward passes of a model's root between the start of a run and its first step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import any_case
from shoal.fabric import World
from shoal.trainer.parallelize import parallelize


def passes(world: World, model: str, layouts: list[Any]) -> list[dict[str, Any]]:
    """For each layout: how often the root ran, and what the record says of it."""
    build, data = any_case._our_model(model)
    few = torch.utils.data.default_collate([data[k] for k in range(3)])
    told = []
    for layout in layouts:
        torch.manual_seed(0)
        module = build()
        ran = mock.Mock()
        own = type(module).forward

        def forward(self: Any, *inputs: Any, own: Any = own, ran: Any = ran, **named: Any) -> Any:
            ran()
            return own(self, *inputs, **named)

        with mock.patch.object(type(module), "forward", forward):
            run = parallelize(
                module,
                lambda p: torch.optim.SGD(p, lr=0.1),
                layout=layout,
                batch=8,
                micro_batch=2,
                sample=few,
                world=world,
            )
        told.append({"ran": ran.call_count, "passes": dict(run.program.passes)})
        for undo in run.program.on_close:
            undo()
    return told
