"""Rounds of an island whose fellow islands come and go.

    turn      committed turn ─→ its samples ─→ inner steps ─→ change ─→ the next committed turn
    merged    this island merged the turn itself: W is at hand, and is saved
    heal      else it loads the checkpoint of an island that has the turn: weights, outer state, and
              that island's inner optimizer
    behind    the others went on meanwhile: it stops its steps and heals

What is decided, and when, is the members' protocol (`islands/membership`), which
`islands/changing/member_driver.py` runs in a thread of the island's first rank. All ranks get the
same turns (`island_ranks.py`). No vote waits for a disk but by `note_saved`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from shoal.base.errors import CheckpointError, ConfigError, TrainingError
from shoal.base.layouts.changing_members import GOODBYE
from shoal.data.loading.loader import Loader
from shoal.islands.changing.island_ranks import IslandRanks, RankWork
from shoal.islands.changing.turn_records import AppliedTurn
from shoal.islands.membership.committed_turn import CommittedTurn, is_witness, name_members
from shoal.islands.membership.message_json import encode_message
from shoal.islands.sample_ranges import cut_steps
from shoal.trainer.islands.canonical_parts import require_canonical
from shoal.trainer.islands.island_join import (
    IslandConnection,
    collect_merge_tensors,
    load_merged_weights,
)
from shoal.trainer.islands.island_loop import IslandRounds
from shoal.trainer.islands.member_state import MemberCheckpoints
from shoal.trainer.run import Run
from shoal.trainer.step.optimizer_step import reducer_of
from shoal.wire.phases import phase

SAVE_TRIES, SAVE_PAUSE_S = 5, 1.0


@dataclass
class RoundWork:
    """Measurements of this island's last round."""

    steps: int = 0
    tokens: int = 0
    used: int = 0
    compute_s: float = 0.0
    began_s: float = 0.0
    offered_s: float = 0.0


