"""Ranks that hold chunks of small integers and send them to each other, round by round.

All messages of a round leave at once. A message either is added to the receiver's chunk or replaces
it. Each chunk remembers which ranks are in its sum, so that adding a rank twice raises an error. A
round lasts α + (bytes of its largest message)·β, as ranks send and receive at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.base.errors import BugError
from shoal.base.plans.timeline import Timeline, TimelineSpan
from shoal.base.text.units import bytes_text
from shoal.teach.walks.walk import TableCell, WalkStep

ALPHA_S = 10e-6
"""Seconds to start a message, in these drawings: about those of a network card and its switch."""

BYTES_PER_S = 25e9
"""Bytes/s of one rank's link, in these drawings: a card of 200 Gbit/s."""


@dataclass(frozen=True)
class ChunkMessage:
    """Chunks sent from one rank to another; `adds`: the receiver sums them."""

    source: int
    target: int
    chunks: tuple[int, ...]
    adds: bool


def first_number(rank: int, chunk: int) -> int:
    """Return a rank's initial number of a chunk: from 1 to 9, different for neighbours.

    >>> [first_number(rank, 0) for rank in range(4)]
    [1, 3, 5, 7]
    """
    return (2 * rank + 5 * chunk + rank * chunk) % 9 + 1


class ChunkSimulation:
    """Chunks of all ranks, sent bytes, and the steps so far.

    Args:
        holding: for each rank its initial chunks, chunk → number.
        chunk_bytes: of one chunk.
    """

    def __init__(self, holding: Sequence[dict[int, int]], chunks: int, chunk_bytes: float) -> None:
        self.held = [dict(own) for own in holding]
        self.members = [{chunk: frozenset([rank]) for chunk in own} for rank, own in
                        enumerate(holding)]  # fmt: skip
        self.chunks, self.chunk_bytes = chunks, chunk_bytes
        self.sent_bytes = [0.0] * len(self.held)
        self.now_s = 0.0
        self.spans: list[TimelineSpan] = []
        self.steps: list[WalkStep] = []

    @property
    def busiest_bytes(self) -> float:
        """Return the most bytes that one rank has sent."""
        return max(self.sent_bytes)

    def cells(
        self, came: dict[tuple[int, int], int] | None = None
    ) -> tuple[tuple[TableCell, ...], ...]:
        """Return the current table: one row per rank, one column per chunk."""
        arrived = came or {}
        return tuple(
            tuple(self._cell(rank, chunk, arrived.get((rank, chunk))) for chunk in
                  range(self.chunks))
            for rank in range(len(self.held))
        )  # fmt: skip

    def _cell(self, rank: int, chunk: int, came_from: int | None) -> TableCell:
        if chunk not in self.held[rank]:
            return TableCell("", "none")
        inside = self.members[rank][chunk]
        look = "part" if len(inside) > 1 else "own"
        if self.is_complete(rank, chunk):
            look = "whole"
        return TableCell(str(self.held[rank][chunk]), look, came_from)

    def is_complete(self, rank: int, chunk: int) -> bool:
        """Return whether a rank's chunk contains every rank that began with it."""
        return self.members[rank].get(chunk) == self.begun(chunk)

    def begun(self, chunk: int) -> frozenset[int]:
        """Return the ranks that are in any copy of this chunk."""
        return frozenset(r for own in self.members for r in own.get(chunk, frozenset()))

    def run_round(self, title: str, kind: str, messages: Sequence[ChunkMessage], goal: str) -> None:
        """Send all messages at once and record the step.

        Args:
            kind: of the spans.
            goal: bytes that the busiest rank will have sent, as text.

        Raises:
            BugError: a rank would be added twice.
        """
        payload = [
            [(c, self.held[m.source][c], self.members[m.source][c]) for c in m.chunks]
            for m in messages
        ]
        came: dict[tuple[int, int], int] = {}
        for message, parts in zip(messages, payload, strict=True):
            for chunk, number, inside in parts:
                self._deliver(message, chunk, number, inside)
                came[message.target, chunk] = message.source
            self.sent_bytes[message.source] += len(message.chunks) * self.chunk_bytes
        self._add_spans(kind, messages)
        sent = f"sent by one rank: {bytes_text(self.busiest_bytes)} of {goal}"
        says = tuple(self._message_text(message) for message in messages)
        self.steps.append(WalkStep(title, says, self.cells(came), sent))

    def _deliver(
        self, message: ChunkMessage, chunk: int, number: int, inside: frozenset[int]
    ) -> None:
        held, members = self.held[message.target], self.members[message.target]
        if message.adds:
            twice = inside & members.get(chunk, frozenset())
            if twice:
                raise BugError(f"chunk {chunk}: rank {min(twice)} would be counted twice")
            number += held.get(chunk, 0)
            inside |= members.get(chunk, frozenset())
        held[chunk], members[chunk] = number, inside

    def _message_text(self, message: ChunkMessage) -> str:
        return f"{message.source} → {message.target}: {self._chunks_text(message.chunks)}"

    def _chunks_text(self, chunks: Sequence[int]) -> str:
        if self.chunks == 1:
            return "all"
        if len(chunks) > 2 and list(chunks) == list(range(chunks[0], chunks[-1] + 1)):
            return f"c{chunks[0]}–{chunks[-1]}"
        return " ".join(f"c{chunk}" for chunk in chunks)

    def _add_spans(self, kind: str, messages: Sequence[ChunkMessage]) -> None:
        largest_bytes = max(len(message.chunks) for message in messages) * self.chunk_bytes
        end_s = self.now_s + ALPHA_S + largest_bytes / BYTES_PER_S
        senders = {message.source for message in messages}
        for message in messages:
            label = self._chunks_text(message.chunks) if self.chunks > 1 else ""
            to = f"{label}→{message.target}"
            note = f"to rank {message.target}"
            self.spans.append(
                TimelineSpan(message.source, self.now_s, end_s, kind, to, "link", note)
            )
            if message.target not in senders:
                note = f"from rank {message.source}"
                label = f"←{message.source}"
                took = TimelineSpan(
                    message.target, self.now_s, end_s, "receive", label, "link", note
                )
                self.spans.append(took)
        self.now_s = end_s

    def timeline(self, title: str, facts: dict[str, str]) -> Timeline:
        """Return all rounds as a timeline."""
        return Timeline(title, len(self.held), tuple(self.spans), facts=facts)
