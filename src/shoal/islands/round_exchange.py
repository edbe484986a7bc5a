"""Exchange of one fragment between islands, from the message to the vote, in a thread.

    first half    each island's encoded part j to island j                    plane.begin
    statistics    finite? Gram matrix of all messages; tokens and speeds      plane.gather
    admission     the same verdict on all islands, from the same numbers
    second half   Σ n_i·m_i / Σ n_i of the admitted, the same bytes to all    Arrived.finish
    candidate     W', u' of the outer optimizer; finite? digest over all ranks of the island
    vote          all vote ok with the same digest: commit; else W, u as before    plane.gather
                  repeated while an island still saves the previous round

Inner steps continue meanwhile. Inside an island every phase ends with a message among its ranks, so
that all of them know when one has lost its peer: either every rank of an island commits, or none
does.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from shoal.base.errors import BugError
from shoal.fabric import World
from shoal.fabric.compressed.codecs import Codec, ErrorFeedback, find_codec
from shoal.fabric.islands.compressed_all_reduce import MergeRule, is_sum_tag
from shoal.fabric.islands.inter_island_group import CompressedExchange, InterIslandGroup, IslandLost
from shoal.islands.admission import AdmissionTest, AdmissionVerdict
from shoal.islands.commit_vote import (
    NOBODY_ADMITTED,
    NOT_FINITE,
    Ballot,
    VoteResult,
    parse_json_object,
)
from shoal.islands.membership.commit_tally import CommitTally
from shoal.islands.merge_proposal import IslandChange, MergeProposal, MergeResult
from shoal.islands.method import MergeMethod
from shoal.islands.outer_optimizer import OuterState
from shoal.islands.peer_deadline import PeerDeadline
from shoal.islands.send_slices import MessageShards

Value = TypeVar("Value")


class FragmentMerger:
    """Exchange of fragments with the same rank of other islands, one at a time, in a thread.

    `send` starts an exchange, `result` waits for its `MergeResult`; all ranks of all islands call
    them in the same order. The thread proposes, commits or undoes the step of `outer`; the island's
    own weights do not change.

    Attributes:
        plane: connections to the same rank of other islands.
        inner: the island's ranks on a separate group, for the thread.
        shares: division of the message among the ranks.
        codec: codec of the messages.
        feedback: residuals of the codec; None: it is lossless.
        patience: deadlines, learnt from every exchange.
        round_s: seconds of the inner steps since the last exchange, set by the caller for the
            deadline.

    admission two per fragment: [2·fragment] judges rounds of a region, [2·fragment + 1] of all
    last_save of the previous round, set by the caller: no vote while it is written, and no vote
              ok if it failed
    """

    def __init__(
        self,
        plane: InterIslandGroup,
        inner: World,
        shares: MessageShards,
        method: MergeMethod,
        outer: OuterState,
        codec: Codec,
        feedback: ErrorFeedback | None,
        admission: Sequence[AdmissionTest],
        patience: PeerDeadline,
    ) -> None:
        self.plane, self.inner, self.shares = plane, inner, shares
        self.method, self.outer, self.codec, self.feedback = method, outer, codec, feedback
        self.admission, self.patience = admission, patience
        self.round_s, self.last_save = 0.0, SaveStatus()
        self._thread: threading.Thread | None = None
        self._merge: MergeResult | None = None
        self._failure: BaseException | None = None

    def send(
        self,
        round_number: int,
        fragment: int,
        message: Mapping[str, torch.Tensor],
        say: MergeProposal,
        plain: Mapping[str, torch.Tensor],
    ) -> None:
        """Start the exchange of a fragment; `result` ends it.

        Args:
            message: OLD − NEW of this rank's parts, by name; may be changed after this returns.
            plain: tensors to be averaged without an optimizer.
        """
        change = IslandChange(self.plane.index, message, say, plain)
        self.send_changes(round_number, fragment, [change], say, (message, plain), ())

    def send_changes(
        self,
        round_number: int,
        fragment: int,
        changes: Sequence[IslandChange],
        say: MergeProposal,
        like: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]],
        senders: Sequence[Sequence[int]],
    ) -> None:
        """Start the exchange of a fragment in which an island sends no change, one or several.

        Args:
            changes: of this island's senders, in their order; may be modified after this returns.
            say: speed of the island, and whether it requests a stop.
            like: tensors with the shapes of a change's message, and of its plain tensors, by name.
            senders: by island, the senders of its changes, the same on every island; (): each
                island sends one of its own.
        """
        if self._thread is not None:
            raise BugError("islands: a fragment was sent while another is on its way")
        message, plain = (
            {name: torch.empty_like(part, device="meta") for name, part in one.items()}
            for one in like
        )
        work = _ExchangeTask(
            self,
            round_number,
            fragment,
            message,
            [self.shares.cut(one.message) for one in changes],
            plain,
            [self.shares.cut(one.plain) for one in changes],
            say,
            [(one.sender, one.proposal) for one in changes],
            senders,
        )
        self._merge = self._failure = None

        def run() -> None:
            try:
                self._merge = work.run()
            except BaseException as failure:
                self._failure = failure

        self._thread = threading.Thread(target=run, name="islands", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while a fragment is in flight."""
        return self._thread is not None

    def result(self) -> MergeResult:
        """Wait for the pending exchange; raises IslandLost when other islands are silent."""
        if self._thread is None:
            raise BugError("islands: no fragment is on its way")
        self._thread.join()  # every wait inside has a deadline
        self._thread = None
        if self._failure is not None:
            raise self._failure
        if self._merge is None:
            raise BugError("islands: an exchange ended without a result")
        return self._merge


