"""Name the tensor that changed in memory, its rank and step; all ranks raise the same error.

Imported when a check has failed. Ranks gather one number per tensor, and all build the same text.
"""

from __future__ import annotations

import socket
from collections import Counter
from typing import Any, Protocol

from shoal.base.errors import ClusterError
from shoal.base.plans.placement import Placement
from shoal.parallel.program import Program
from shoal.trainer.guards.checksums import WEIGHT, ChecksumSnapshot
from shoal.trainer.metrics_recorder import MetricsRecorder

WORD_BITS = 64
MENDS = (
    "nothing of this step is kept: try: go on from the last checkpoint; if it comes again on "
    "this machine, test its memory"
)


class CorruptionCheckFields(Protocol):
    """Interface of a `CorruptionCheck` that reports read: the run, and which ranks are replicas."""

    program: Program
    recorder: MetricsRecorder
    told: bool
    kinds: list[Any]
    groups: list[list[int]]

    def indices_by_kind(self, look: ChecksumSnapshot) -> list[list[int]]:
        """Return, for each kind of sharding, the indices of its tensors."""

    def replica_axes(self, row: Placement, what: str) -> Any:
        """Return the kind of sharding of a tensor."""


def raise_memory_corruption(
    drift: CorruptionCheckFields, look: ChecksumSnapshot, *, alone: bool = False
) -> None:
    """Raise ClusterError for tensors that changed without a write, unless user code meant it.

    Args:
        drift: the check.
        look: its checksums.
        alone: report only certain bit flips.

    Raises:
        ClusterError: memory was corrupted. Not for weights that code wrote past torch's counters
            (by `.data`): such a write happens on all replicas, or changes many bits of an
            unreplicated weight.
    """
    before, keys = look.sums.read(), list(look.tensors)
    mine = {
        "host": socket.gethostname(),
        "found": [
            [*keys[place], (int(look.now[place]) - int(before[place])) % 2**WORD_BITS,
             look.tensors[keys[place]].element_size()]
            for place in look.changed
        ],
    }  # fmt: skip
    told = drift.program.world.gather_json(mine)
    for rank, one in enumerate(told):
        for what, name, difference, element_bytes in one["found"]:
            bit = _flipped_bit_index(difference, element_bytes) if len(one["found"]) == 1 else None
            if bit is None and (alone or _is_user_write(drift, told, rank, what, name)):
                continue
            text = (
                f"step {_skipped_step(look)}: {_tensor_title(what, name)} changed in memory of "
                f"rank {rank} "
                f"({one['host']}) after the update of step {look.step}, and no operation wrote it"
                f"{f': bit {bit} of one element flipped' if bit is not None else ''}; {MENDS}"
            )
            of = f"{one['host']}: memory"
            _raise_corruption(
                drift, _skipped_step(look), text, [rank], _tensor_title(what, name), of
            )
    if not alone and not drift.told:
        drift.told = True
        name = next(name for one in told for _, name, *_ in one["found"])
        drift.recorder.notice(
            f"{name} was changed between steps past torch's counters (by .data): taken as meant; "
            f"where one rank alone holds a weight, memory that changes many bits looks like that"
        )


FROZEN = (
    "no update moves it, since it is frozen: if the model's own forward pass writes it, each rank "
    "does so by its own samples; try: a buffer, or the change after run.step(batch) by numbers "
    "that all ranks have"
)
"""Cause of a difference in a frozen weight."""


