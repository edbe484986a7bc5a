"""Data parallel: parameters are replicated, and every rank gets the sum of all gradients.

If the plan lets forward passes read narrow copies (bf16, fp16), the optimizer steps fp32 masters.
The module's own parameters are then the copies, renewed once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from shoal.parallel.data_parallel.buckets import BucketReducer
from shoal.parallel.program import LocalParameter, Program, whole_local_parameters


def apply(program: Program, make: Callable[..., SumReducer] | None = None) -> Program:
    """Give the program a reducer that sums over all ranks in the plan's buckets.

    Args:
        make: factory of the reducer; None: `SumReducer`.
    """
    masters = _make_masters(program)
    local = {**whole_local_parameters(program), **masters}
    reducer = (make or SumReducer)(program, local, masters)
    return replace(
        program,
        reducer=reducer,
        local=local,
        parts={name: (one.parameter.detach(), one.shard) for name, one in masters.items()},
        on_close=(*program.on_close, reducer.close),
    )


def _make_masters(program: Program) -> dict[str, LocalParameter]:
    """Make fp32 masters of parameters that forward passes read narrow; cast these in place."""
    found = {}
    for bucket in program.plan.buckets:
        for name in bucket.names if bucket.compute else ():
            parameter = program.parameters[name]
            master = nn.Parameter(parameter.detach().clone())
            found[name] = LocalParameter(master, program.shard_of(name))
            parameter.data = parameter.data.to(getattr(torch, bucket.compute))
    return found


class SumReducer(BucketReducer):
    """Reducer that sums in buckets, and copies masters to the module after the optimizer's step."""

    def __init__(
        self,
        program: Program,
        local: Mapping[str, LocalParameter],
        masters: Mapping[str, LocalParameter],
    ) -> None:
        super().__init__(program, local)
        self.masters = masters
        self.copied_data = [program.parameters[name].data for name in masters]
        self.master_data = [one.parameter.data for one in masters.values()]

    def publish(self) -> None:
        """Copy the fp32 masters to the narrow parameters that forward passes read."""
        if self.copied_data:
            torch._foreach_copy_(self.copied_data, self.master_data)

    def close(self) -> None:
        """Make the fp32 masters the module's parameters, in its original dtype."""
        super().close()
        for name, one in self.masters.items():
            self.parameters[name].data = one.parameter.data
