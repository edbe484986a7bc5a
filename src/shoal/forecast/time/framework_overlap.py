"""What differs between frameworks that run one layout: what they hide, send and compute again.

A published run can only be compared with a prediction that knows whose step it is.
Sources: DeepSpeed's pipeline engine (gradients are reduced after the last backward pass, stages
send activations in parts), Megatron-LM's options, torchtitan's selective recompute (every second
product is kept), Korthikanti et al. 2022 (attention's core runs again).
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.errors import PlanError, one_of


@dataclass(frozen=True)
class Habits:
    """One framework's way.

    Attributes:
        hides_gradients, hides_parameters: sends them while computing, where the device can do both.
        hides_update: zero 1 and 2: gathers the stepped weights beside the next forward pass.
        splits_messages: a pipeline's activations travel in tp parts.
        selective: shares that selective recompute runs again: products, attention, the rest.
        root_bytes: of an element of the weights outside blocks when gathered, and of gradients,
            where the compute format is narrower; 0: as narrow as that.
        wait_share: of the hidden communication, what slows the compute beside it down (σ − 1).
    """

    hides_gradients: bool = True
    hides_parameters: bool = True
    hides_update: bool = False
    splits_messages: bool = False
    selective: tuple[float, float, float] = (0.0, 0.0, 1.0)
    root_bytes: int = 4
    wait_share: float = 0.15


MEGATRON_SELECTIVE = (0.0, 1.0, 0.3)
TORCHTITAN = Habits(selective=(0.5, 0.0, 1.0))

HABITS = {
    "shoal": Habits(),
    "torchtitan": TORCHTITAN,
    "torchtitan-2025": TORCHTITAN,
    "llm-foundry": Habits(root_bytes=0),
    "automodel": Habits(),
    "megatron": Habits(hides_update=True, splits_messages=True, selective=MEGATRON_SELECTIVE),
    "megatron-deepspeed": Habits(
        hides_gradients=False,
        hides_parameters=False,
        splits_messages=True,
        selective=MEGATRON_SELECTIVE,
        root_bytes=0,
    ),
}
"""By `Case.framework`."""


def habits_of(framework: str) -> Habits:
    """What a framework does.

    Raises:
        PlanError: for one that is not known, with the nearest name.

    >>> habits_of("torchtitan").selective[0]
    0.5
    """
    if framework not in HABITS:
        raise PlanError(one_of("framework", framework, HABITS))
    return HABITS[framework]
