"""The methods of islands, and the one place where a name finds its class."""

from __future__ import annotations

from shoal.base.errors import ConfigError, one_of
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.islands.method import Method
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
from shoal.islands.methods.sparse_loco import SparseLoCo

PLAIN: dict[str, type[Method]] = {
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
    )
}
"""Methods that need nothing but the policy, by name."""


def find_method(policy: IslandsPolicy, *, seed: int = 0) -> Method:
    """Find the class of `islands.method` and make it with the policy's settings.

    Args:
        policy: its open numbers are settled here.
        seed: `train.seed`: noloco draws its pairs from it.

    Raises:
        ConfigError: for an unknown method, "none" too, or for settings that it cannot have.
    """
    settled = policy.settled()
    if settled.method == NoLoCo.name:
        return NoLoCo(settled, seed)
    if settled.method not in PLAIN:
        raise ConfigError(one_of("islands.method", settled.method, (*PLAIN, NoLoCo.name)))
    return PLAIN[settled.method](settled)
