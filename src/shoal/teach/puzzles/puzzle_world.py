"""Run a puzzle's program on all ranks side by side and check that it made one training step.

Ranks are coroutines: one runs until it requests something that does not exist yet. A collective
happens once all ranks request the same one. A rank has one mailbox with room for one message, as in
the notebook, so a program must not let two senders race. Mailbox "each" gives it an unbounded queue
per sender, as real networks do. At the end every layer's weight must be held, whole, at step 1,
over all ranks.
Source of the rules: github.com/srush/LLM-Training-Puzzles (MIT).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.base.errors import PlanError
from shoal.teach.puzzles.model import Program, PuzzleRank, RankRequest, StoreEntry


def run_puzzle(
    program: Program, ranks: int, layers: int, batches: int, mailbox: str = "one"
) -> list[PuzzleRank]:
    """Run a program on all ranks, check the result, and return the ranks with their operations.

    Args:
        mailbox: "one" per rank and message (the notebook's), or "each": one per sender.

    Raises:
        PlanError: a broken rule, a deadlock between ranks, or a wrong result.
    """
    models = [PuzzleRank(rank, ranks, layers, batches) for rank in range(ranks)]
    world = _RankScheduler(models, program, mailbox)
    try:
        world.run()
    finally:
        for coroutine in world.coroutines:
            coroutine.close()
    _check(models)
    return models


class _RankScheduler:
    """Scheduler of the ranks: each runs until it requests something that does not exist yet."""

    def __init__(self, models: Sequence[PuzzleRank], program: Program, mailbox: str):
        self.ranks = len(models)
        self.coroutines = [program(model).__await__() for model in models]
        self.asks: dict[int, RankRequest | None] = dict.fromkeys(range(self.ranks))
        self.one = mailbox == "one"
        self.mail: dict[tuple[int, int], list[tuple[int, StoreEntry]]] = {}

    def run(self) -> None:
        while self.asks:
            moved = False
            for rank in list(self.asks):
                moved |= self.step(rank)
            moved |= self.run_collective()
            if not moved:
                says = "; ".join(
                    f"rank {ask.rank} waits in {ask.what}"
                    + (f" for rank {ask.peer}" if ask.peer >= 0 else "")
                    for ask in self.asks.values()
                    if ask
                )
                raise PlanError(f"puzzle: deadlock: {says}")

    def step(self, rank: int) -> bool:
        """Resume one rank if its request can be answered; return whether it ran."""
        ask = self.asks[rank]
        if ask is not None and not self.answer_request(ask):
            return False
        try:
            self.asks[rank] = next(self.coroutines[rank])
        except StopIteration:
            del self.asks[rank]
        return True

    def answer_request(self, ask: RankRequest) -> bool:
        """Do the send or receive that a rank requests, if possible now.

        `run_collective` answers collectives.

        Args:
            ask: the request; its `answer` is set.

        Returns:
            True if it has an answer, so that the rank can go on.

        Raises:
            PlanError: the mailbox holds the message of another rank.
        """
        if ask.what == "send" and ask.thing is not None:
            box = self.mailbox(ask.rank, ask.peer)
            if not (self.one and box):
                box.append((ask.rank, ask.thing))
                ask.answer = ask.thing
        elif ask.what == "receive" and (box := self.mailbox(ask.peer, ask.rank)):
            sender, thing = box.pop(0)
            if sender != ask.peer:
                raise PlanError(
                    f"puzzle: rank {ask.rank} waits for rank {ask.peer}, its mailbox holds a "
                    f"message of rank {sender}"
                )
            ask.answer = thing
        return ask.answer is not None

    def mailbox(self, sender: int, taker: int) -> list[tuple[int, StoreEntry]]:
        return self.mail.setdefault((0 if self.one else sender, taker), [])

    def run_collective(self) -> bool:
        """Run the collective that all ranks request; return False if some rank requests none.

        Raises:
            PlanError: ranks request different collectives.
        """
        asks = [ask for ask in self.asks.values() if ask is not None and ask.thing is not None]
        meeting = [ask for ask in asks if ask.what not in ("send", "receive") and not ask.answer]
        if len(meeting) < self.ranks:
            return False
        things = [ask.thing for ask in meeting if ask.thing is not None]
        pairs = zip(meeting, things, strict=True)
        names = sorted({f"{ask.what} of layer {thing.layer}" for ask, thing in pairs})
        if len(names) > 1:
            raise PlanError(f"puzzle: ranks meet in different collectives: {', '.join(names)}")
        joined = things[0]
        for thing in things[1:]:
            joined = replace(
                joined, batches=joined.batches | thing.batches, shards=joined.shards | thing.shards
            )
        for ask in meeting:
            ask.answer = joined
        return True


def _check(models: Sequence[PuzzleRank]) -> None:
    """Check that every layer's weight is whole, after one step."""
    for layer in range(models[0].layers):
        held = [
            thing
            for model in models
            for thing in model.stores["weights"].values()
            if thing.layer == layer and thing.step == 1
        ]
        totals = {thing.total for thing in held}
        shards = {shard for thing in held for shard in thing.shards}
        if len(totals) != 1 or len(shards) != totals.pop():
            raise PlanError(f"puzzle: layer {layer} ends without its whole weight at step 1")