def raise_replica_mismatch(
    drift: CorruptionCheckFields, look: ChecksumSnapshot, number: int
) -> None:
    """Raise ClusterError for replicas with different checksums, naming the minority."""
    sums = look.sums.read() if look.now is None else look.now
    places = drift.indices_by_kind(look)[number]
    keys = list(look.tensors)
    mine = {"host": socket.gethostname(), "sums": [[*keys[p], int(sums[p])] for p in places]}
    told: list[dict[str, Any]] = drift.program.world.gather_json(mine)
    groups = drift.groups[number]
    for first in sorted(set(groups)):
        members = [rank for rank, group in enumerate(groups) if group == first]
        for row in zip(*(told[rank]["sums"] for rank in members), strict=False):
            values = {rank: value for rank, (*_, value) in zip(members, row, strict=True)}
            if len(set(values.values())) == 1:
                continue
            what, name, _ = row[0]
            (most, count), *others = Counter(values.values()).most_common()
            sure = not others or count > others[0][1]
            ranks = [rank for rank, value in values.items() if not (sure and value == most)]
            where = ", ".join(f"rank {rank} ({told[rank]['host']})" for rank in ranks)
            who = (
                f"{where} is other than on {len(members) - len(ranks)} ranks that hold the same"
                if sure
                else f"{where} differs, and one of them is wrong"
            )
            held = dict(drift.program.module.named_parameters()).get(name)
            text = f"step {look.step}: {_tensor_title(what, name)} on {who}: " + (
                FROZEN
                if what == WEIGHT and held is not None and not held.requires_grad
                else f"an update, a product or a message went wrong; {MENDS}"
            )
            _raise_corruption(drift, look.step, text, ranks, _tensor_title(what, name), "replicas")
    raise ClusterError(f"step {look.step}: ranks that hold the same do not hold as much; {MENDS}")


def check_single_element(drift: CorruptionCheckFields, look: ChecksumSnapshot) -> None:
    """Raise as `raise_replica_mismatch` if weights of replicas differ in one element of one tensor.

    No user's code does that. Every rank calls it, if no write was counted.
    """
    keys, tensors = list(look.tensors), list(look.tensors.values())
    # By name: ranks that step other parts have other tensors beside the weights.
    own = {name: int(value) for (what, name), value in zip(keys, look.now, strict=True)
           if what == WEIGHT}  # fmt: skip
    told: list[dict[str, int]] = drift.program.world.gather_json(own)
    found: list[tuple[int, int, int]] = []
    for number, groups in enumerate(drift.groups):
        for place in drift.indices_by_kind(look)[number]:
            what, name = keys[place]
            for rank, first in enumerate(groups if what == WEIGHT else ()):
                pair = told[rank].get(name), told[first].get(name)
                if pair[0] is not None and pair[1] is not None and pair[0] != pair[1]:
                    found.append((number, place, (pair[0] - pair[1]) % 2**WORD_BITS))
    if len({place for _, place, _ in found}) == 1:
        number, place, _ = found[0]
        size = tensors[place].element_size()
        if all(_fits_one_element(difference, size) for _, _, difference in found):
            raise_replica_mismatch(drift, look, number)


def _fits_one_element(difference: int, element_bytes: int) -> bool:
    """Return whether a change of one element can explain the difference of two sums."""
    distance = min(difference, -difference % 2**WORD_BITS)
    bits = 8 * element_bytes
    return any(
        distance % 2**shift == 0 and distance >> shift < 2**bits
        for shift in range(0, WORD_BITS, bits)
    )


def _skipped_step(look: ChecksumSnapshot) -> int:
    """Return the step that is not taken."""
    return look.step + 1


def _is_user_write(
    drift: CorruptionCheckFields, told: list[dict[str, Any]], rank: int, what: str, name: str
) -> bool:
    """Return whether user code changed the tensor: a weight, on all its replicas."""
    if what != WEIGHT:
        return False
    kind = drift.kinds.index(drift.replica_axes(drift.program.rows[name], what))
    groups = drift.groups[kind]
    others = [told[other] for other in range(len(told)) if groups[other] == groups[rank]]
    return all(any(one[:2] == [what, name] for one in other["found"]) for other in others)


def _flipped_bit_index(difference: int, element_bytes: int) -> int | None:
    """Return the index of the flipped bit of an element, or None if not exactly one flipped."""
    for value in (difference, -difference % 2**WORD_BITS):
        if value.bit_count() == 1:
            return (value.bit_length() - 1) % (8 * element_bytes)
    return None


def _tensor_title(what: str, name: str) -> str:
    return name if what == WEIGHT else f"{what} of {name}"


def _raise_corruption(
    drift: CorruptionCheckFields, step: int, text: str, ranks: list[int], tensor: str, of: str
) -> None:
    world = drift.program.world
    if world.is_first:
        told = {"ranks": ranks, "tensor": tensor, "of": of, "text": text}
        drift.recorder.events.emit("drift", step=step, **told)
    failure = ClusterError(text)
    failure.here = ranks == [world.rank]
    raise failure