class MemberRounds:
    """Rounds of one island that others may leave and join.

    Args:
        last: the round after which the run ends.

    Attributes:
        fact: the newest turn that this island installed; None before the first.
    """

    def __init__(
        self,
        run: Run,
        joined: IslandConnection,
        loader: Loader,
        ranks: IslandRanks,
        checkpoints: MemberCheckpoints,
        last: int,
    ) -> None:
        self.plain = IslandRounds(run, joined, loader, last)
        self.run, self.joined, self.common = run, joined, joined.common
        self.loader, self.ranks, self.checkpoints, self.last = loader, ranks, checkpoints, last
        self.index, self.policy = joined.policy.index, joined.policy
        self.canonical = require_canonical(joined.canonical)
        self.fact: CommittedTurn | None = None
        self.work = RoundWork()
        self.failures, self.has_trained = 0, False

    def next_turn(self) -> AppliedTurn | None:
        """Wait for the next committed turn and install it; None: stopped on request meanwhile.

        Raises:
            ClusterError: too few islands are left for too long.
            TrainingError: no island's changes count, again and again.
        """
        while True:
            with phase("merge with the other islands"):
                turn = self.ranks.wait_for_turn(self._may_stop)
            if turn is None:
                return None
            known, self.fact = self.fact, turn.fact
            if self._install(turn, known):
                return turn
            self.fact = known
            if not self.ranks.has_newer(turn.fact):
                return None

    def train(self, fact: CommittedTurn) -> None:
        """Take the inner steps of the turn after `fact`, and offer the change."""
        run, policy, work = self.run, self.policy, RoundWork(began_s=time.perf_counter())
        self.work, self.has_trained = work, True
        spans = fact.dealt[fact.names().index(self.index)]
        steps = cut_steps(spans, self.loader.samples, run.plan.batch)
        run.recorder.restart_clock()
        since_s = time.perf_counter()
        for number, batch in enumerate(self.loader.over(steps), 1):
            run.lr_step = fact.round * policy.period + (number - 1) * policy.period // len(steps)
            result = run.step(batch)
            work.tokens += round(result.targets)
            work.used += batch.next_position - batch.position
            work.steps, work.compute_s = number, work.compute_s + time.perf_counter() - since_s
            since_s = time.perf_counter()
            if self.ranks.has_newer(fact):
                return  # the others went on without this island
        change = self._encode_change()
        work.offered_s = time.perf_counter()
        self.ranks.offer(
            fact,
            change,
            RankWork(
                work.tokens,
                work.used,
                work.steps,
                work.compute_s,
                leaves=run.stop_wanted or run.stopping,
            ),
        )

    def _encode_change(self) -> list[bytes]:
        """Return this rank's units of the island's change; a collective of the island's ranks."""
        weights, plain = collect_merge_tensors(self.run)
        local = self.canonical.weights.collect({n: tensor for n, (tensor, _) in weights.items()})
        message = self.joined.method.message(self.common.outer, list(local), local)
        averaged = self.canonical.plain.collect({n: tensor for n, (tensor, _) in plain.items()})
        return self.ranks.merges.merge.encode(message, averaged)

    def finish_save(self) -> None:
        """Wait for the save of the last turn, then let votes go on.

        Raises:
            CheckpointError: this island's disk takes no checkpoint.
        """
        if self.fact is None or self.checkpoints.holds(self.fact):
            return
        for _ in range(SAVE_TRIES):
            outcome = self.run.checkpoint_saver.wait_pending()
            if outcome is not None and outcome.failure is None:
                self.checkpoints.held = self.fact.weights
                self.ranks.note_saved(self.fact)
                return
            time.sleep(SAVE_PAUSE_S)
            self.run.save(wait=False)
        raise CheckpointError(
            f"island {self.index}: round {self.fact.round} is not on its disk after {SAVE_TRIES} "
            f"tries, so it may not vote; try: mend that, and resume: the others go on meanwhile"
        )

    def is_first(self) -> bool:
        """Return whether this island is the first of the newest turn: it validates for all."""
        return self.fact is not None and self.index == min(self.fact.names(), default=0)

    def _may_stop(self) -> bool:
        """Return whether a wait ends: a stop is wanted, and no turn is to be expected."""
        return self.run.stop_wanted and (self.work.offered_s == 0 or self.ranks.awaits)

    def _install(self, turn: AppliedTurn, known: CommittedTurn | None) -> bool:
        """Make a turn this island's own; return False if it could not load it (`heal`)."""
        fact, common = turn.fact, self.common
        changed = known is None or known.weights != fact.weights
        if turn.left_out and known is not None:
            self._report_left_out(turn, known)
        if turn.heal and not (turn.train or self.index in fact.names()):
            return True  # it has no seat yet: with one it heals
        self.checkpoints.check_history(fact, known, heals=turn.heal)
        if turn.heal and not self.checkpoints.heal(fact):
            return False
        common.round, common.digest = fact.round, fact.weights
        common.stream, common.underway = fact.stream, []
        spans = {name: fact.dealt[place] for place, name in enumerate(fact.trainers())}
        common.dealt = [spans.get(name, ()) for name in range(max(spans, default=0) + 1)]
        common.members = encode_message(fact)
        load_merged_weights(self.run, self.joined, max(0, fact.round - 1))
        if turn.merged is not None:
            self._apply_statistics(turn)
            if self.joined.method.resets_inner:
                self.run.optimizer.state.clear()
        self.plain._reset_broken()
        refused = turn.refused
        stops = common.refusals.count(fact.committers + tuple(refused), refused)
        common.keep()
        self._emit(turn, known)
        self.checkpoints.keep_addresses()
        if not turn.heal and changed and fact.round and not self.checkpoints.holds(fact):
            self.run.save(wait=False)
        else:
            self.checkpoints.keep_turn(fact)
            note = self.ranks.note_healed if turn.heal else self.ranks.note_saved
            note(fact)
        if self.index in stops:
            raise TrainingError(
                f"island {self.index}: its change was refused {self.policy.refusals} rounds in a "
                f"row (last: {refused.get(self.index, 'in an earlier round')}); its data or its "
                f"machine are at fault"
            )
        self._stop_after_failures(turn)
        return True

    def _report_left_out(self, turn: AppliedTurn, known: CommittedTurn) -> None:
        """Say why this island takes the state of another one."""
        first, last = known.round, turn.fact.round - 1
        rounds = f"round {last}" if first >= last else f"rounds {first} – {last}"
        self.run.recorder.notice(
            f"island {self.index} was left out of {rounds} {turn.left_out}; its steps of "
            f"{'that round' if first >= last else 'those rounds'} do not count, and it loads the "
            f"state of another island"
        )

    def _apply_statistics(self, turn: AppliedTurn) -> None:
        """Write the means of running statistics into the model."""
        if turn.merged is None or not self.canonical.has_statistics:
            return
        _, plain = collect_merge_tensors(self.run)
        for name, mean in self.canonical.plain.distribute(turn.merged.plain).items():
            plain[name][0].copy_(mean)
        reducer_of(self.run.program).publish()
        self.run.guards.writes.allow_write()

    def _stop_after_failures(self, turn: AppliedTurn) -> None:
        """Raise an error if no island's change counted in too many turns in a row."""
        if turn.fact.committers:
            self.failures = 0
        elif turn.refused:
            self.failures += 1
        if self.failures >= self.policy.refusals:
            raise TrainingError(
                f"islands: {self.failures} rounds in a row were discarded, last because "
                f"{'; '.join(turn.refused.values())}; try: a lower optimizer.lr or islands.outer_lr"
            )

    def _emit(self, turn: AppliedTurn, known: CommittedTurn | None) -> None:
        """Write the event of a turn: who merged, who came, who left and why."""
        fact, work, emit = turn.fact, self.work, self.run.recorder.events.emit
        now_s, step = time.perf_counter(), self.run.step_count
        self.work, sent_bytes = RoundWork(), self.ranks.count_sent_bytes()
        if not self.run.world.is_first:
            return
        if known is None or known.session != fact.session:
            is_encrypted = bool(self.policy.key)
            emit(
                "islands_met",
                count=len(fact.trainers()),
                at=self.policy.at,
                encrypted=is_encrypted,
            )
        if fact.committers or (known is not None and known.session == fact.session):
            before = set(known.names()) if known is not None else set()
            joined = sorted(set(fact.names()) - before) if before else []
            left = {
                name: turn.absent.get(name, _why_gone(name))
                for name in sorted(before - set(fact.names()))
            }
            waited_s = now_s - work.offered_s if work.offered_s else 0.0
            emit(
                "round_committed" if fact.committers else "round_discarded",
                step=step,
                round=fact.round - bool(fact.committers),
                seconds=now_s - work.began_s if work.began_s else 0.0,
                compute_s=work.compute_s,
                exposed_s=waited_s,
                sent_bytes=sent_bytes,
                exchange_s=waited_s,
                tokens=work.tokens if self.index in fact.committers else 0,
                steps=work.steps if self.index in fact.committers else 0,
                tokens_all=sum(one.tokens for one in fact.work),
                admitted=list(fact.committers),
                refused={str(name): why for name, why in turn.refused.items()},
                divisor=fact.divisor if turn.merged is None else turn.merged.divisor,
                digest=fact.weights,
                why="; ".join(turn.absent.values()),
                members=[[one.name, one.steps, one.samples, one.tokens] for one in fact.work],
                seats=list(fact.trainers()),
                joined=joined,
                left={str(name): why for name, why in left.items()},
                healed=turn.heal,
            )
            for island, why in turn.refused.items():
                emit("island_refused", step=step, island=island, why=why)
            count = len(fact.trainers())
            lines = describe_coming_and_going(fact.round, left, joined, count)
            lines += turn.merged.verdict.told if turn.merged else []
            if fact.committers:
                changes = len(fact.committers)
                lines += self.plain.describe_untrimmed_round(fact.round - 1, changes)
            for line in lines:
                emit("notice", step=step, text=line)


def describe_coming_and_going(
    round_: int, left: dict[int, str], joined: list[int], count: int
) -> list[str]:
    """Return a line for each member that left or joined.

    Args:
        round_: the next round.
        left: member → why it has no seat any more.
        count: islands of the next round.

    >>> describe_coming_and_going(33, {2: "island 2: its process ended"}, [3], 3)
    ['left: island 2: its process ended; islands of round 33: 3', 'joined: island 3, in round 33']
    """
    lines = [f"left: {why}; islands of round {round_}: {count}" for why in left.values()]
    return lines + [f"joined: {name_members([name])}, in round {round_}" for name in joined]


def _why_gone(name: int) -> str:
    """Return why a member that is no absent island has no seat any more."""
    how = "it does not answer" if is_witness(name) else GOODBYE
    return f"{name_members([name])}: {how}"


def check_one_machine(run: Run) -> None:
    """Refuse an island on several machines that may come and go.

    Raises:
        ConfigError: the island's processes run on more than one machine.
    """
    world = run.world
    if world.local_size < world.size:
        raise ConfigError(
            f"islands.least: an island that may come and go is on one machine, and only "
            f"{world.local_size} of this one's {world.size} processes are here; try: an island of "
            f"each machine, or islands.least=0"
        )
