"""Merge methods of islands, found by name."""

from __future__ import annotations

from shoal.base.errors import ConfigError, format_choice_error
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.islands.method import MergeMethod
from shoal.islands.methods.averaging import (
    BranchTrainMerge,
    DiLoCo,
    FedAvg,
    FedProx,
    LocalSGD,
    StreamingDiLoCo,
)
from shoal.islands.methods.fedopt import FedOpt
from shoal.islands.methods.noloco import NoLoCo
from shoal.islands.methods.scaffold import Scaffold
from shoal.islands.methods.sparse_loco import SparseLoCo

PLAIN: dict[str, type[MergeMethod]] = {
    kind.name: kind
    for kind in (
        LocalSGD,
        DiLoCo,
        StreamingDiLoCo,
        FedAvg,
        FedProx,
        FedOpt,
        BranchTrainMerge,
        SparseLoCo,
        Scaffold,
    )
}
"""Methods that need only the policy, by name."""


def find_method(policy: IslandsPolicy, *, seed: int = 0) -> MergeMethod:
    """Instantiate the class of `islands.method` with the policy's settings.

    Args:
        policy: its unset numbers get the method's defaults.
        seed: `train.seed`, from which noloco draws its pairs.

    Raises:
        ConfigError: the method is unknown or "none", or its settings are not allowed.
    """
    settled = policy.resolved()
    if settled.method == NoLoCo.name:
        return NoLoCo(settled, seed)
    if settled.method not in PLAIN:
        raise ConfigError(
            format_choice_error("islands.method", settled.method, (*PLAIN, NoLoCo.name))
        )
    return PLAIN[settled.method](settled)
