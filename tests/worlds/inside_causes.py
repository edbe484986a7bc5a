"""Names mistakes inside Shoal that our tests plant: the looks that they hand to `Battery(inside=…)`.

The product tells a user where and how much a layout differs and along which axis, since nobody but
us could mend more. Our tests ask for more: each planted bug must be told apart from all others, by
its name. What can be wrong is known by subject:

    forward_mistakes.py       a forward pass, by making each mistake in one process
    inside_norms.py           what a gradient norm counts, and how often
    inside_divided.py         sums over tensor, context and pipeline ranks
    inside_experts.py         sums over ranks that hold experts
    inside_data_parallel.py   sums over data ranks, buckets and micro-batches
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from forward_mistakes import wrong_loss
from inside_data_parallel import never_summed, sync_each, tie, whole_scale
from inside_divided import border, dropped, factor, replicas, tie_twice
from inside_experts import experts
from inside_norms import norm_of_parts
from shoal.fabric import World
from shoal.proof import Battery
from shoal.proof.diagnosis.causes import explain_difference
from shoal.proof.diagnosis.clue import Clue
from shoal.proof.diagnosis.evidence import CauseTest, Evidence
from shoal.proof.diagnosis.gradient_sums import GradientSums

Reader = Callable[[GradientSums, Evidence], Clue | None]
"""Recognises one family of mistakes in a step's wrong gradients."""

READERS: tuple[Reader, ...] = (
    replicas,
    experts,
    never_summed,
    tie_twice,
    tie,
    factor,
    whole_scale,
    dropped,
    sync_each,
    border,
)
"""In the order in which they explain each other."""


def wrong_gradient(evidence: Evidence) -> Clue | None:
    """The mistake that gives the first wrong gradient."""
    if evidence.sums is None or not evidence.sums.names:
        return None
    # Other counts of targets explain themselves, except where a micro-batch is missing.
    counted = any(d.what == "targets" for d in evidence.comparison.differences)
    for read in (dropped,) if counted else READERS:
        clue = read(evidence.sums, evidence)
        if clue is not None:
            return clue
    return None


INSIDE: tuple[CauseTest, ...] = (wrong_loss, norm_of_parts, wrong_gradient)
"""What `Battery(inside=…)` takes."""


@dataclass
class AsUsers:
    """A look that names nothing, and keeps what users are told of the same difference."""

    told: dict[str, Any] = field(default_factory=dict)

    def __call__(self, evidence: Evidence) -> None:
        clue = explain_difference(evidence)
        self.told = {**asdict(clue), "text": clue.text()}


def explained(battery: Battery, world: World, layout: Any) -> dict[str, Any]:
    """A report whose cause is named by the looks above; on rank 0 "users" is what users are told."""
    users = AsUsers()
    report = replace(battery, inside=(users, *INSIDE)).prove(world, layout)
    return {**report, "users": users.told}