@dataclass
class _ExchangeTask:
    """One exchange, step by step."""

    merger: FragmentMerger
    round: int
    fragment: int
    like: dict[str, torch.Tensor]
    pieces: list[torch.Tensor]
    plain_like: dict[str, torch.Tensor]
    plain_pieces: list[torch.Tensor]
    say: MergeProposal
    proposals: list[tuple[int, MergeProposal]]
    senders: Sequence[Sequence[int]]
    saves_s: float = 0.0
    """seconds waited for islands that still saved; they report it, so no deadline learns from it"""

    def run(self) -> MergeResult:
        merger = self.merger
        began_s, sent_before = time.monotonic(), merger.plane.sent_bytes
        partners = merger.method.partners(self.round, merger.plane.index, merger.plane.count)
        plane = merger.plane.subgroup(partners)
        self.outer = merger.outer.at(self.round)
        if merger.feedback is not None:
            merger.feedback.begin()
        self.elements = merger.shares.count_elements(self.like)
        size_bytes = self.elements * merger.shares.dtype.itemsize
        self.deadline_s = merger.patience.deadline_s(size_bytes, merger.round_s)
        first = self._first_half(plane)
        members = [one for island in self.senders for one in island] or list(partners)
        verdict, gram, sizes = self._judge(plane, partners, members, first)
        weights, divisor = merger.method.message_weights(
            sizes,
            [verdict.norms.get(sender, 0.0) for sender in members],
            [sender in verdict.admitted for sender in members],
        )
        mean, plain = self._second_half(first, weights, divisor)
        counted = sum(weight > 0 for weight in weights)
        finite = bool(divisor) and merger.method.step(self.outer, mean, counted)
        outcome, ballots, digest = self._vote(partners, finite, verdict)
        self._commit_or_undo(outcome, verdict, partners)
        seconds = time.monotonic() - began_s
        merger.patience.record_exchange(seconds - self.saves_s, size_bytes)
        return MergeResult(
            round=self.round,
            fragment=self.fragment,
            committed=outcome.committed,
            why=outcome.why,
            partners=tuple(partners),
            verdict=verdict,
            ballots=tuple(ballots),
            divisor=divisor,
            digest=digest,
            seconds=seconds,
            sent_bytes=merger.plane.sent_bytes - sent_before,
            plain=plain if outcome.committed else {},
            spread=merger.method.weight_distance(_select_products(gram, members, verdict.admitted)),
            weights=dict(zip(members, weights, strict=True)),
        )

    def _commit_or_undo(
        self, outcome: VoteResult, verdict: AdmissionVerdict, partners: Sequence[int]
    ) -> None:
        """Commit or undo the proposed W and u."""
        merger = self.merger
        if not outcome.committed:
            self.outer.undo()
            return
        self.outer.commit()
        self.admission(partners).commit(verdict)
        if merger.feedback is not None:
            # The residual of a refused message is as wrong as the message; the sum that its island
            # sent belongs to all islands, and was sent.
            merger.feedback.commit(
                lambda tag: is_sum_tag(tag) or self._sender_of(tag) in verdict.admitted
            )

    def _sender_of(self, tag: str) -> int:
        """Return the sender of the message to which an error-feedback tag belongs."""
        if not self.senders:
            return self.merger.plane.index
        return int(tag.split("/")[-3].rpartition(".")[2])

    def _first_half(self, plane: InterIslandGroup) -> list[CompressedExchange]:
        merger = self.merger
        plain_elements = merger.shares.count_elements(self.plain_like)

        def start_exchanges() -> list[CompressedExchange]:
            # Fewer islands have other pieces, and a residual belongs to its own piece.
            tag = f"{self.fragment}" if plane is merger.plane else f"{self.fragment}.near"
            start = partial(plane.start_exchange_of_messages, deadline_s=self.deadline_s)
            found = [
                start(
                    self.pieces, self.senders, self.elements, merger.codec,
                    feedback=merger.feedback, tag=tag,
                )
            ]  # fmt: skip
            if plain_elements:
                whole = find_codec("none", merger.shares.dtype)
                found.append(
                    start(
                        self.plain_pieces, self.senders, plain_elements, whole,
                        feedback=None, tag="plain",
                    )
                )  # fmt: skip
            return found

        return self._run_on_all_ranks(start_exchanges)

    def _judge(
        self,
        plane: InterIslandGroup,
        partners: Sequence[int],
        members: Sequence[int],
        first: Sequence[CompressedExchange],
    ) -> tuple[AdmissionVerdict, list[list[float]], list[float]]:
        """Judge every sender from statistics of all ranks and islands.

        Args:
            members: the senders of all islands, island by island.
            first: the first half of the weights, and that of the running statistics if there are
                any.

        Returns:
            The verdict, the inner products, and the sizes by which the messages are weighted.
        """
        mine = {
            "finite": [all(each) for each in zip(*(one.finite for one in first), strict=True)],
            "gram": first[0].gram,
            "tokens": [one.tokens for _, one in self.proposals],
            "samples": [one.samples for _, one in self.proposals],
        }
        rows = self._run_on_all_ranks(
            lambda: plane.gather(json.dumps(mine).encode(), deadline_s=self.deadline_s)
        )
        told = [
            parse_json_object(row, f"island {i}") for i, row in zip(partners, rows, strict=True)
        ]
        places = range(len(members))
        lanes = self.merger.inner.gather_json(
            {
                "finite": [all(one["finite"][k] for one in told) for k in places],
                "gram": sum_matrices([one["gram"] for one in told]),
                **{key: [n for one in told for n in one[key]] for key in ("tokens", "samples")},
            }
        )
        finite = [all(one["finite"][k] for one in lanes) for k in places]
        gram = sum_matrices([one["gram"] for one in lanes])
        verdict = self.admission(partners).judge(finite, gram, lanes[0]["tokens"], members)
        by_samples = self.merger.method.policy.weighting == "samples"
        return verdict, gram, lanes[0]["samples" if by_samples else "tokens"]

    def admission(self, partners: Sequence[int]) -> AdmissionTest:
        """Return the admission test with the norms of past rounds with these partners."""
        merger = self.merger
        if not merger.method.common_past:
            return AdmissionTest(merger.admission[0].bound, merger.admission[0].cosine)
        everyone = len(partners) == merger.plane.count
        return merger.admission[2 * self.fragment + everyone]

    def _second_half(
        self, first: list[CompressedExchange], weights: list[float], divisor: float
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return this rank's parts of the means over islands: parameters, and other tensors."""
        if not divisor:  # no island is admitted: all know it, and nothing is sent
            return {}, {}

        policy = self.merger.method.policy
        rule = MergeRule(policy.merge, policy.trim if policy.merge == "trimmed" else 0.0)

        def finish() -> list[torch.Tensor]:
            return [
                arrived.finish(weights, divisor, deadline_s=self.deadline_s, rule=rule)
                for arrived in first
            ]

        means = self._run_on_all_ranks(finish)
        shares = self.merger.shares
        mean = shares.join(means[0], self.like)
        return mean, shares.join(means[1], self.plain_like) if len(means) > 1 else {}

    def _vote(
        self, partners: Sequence[int], finite: bool, verdict: AdmissionVerdict
    ) -> tuple[VoteResult, list[Ballot], str]:
        """Vote on the step; return the outcome, the ballots and the digest that all islands share.

        All islands exchange ballots; those of the partners are counted.
        """
        plane = self.merger.plane
        digests = self.merger.inner.gather_json([self.outer.digest(), self.outer.vote_digest()])
        of_all = ("".join(told[k] for told in digests) for k in range(2))
        whole, agreed = (hashlib.sha256(one.encode()).hexdigest() for one in of_all)
        began_s, tally = time.monotonic(), CommitTally(range(plane.count), partners)
        while True:
            own = self._ballot(finite, agreed, verdict)
            tell = partial(plane.gather, own.to_bytes(), deadline_s=self.deadline_s)
            for island, row in enumerate(self._run_on_all_ranks(tell)):
                tally.add(island, Ballot.from_bytes(row, island))
            result = tally.result()
            if result is not None:
                return result, tally.ballots, whole
            self.saves_s = time.monotonic() - began_s

    def _ballot(self, finite: bool, digest: str, verdict: AdmissionVerdict) -> Ballot:
        """Return this island's ballot, equal on all of its ranks; rank 0 sends it."""
        merger = self.merger
        counted = [one for sender, one in self.proposals if sender in verdict.admitted]
        tokens, used = sum(one.tokens for one in counted), sum(one.used for one in counted)
        mine = [tokens, used, self.say.steps_per_s, self.say.stop]
        told = merger.inner.gather_json(
            [finite, self.outer.trouble, mine, merger.last_save.wait_for_result()]
        )
        say = MergeProposal(*told[0][2])
        saved, why = told[0][3]
        if any(one[3][0] is None for one in told):
            saved = None
        well = all(one[0] for one in told)
        if not saved:
            pass
        elif not verdict.admitted:
            why = NOBODY_ADMITTED
        elif not well:
            why = next((one[1] for one in told if one[1]), NOT_FINITE)
        return Ballot(
            round=self.round,
            fragment=self.fragment,
            ok=well and bool(saved),
            digest=digest,
            tokens=say.tokens,
            steps_per_s=say.steps_per_s,
            used=say.used,
            stop=say.stop,
            why=why,
            saved=saved,
        )

    def _run_on_all_ranks(self, work: Callable[[], Value]) -> Value:
        """Run `work()` on every rank of the island; all raise IslandLost if one of them did."""
        lost: IslandLost | None = None
        value: Value | None = None
        try:
            value = work()
        except IslandLost as failure:
            lost = failure
        told = self.merger.inner.gather_json(
            None if lost is None else [str(lost), list(lost.islands), lost.after_s]
        )
        silent = [one for one in told if one is not None]
        if lost is not None:
            raise lost
        if silent:
            raise IslandLost(silent[0][0], tuple(silent[0][1]), silent[0][2])
        return value  # type: ignore[return-value]


def _select_products(
    gram: Sequence[Sequence[float]], partners: Sequence[int], admitted: Sequence[int]
) -> list[list[float]]:
    """Return the inner products of the admitted partners."""
    places = [place for place, island in enumerate(partners) if island in admitted]
    return [[gram[a][b] for b in places] for a in places]


def sum_matrices(matrices: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Sum matrices in their order: the same bits on any machine."""
    size = len(matrices[0])
    return [
        [sum(m[row][column] for m in matrices) for column in range(size)] for row in range(size)
    ]


PAUSE_S = 1.0
"""Seconds that a vote waits for a save before it reports that the save is unfinished."""


class SaveStatus:
    """State of the last save, shared by the training thread and the exchange thread.

    The training thread starts a save after a committed round and records its end; the exchange
    thread votes on the next round. No island may vote before its save has ended, nor vote ok after
    a failed save. So whenever islands die, all of them hold a common round. Before the first save
    there is nothing to wait for.
    """

    def __init__(self, pause_s: float = PAUSE_S) -> None:
        self.pause_s = pause_s
        self._ended, self._why = threading.Event(), ""
        self._ended.set()

    def begin(self) -> None:
        """Start a save: no vote until `end`."""
        self._ended.clear()

    def end(self, why: str = "") -> None:
        """End a save: it is on disk, or `why` not."""
        self._why = why
        self._ended.set()

    def wait_for_result(self) -> tuple[bool | None, str]:
        """Return (whether it is on disk, why not), after `pause_s` at most; None while unfinished.

        >>> save = SaveStatus(pause_s=0.0)
        >>> save.begin()
        >>> save.wait_for_result()
        (None, '')
        >>> save.end("disk full")
        >>> save.wait_for_result()
        (False, 'disk full')
        """
        if not self._ended.wait(self.pause_s):
            return None, ""
        return not self._why, self._why
