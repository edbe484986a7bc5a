"""Merge of whole changes: every member decodes the same bytes of all and takes the same step.

    change   [coded W − w of all parameters] [running statistics, uncoded], in canonical units, each
             with a SHA-256 of its own
    merge    Σ n_i·m_i / Σ n_i over the admitted, in the order of the members; outer step; digest

An island of several processes has some of the units on each rank (`canonical_units.py`), and merges
unit by unit. Products are summed in the order of the units, so products, verdict and digest are the
same for every layout.

Members that come and go exchange whole changes, not parts of sums: whoever holds the committers'
changes can merge, whoever else died. An island so sends (R − 1)/(2(R − 1)/R) = R/2 times the bytes
of `compressed_all_reduce.py`, and the sum is not coded a second time. With codec none the merged
weights are the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.fabric import World
from shoal.fabric.compressed.codecs import Codec, find_codec
from shoal.fabric.islands.compressed_all_reduce import PRODUCT_BLOCK, MergeRule, merge_rows
from shoal.islands.admission import AdmissionTest, AdmissionVerdict
from shoal.islands.changing.canonical_units import CanonicalUnits, Unit, count_numbers
from shoal.islands.membership.committed_turn import TurnProposal
from shoal.islands.method import MergeMethod
from shoal.islands.outer_optimizer import OuterState, all_finite
from shoal.islands.round_exchange import sum_matrices

Change = Sequence[bytes]
"""Encoded units of one rank of a change, in order."""


def join_digests(told: Iterable[Sequence[str]]) -> str:
    """Return the digest of an outer state from the hashes of all its ranks, in their order."""
    return hashlib.sha256("".join(one for ranks in told for one in ranks).encode()).hexdigest()


@dataclass(frozen=True)
class MergedChanges:
    """Result of a merge that may be committed.

    Attributes:
        weights: digest of the proposed W and outer state; that before if no change counts.
        refused: reason by member.
        plain: this rank's units of the means of the running statistics, flat, by name.
    """

    weights: str
    verdict: AdmissionVerdict
    refused: dict[int, str]
    divisor: float
    plain: dict[str, Tensor] = field(default_factory=dict)


class ChangeMerge:
    """Encoder and merger of whole changes of one member, for this rank's units of them.

    `digest` and `merge` are collectives of the island's ranks.

    Args:
        outer: W and u of this rank's units.
        units: of the whole change.
        inner: the island's ranks, on a gloo group that no other thread uses.

    Attributes:
        own: units of this rank.
        unit_bytes: encoded size of each unit of the whole change.
    """

    def __init__(
        self,
        method: MergeMethod,
        outer: OuterState,
        units: CanonicalUnits,
        inner: World,
        codec: Codec,
        admission: AdmissionTest,
    ) -> None:
        self.method, self.outer, self.codec, self.admission = method, outer, codec, admission
        self.units, self.inner, self.dtype = units, inner, codec.dtype
        self.own = units.of_rank(inner.rank, inner.size)
        self.whole = find_codec("none", codec.dtype)
        self.unit_bytes = [
            *(codec.size_bytes(count_numbers(one)) for one in units.coded),
            *(self.whole.size_bytes(count_numbers(one)) for one in units.plain),
        ]
        self._coded_sizes = [*map(count_numbers, self.own.coded)]
        self._plain_sizes = [*map(count_numbers, self.own.plain)]
        self._open: MergedChanges | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's units of an encoded change."""
        return sum(self._own_bytes())

    def encode(self, message: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> list[bytes]:
        """Return this rank's units of a change.

        Args:
            message, plain: this rank's numbers of each tensor, flat, by name.
        """
        coded = _encode(self.codec, _join(message, self.dtype), self._coded_sizes)
        return coded + _encode(self.whole, _join(plain, self.dtype), self._plain_sizes)

    def digest(self) -> str:
        """Return the digest of all ranks' outer weights and state, the proposal included."""
        return join_digests(self.inner.gather_json(self.outer.list_digests()))

    def merge(self, proposals: Sequence[TurnProposal], changes: Sequence[Change]) -> MergedChanges:
        """Apply the members' changes to the outer weights; `commit` keeps and `undo` drops them.

        Args:
            changes: this rank's units of each proposal's change.
        """
        self.undo()
        before = self.digest()
        names = [one.seat.name for one in proposals]
        coded, plain, sound = self._sort_units(changes)
        grams = [
            self._gram(unit, size) for unit, size in zip(coded, self._coded_sizes, strict=True)
        ]
        finite = [
            sound[place] and self._has_finite_plain([unit[place] for unit in plain])
            for place in range(len(changes))
        ]
        told = self.inner.gather_json({"grams": grams, "finite": finite})
        gram = sum_matrices(
            [_no_products(len(changes)), *(g for one in told for g in one["grams"])]
        )
        finite = [
            all(ranks) and math.isfinite(gram[place][place])
            for place, ranks in enumerate(zip(*(one["finite"] for one in told), strict=True))
        ]
        tokens = [float(one.tokens) for one in proposals]
        verdict = self.admission.judge(finite, gram, tokens, names)
        by_samples = self.method.policy.weighting == "samples"
        weights, divisor = self.method.message_weights(
            [float(one.used) for one in proposals] if by_samples else tokens,
            [verdict.norms.get(name, 0.0) for name in names],
            [name in verdict.admitted for name in names],
        )
        refused = dict(verdict.refused)
        if divisor:
            mean = self._means(self.codec, coded, self.own.coded, weights, divisor)
            stepped = self.method.step(self.outer, mean, len(verdict.admitted))
            if self.inner.all_true(stepped):
                averaged = self._means(self.whole, plain, self.own.plain, weights, divisor)
                self._open = MergedChanges(self.digest(), verdict, refused, divisor, averaged)
                return self._open
            self.outer.undo()
        lost = {name: refused.get(name, "the merged weights would not be finite") for name in names}
        return MergedChanges(before, verdict, lost, 0.0)

    def commit(self, weights: str) -> MergedChanges | None:
        """Install the proposed step if it is the committed one; else undo it and return None."""
        found = self._open
        if found is None or found.weights != weights:
            self.undo()
            return None
        self.outer.commit()
        self.admission.commit(found.verdict)
        self._open = None
        return found

    def undo(self) -> None:
        """Drop the proposed step."""
        if self._open is not None:
            self.outer.undo()
        self._open = None

    def _own_bytes(self) -> list[int]:
        first, last = self.units.cuts(self.inner.size)[self.inner.rank : self.inner.rank + 2]
        return self.unit_bytes[first:last]

    def _sort_units(
        self, changes: Sequence[Change]
    ) -> tuple[list[list[Tensor]], list[list[Tensor]], list[bool]]:
        """Return the changes' bytes by coded unit, by plain unit, and which changes are whole."""
        sizes = self._own_bytes()
        sound = [[*map(len, change)] == sizes for change in changes]
        units = [
            [
                _as_tensor(change[place] if whole else bytes(size))
                for change, whole in zip(changes, sound, strict=True)
            ]
            for place, size in enumerate(sizes)
        ]
        split = len(self.own.coded)
        return units[:split], units[split:], sound

    def _gram(self, codes: Sequence[Tensor], size: int) -> list[list[float]]:
        """Return the inner products of the changes in one unit."""
        products = torch.zeros(len(codes), len(codes), dtype=torch.float64)
        for block in self._decode(self.codec, codes, size).split(PRODUCT_BLOCK, dim=1):
            wide = block.double()
            products += wide @ wide.T
        return products.tolist()

    def _decode(self, codec: Codec, codes: Sequence[Tensor], size: int) -> Tensor:
        rows = torch.empty(len(codes), size, dtype=self.dtype)
        for code, row in zip(codes, rows, strict=True):
            codec.decode(code, row)
        return rows

    def _has_finite_plain(self, codes: Sequence[Tensor]) -> bool:
        return all(
            all_finite(self._decode(self.whole, [code], size)[0])
            for code, size in zip(codes, self._plain_sizes, strict=True)
        )

    def _means(
        self,
        codec: Codec,
        codes: Sequence[Sequence[Tensor]],
        units: Sequence[Unit],
        weights: Sequence[float],
        divisor: float,
    ) -> dict[str, Tensor]:
        """Return the mean of the changes, flat, by tensor."""
        found: dict[str, list[Tensor]] = {}
        for unit, coded in zip(units, codes, strict=True):
            mean = self._mean(codec, coded, count_numbers(unit), weights, divisor)
            parts = mean.split([one.stop - one.start for one in unit])
            for one, part in zip(unit, parts, strict=True):
                found.setdefault(one.name, []).append(part)
        return {name: torch.cat(parts) for name, parts in found.items()}

    def _mean(
        self,
        codec: Codec,
        codes: Sequence[Tensor],
        size: int,
        weights: Sequence[float],
        divisor: float,
    ) -> Tensor:
        """Return Σ weight · decoded / divisor of a unit, added in order; or a robust value."""
        policy = self.method.policy
        counted = [(code, w) for code, w in zip(codes, weights, strict=True) if w]
        if policy.merge != "mean":
            rule = MergeRule(policy.merge, policy.trim if policy.merge == "trimmed" else 0.0)
            return merge_rows(self._decode(codec, [code for code, _ in counted], size), rule)
        total = torch.empty(size, dtype=self.dtype)
        for place, (code, weight) in enumerate(counted):
            codec.decode(code, total, weight=weight, add=place > 0)
        return total.div_(divisor)


def _no_products(members: int) -> list[list[float]]:
    return [[0.0] * members for _ in range(members)]


def _join(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return flat tensors in the order of units."""
    parts = [tensors[name].reshape(-1).to(dtype) for name in sorted(tensors)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


def _encode(codec: Codec, numbers: Tensor, sizes: Sequence[int]) -> list[bytes]:
    """Return the units of a vector, encoded."""
    found = []
    for part in numbers.split(list(sizes)) if sizes else ():
        coded = torch.empty(codec.size_bytes(part.numel()), dtype=torch.uint8)
        codec.encode(part, coded)
        found.append(coded.numpy().tobytes())
    return found


def _as_tensor(piece: bytes) -> Tensor:
    return torch.frombuffer(bytearray(piece), dtype=torch.uint8)
