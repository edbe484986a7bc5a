"""Speed-up of N devices over one: Amdahl's law, and a step's time with communication.

    Amdahl               S(N) = 1 / (q + (1 − q)/N)              q: the share that stays serial
    the serial share     q = (N/S − 1) / (N − 1)                 that a measured speed-up implies
    the common form      T(N) = T₁/N + α + β·M                   α latency, β s per byte, M bytes
    with the ring        T(N) = T₁/N + 2(N−1)·α + 2(N−1)/N·M·β   a ring all-reduce

The common form pays one message of M bytes whatever N is. A ring sends 2(N−1)/N·M per rank, up to
twice as much, in 2(N−1) messages. With that, 1 MiB between two ranks on a link shaped to 100 and to
20 Mbit/s came out 6 % faster than measured (84 ms for 89, 419 for 445).
Sources: Amdahl 1967 (Validity of the single processor approach); Patarasuk and Yuan 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.base.errors import PlanError, check_positive
from shoal.teach.calculators.collectives_costs import ring_all_reduce_s

FOLK_GPUS = (2, 4, 8, 16)
FOLK_SPEEDUPS = {
    "DP": (1.8, 3.2, 5.5, 8.0),
    "DDP": (1.9, 3.7, 7.2, 13.0),
    "FSDP": (1.9, 3.8, 7.5, 14.0),
}
"""Widely copied speed-up table without model, machine or source, at FOLK_GPUS devices.

No row follows from one serial share, and FSDP stands above DDP although it sends 1.5 times the
bytes: `copied_serial_shares`. Measure your own with `shoal compare`.
"""


def amdahl_speedup(serial: float, devices: int) -> float:
    """Return Amdahl's speed-up if the share `serial` of the one-device time stays serial.

    Raises:
        PlanError: a share outside 0 to 1, or less than 1 device.

    >>> amdahl_speedup(0.1, 2), round(amdahl_speedup(0.1, 16), 1), amdahl_speedup(0.0, 8)
    (1.8181818181818181, 6.4, 8.0)
    """
    if not 0 <= serial <= 1:
        raise PlanError(
            f"serial = {serial:g}: a share, 0 to 1; try: serial={min(1.0, max(0.0, serial)):g}"
        )
    check_devices(devices)
    return 1 / (serial + (1 - serial) / devices)


def amdahl_limit(serial: float) -> float:
    """Return Amdahl's limit of the speed-up for an unlimited number of devices: 1/q.

    >>> amdahl_limit(0.05)
    20.0
    """
    amdahl_speedup(serial, 1)
    return 1 / serial if serial else float("inf")


def serial_share(speedup: float, devices: int) -> float:
    """Return the serial share q that Amdahl's law needs for a speed-up; negative: superlinear.

    Raises:
        PlanError: less than 2 devices, from which nothing follows, or a speed-up of 0.

    >>> [round(100 * serial_share(s, n), 1) for s, n in ((1.8, 2), (8, 16), (14, 16))]
    [11.1, 6.7, 1.0]
    """
    if devices < 2:
        raise PlanError(f"gpus = {devices}: a speed-up is of at least 2; try: gpus=2")
    check_positive(speedup=speedup)
    return (devices / speedup - 1) / (devices - 1)


def copied_serial_shares() -> dict[str, tuple[float, ...]]:
    """Return the serial share that each figure of the widely copied speed-up table implies.

    >>> [f"{q:.1%}" for q in copied_serial_shares()["DDP"]]
    ['5.3%', '2.7%', '1.6%', '1.5%']
    """
    return {
        name: tuple(serial_share(s, n) for s, n in zip(row, FOLK_GPUS, strict=True))
        for name, row in FOLK_SPEEDUPS.items()
    }


def common_step_s(
    single_s: float, devices: int, message_bytes: float, alpha_s: float, beta_s_per_byte: float
) -> float:
    """Return the seconds of a step in the common form: T₁/N + α + β·M, and T₁ on one device.

    >>> common_step_s(8.0, 4, 100.0, 0.1, 0.01)
    3.1
    """
    check_devices(devices)
    if devices == 1:
        return single_s
    return single_s / devices + alpha_s + beta_s_per_byte * message_bytes


def ring_step_s(
    single_s: float,
    devices: int,
    message_bytes: float,
    alpha_s: float,
    beta_s_per_byte: float,
    *,
    volume: float = 1.0,
    overlap: float = 0.0,
) -> float:
    """Return the seconds of a step with a ring: T₁/N + max(0, ring − overlap · T₁/N).

    Args:
        volume: bytes sent, in all-reduces of M: 1 for ddp, 1.5 for fsdp (two gathers, one scatter).
        overlap: share of the compute time that can hide communication: 0 none; for a backward of
            two thirds of the step at most 2/3.

    Raises:
        PlanError: an overlap outside 0 to 1.

    >>> round(ring_step_s(8.0, 4, 100.0, 0.1, 0.01), 9)
    4.1
    >>> ring_step_s(8.0, 4, 100.0, 0.1, 0.01, overlap=1.0) == 2.0 + 0.1
    True
    """
    check_devices(devices)
    if not 0 <= overlap <= 1:
        raise PlanError(
            f"overlap = {overlap:g}: a share, 0 to 1; try: overlap={min(1.0, max(0.0, overlap)):g}"
        )
    compute_s = single_s / devices
    ring_s = volume * ring_all_reduce_s(devices, message_bytes, alpha_s, beta_s_per_byte)
    return compute_s + max(0.0, ring_s - overlap * compute_s)


@dataclass(frozen=True)
class SpeedupRow:
    """Times and speed-ups on one number of devices by each form, with the implied serial share."""

    devices: int
    folk_s: float
    ring_s: float
    sharded_s: float
    folk: float
    ring: float
    sharded: float
    ring_serial: float | None


def speedup_table(
    devices: Sequence[int],
    single_s: float,
    message_bytes: float,
    alpha_s: float,
    beta_s_per_byte: float,
    *,
    overlap: float = 0.0,
) -> tuple[SpeedupRow, ...]:
    """Return the widely copied speed-up table with all of its parameters.

    Args:
        single_s: T₁.
        message_bytes: M, gradient bytes.
        alpha_s, beta_s_per_byte: α and β.
        overlap: as in ring_step_s.

    Returns:
        per number of devices: the common form, ddp (a ring), fsdp (1.5 of its bytes).

    >>> rows = speedup_table([2, 8], 8.0, 1e9, 1e-5, 1e-9)
    >>> [(r.devices, round(r.folk, 2), round(r.ring, 2), round(r.sharded, 2)) for r in rows]
    [(2, 1.6, 1.6, 1.45), (8, 4.0, 2.91, 2.21)]
    """
    rows = []
    for count in devices:
        one = (single_s, count, message_bytes, alpha_s, beta_s_per_byte)
        folk_s, ring_s = common_step_s(*one), ring_step_s(*one, overlap=overlap)
        sharded_s = ring_step_s(*one, volume=1.5, overlap=overlap)
        serial = serial_share(single_s / ring_s, count) if count > 1 else None
        row_s = {"folk_s": folk_s, "ring_s": ring_s, "sharded_s": sharded_s}
        faster = {name.removesuffix("_s"): single_s / value for name, value in row_s.items()}
        rows.append(SpeedupRow(devices=count, ring_serial=serial, **row_s, **faster))
    return tuple(rows)


def check_devices(devices: int) -> None:
    """Refuse less than 1 device."""
    if devices < 1:
        raise PlanError(f"gpus = {devices}: at least 1; try: gpus=1")
