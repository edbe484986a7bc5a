"""Merge of whole changes: every member decodes the same bytes of all and takes the same step.

    change   [coded W − w of all parameters] [running statistics, uncoded]; its SHA-256 names it
    merge    Σ n_i·m_i / Σ n_i over the admitted, in the order of the members; outer step; digest

An island of several processes has a piece of its change on each rank (`send_slices.py`), and merges
the pieces rank by rank. Products, verdict and digest are those of all ranks.

Members that come and go exchange whole changes, not parts of sums: whoever holds the committers'
changes can merge, whoever else died. An island so sends (R − 1)/(2(R − 1)/R) = R/2 times the bytes
of `compressed_all_reduce.py`, and the sum is not coded a second time. With codec none the merged
weights are the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.fabric.compressed.codecs import Codec, find_codec
from shoal.fabric.islands.compressed_all_reduce import PRODUCT_BLOCK, MergeRule, merge_rows
from shoal.islands.admission import AdmissionTest, AdmissionVerdict
from shoal.islands.membership.committed_turn import TurnProposal
from shoal.islands.method import MergeMethod
from shoal.islands.outer_optimizer import OuterState, all_finite
from shoal.islands.round_exchange import sum_matrices
from shoal.islands.send_slices import MessageShards


@dataclass(frozen=True)
class MergedChanges:
    """Result of a merge that may be committed.

    Attributes:
        weights: digest of the proposed W and outer state; that before if no change counts.
        refused: reason by member.
        plain: means of the running statistics, by name.
    """

    weights: str
    verdict: AdmissionVerdict
    refused: dict[int, str]
    divisor: float
    plain: dict[str, Tensor] = field(default_factory=dict)


class ChangeMerge:
    """Encoder and merger of whole changes of one member, for this rank's piece of them.

    `digest` and `merge` are collectives of the island's ranks.

    Args:
        shares: divides a message among the island's ranks.
        like, plain_like: tensors with the names and shapes of a message, and of the statistics.
    """

    def __init__(
        self,
        method: MergeMethod,
        outer: OuterState,
        shares: MessageShards,
        codec: Codec,
        admission: AdmissionTest,
        like: Mapping[str, Tensor],
        plain_like: Mapping[str, Tensor],
    ) -> None:
        self.method, self.outer, self.shares, self.codec = method, outer, shares, codec
        self.admission, self.like, self.plain_like = admission, like, plain_like
        self.whole = find_codec("none", shares.dtype)
        self.elements = shares.count_elements(like)
        self.plain_elements = shares.count_elements(plain_like)
        self._open: MergedChanges | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's piece of an encoded change."""
        coded = self.codec.size_bytes(self.elements)
        return coded + self.whole.size_bytes(self.plain_elements)

    def encode(self, message: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> bytes:
        """Return the bytes of this rank's piece of a change."""
        coded = torch.empty(self.size_bytes, dtype=torch.uint8)
        first = self.codec.size_bytes(self.elements)
        self.codec.encode(self.shares.cut(message), coded[:first])
        if self.plain_elements:
            self.whole.encode(self.shares.cut(plain), coded[first:])
        return coded.numpy().tobytes()

    def digest(self) -> str:
        """Return the digest of all ranks' outer weights and state, the proposal included."""
        told = self.shares.inner.gather_json(self.outer.digest())
        return hashlib.sha256("".join(told).encode()).hexdigest()

    def merge(self, proposals: Sequence[TurnProposal], changes: Sequence[bytes]) -> MergedChanges:
        """Apply the members' changes to the outer weights; `commit` keeps and `undo` drops them.

        Args:
            changes: bytes of this rank's piece of each proposal's change.
        """
        self.undo()
        before = self.digest()
        names = [one.seat.name for one in proposals]
        codes = [_as_tensor(one) for one in changes]
        sound = [code.numel() == self.size_bytes for code in codes]
        codes = [
            code if good else torch.zeros(self.size_bytes, dtype=torch.uint8)
            for code, good in zip(codes, sound, strict=True)
        ]
        gram = self._gram(codes)
        finite = [
            sound[place] and math.isfinite(gram[place][place]) and self._has_finite_plain(code)
            for place, code in enumerate(codes)
        ]
        told = self.shares.inner.gather_json({"gram": gram, "finite": finite})
        gram = sum_matrices([one["gram"] for one in told])
        finite = [all(ranks) for ranks in zip(*(one["finite"] for one in told), strict=True)]
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
            mean = self.shares.join(self._mean(codes, weights, divisor), self.like)
            stepped = self.method.step(self.outer, mean, len(verdict.admitted))
            if self.shares.inner.all_true(stepped):
                plain = self._plain_mean(codes, weights, divisor)
                self._open = MergedChanges(self.digest(), verdict, refused, divisor, plain)
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

    def _gram(self, codes: Sequence[Tensor]) -> list[list[float]]:
        products = torch.zeros(len(codes), len(codes), dtype=torch.float64)
        rows = self._rows(codes)
        for block in rows.split(PRODUCT_BLOCK, dim=1):
            wide = block.double()
            products += wide @ wide.T
        return products.tolist()

    def _rows(self, codes: Sequence[Tensor]) -> Tensor:
        rows = torch.empty(len(codes), self.elements, dtype=self.codec.dtype)
        for code, row in zip(codes, rows, strict=True):
            self.codec.decode(code[: self.codec.size_bytes(self.elements)], row)
        return rows

    def _has_finite_plain(self, code: Tensor) -> bool:
        if not self.plain_elements:
            return True
        row = torch.empty(self.plain_elements, dtype=self.codec.dtype)
        self.whole.decode(code[self.codec.size_bytes(self.elements) :], row)
        return all_finite(row)

    def _mean(self, codes: Sequence[Tensor], weights: Sequence[float], divisor: float) -> Tensor:
        first = self.codec.size_bytes(self.elements)
        return self._weighted(self.codec, [c[:first] for c in codes], weights, divisor)

    def _plain_mean(
        self, codes: Sequence[Tensor], weights: Sequence[float], divisor: float
    ) -> dict[str, Tensor]:
        if not self.plain_elements:
            return {}
        first = self.codec.size_bytes(self.elements)
        mean = self._weighted(self.whole, [c[first:] for c in codes], weights, divisor)
        return self.shares.join(mean, self.plain_like)

    def _weighted(
        self, codec: Codec, codes: Sequence[Tensor], weights: Sequence[float], divisor: float
    ) -> Tensor:
        """Return Σ weight · decoded / divisor, added in order; or a robust value of the rows."""
        policy = self.method.policy
        elements = self.elements if codec is self.codec else self.plain_elements
        counted = [(code, w) for code, w in zip(codes, weights, strict=True) if w]
        if policy.merge != "mean":
            rule = MergeRule(policy.merge, policy.trim if policy.merge == "trimmed" else 0.0)
            rows = torch.empty(len(counted), elements, dtype=codec.dtype)
            for (code, _), row in zip(counted, rows, strict=True):
                codec.decode(code, row)
            return merge_rows(rows, rule)
        total = torch.empty(elements, dtype=codec.dtype)
        for place, (code, weight) in enumerate(counted):
            codec.decode(code, total, weight=weight, add=place > 0)
        return total.div_(divisor)


def _as_tensor(piece: bytes) -> Tensor:
    """Return the bytes as a tensor; a rank whose piece is empty has none."""
    return (
        torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        if piece
        else torch.empty(0, dtype=torch.uint8)
    )
