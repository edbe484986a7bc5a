"""State bytes of mixed-precision Adam under ZeRO, and the widely copied memory table, corrected.

    per parameter   weight 2 + gradient 2 (bf16) + master 4 + Adam's moments 4 + 4 (fp32) = 16 bytes
    stage 0         16·P                everything on every device
    stage 1         4·P + 12·P/N        optimizer states split over N
    stage 2         2·P + 14·P/N        + gradients
    stage 3         16·P/N              + weights

The widely copied table (7B: 28, 14, 7 GB) is 4 bytes per parameter, which is fp32 weights alone,
halved and halved again without a number of devices. With all states 7B takes 112 GB on one device;
stage 2 is 26.3 and stage 3 14 GB on 8 devices, 15.5 and 1.75 GB on 64. Activations, gathered
weights and buffers come on top: `shoal plan`.
Source: ZeRO (Rajbhandari et al. 2020), §3 and figure 1; GB are 1e9 bytes, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.base.errors import PlanError

STATE_BYTES = 16
FOLK_MEMORY_GB = {7e9: (28, 14, 7), 13e9: (52, 26, 13), 70e9: (280, 140, 70)}
"""Parameters → GB in the widely copied table for one device, ZeRO-2 and ZeRO-3."""


def state_bytes(parameters: float, stage: int, devices: int) -> float:
    """Return the bytes per device of weights, gradients and Adam's states.

    Raises:
        PlanError: an unknown stage, or less than 1 device.

    >>> [state_bytes(7e9, stage, 8) / 1e9 for stage in (0, 1, 2, 3)]
    [112.0, 38.5, 26.25, 14.0]
    """
    if devices < 1:
        raise PlanError(f"gpus = {devices}: at least 1; try: gpus=1")
    split = {0: 0, 1: 12, 2: 14, 3: 16}
    if stage not in split:
        raise PlanError(f"zero = {stage}: a stage is 0, 1, 2 or 3; try: zero=3")
    return parameters * (STATE_BYTES - split[stage] + split[stage] / devices)


@dataclass(frozen=True)
class CopiedMemoryRow:
    """One model of the widely copied memory table: copied figures, and all states on N devices."""

    parameters: float
    folk_gb: tuple[int, int, int]
    single_gb: float
    zero2_gb: tuple[float, ...]
    zero3_gb: tuple[float, ...]


def copied_memory_rows(devices: Sequence[int] = (8, 64)) -> tuple[CopiedMemoryRow, ...]:
    """Return the widely copied table beside all states, for each number of devices.

    >>> [(r.folk_gb[0], r.single_gb, r.zero2_gb, r.zero3_gb) for r in copied_memory_rows()][0]
    (28, 112.0, (26.25, 15.53125), (14.0, 1.75))
    """
    return tuple(
        CopiedMemoryRow(
            parameters,
            folk,
            state_bytes(parameters, 0, 1) / 1e9,
            tuple(state_bytes(parameters, 2, count) / 1e9 for count in devices),
            tuple(state_bytes(parameters, 3, count) / 1e9 for count in devices),
        )
        for parameters, folk in FOLK_MEMORY_GB.items()
    )
