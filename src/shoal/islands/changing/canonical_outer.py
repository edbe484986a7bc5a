"""Outer state in canonical units, hashed segment by segment: the same hashes for every layout.

rank k     consecutive numbers of each flat tensor (`canonical_units.py`), W and u of them
digest     SHA-256 of the hashes of all segments of all units, in their order
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from shoal.islands.changing.canonical_units import UnitSegment
from shoal.islands.outer_optimizer import Build, OuterState, hash_tensor, state_tensors

HASH_BYTES = hashlib.sha256().digest_size


class CanonicalOuterState(OuterState):
    """Merged weights and outer optimizer state of this rank's units.

    Args:
        local: this rank's numbers of each tensor, flat.
        segments: those numbers, cut at the ends of units, by tensor.
    """

    def __init__(
        self,
        local: Mapping[str, Tensor],
        build: Build,
        segments: Mapping[str, Sequence[UnitSegment]],
    ) -> None:
        super().__init__(local, build)
        self._segments = segments

    def list_digests(self) -> list[str]:
        """Return the SHA-256 of each segment of this rank, in the order of the units."""
        found = []
        for name in sorted(self._held):
            if name not in self._digests:
                self._digests[name] = self._digest_of(name)
            hashes = self._digests[name]
            found += [
                hashes[at : at + HASH_BYTES].hex() for at in range(0, len(hashes), HASH_BYTES)
            ]
        return found

    def _digest_of(self, name: str) -> bytes:
        segments, weight = self._segments[name], self._held[name].detach()
        state = sorted(state_tensors(self._state(name)).items())
        hashes = []
        for one in segments:
            here = slice(one.start - segments[0].start, one.stop - segments[0].start)
            found = hashlib.sha256(f"{name} {one.start}".encode())
            hash_tensor(found, weight[here])
            for key, part in state:
                found.update(key.encode())
                hash_tensor(found, part[here] if part.shape == weight.shape else part)
            hashes.append(found.digest())
        return b"".join(hashes)
