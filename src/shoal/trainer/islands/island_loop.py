"""Rounds of an island: inner steps, and merges with the other islands between them.

    round   samples are dealt → inner steps → fragments leave and arrive on the way → the last
            one's commit ends the round: samples of the next one are dealt, a checkpoint is written

A refused island, and all islands after a discarded round, continue from the previous merged
weights; the samples of such rounds are dealt again. No island votes before its disk holds the
result of the last round. So there is always a round that all islands hold, whenever one dies. The
rows of metrics.jsonl are inner steps; every round is an event.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.base.errors import (
    ClusterError,
    ConfigError,
    ShoalError,
    TrainingError,
)
from shoal.base.layouts.trimmed_mean import describe_untrimmed
from shoal.data.loading.loader import Loader
from shoal.islands.commit_vote import commit_failure_remedy, decide_commit
from shoal.islands.merge_proposal import (
    MergeProposal,
    MergeResult,
    collect_refusals,
    collect_round_fields,
    format_merge_lines,
)
from shoal.islands.method import FragmentSchedule, MergedWeights
from shoal.islands.outer_optimizer import all_finite
from shoal.islands.sample_ranges import cut_steps, drop_consumed, inner_steps
from shoal.trainer.islands.island_join import (
    IslandConnection,
    collect_merge_tensors,
    load_merged_weights,
)
from shoal.trainer.run import Run
from shoal.trainer.step.optimizer_step import StepResult, reducer_of
from shoal.wire.phases import phase


class IslandRounds:
    """Rounds of one island.

    Args:
        last: the round after which the run ends, with the merged weights in place of its own; 0:
            never.
    """

    def __init__(self, run: Run, joined: IslandConnection, loader: Any, last: int = 0) -> None:
        self.run, self.joined, self.common, self.last = run, joined, joined.common, last
        self.policy = joined.policy
        self.round_steps = self.policy.period
        if not isinstance(loader, Loader):
            raise ConfigError(
                "data.source: islands deal samples by their number, and an iterable has none; "
                "try: a dataset with __getitem__ and __len__"
            )
        self.loader, self.first_step = loader, run.step_count
        self.run_step: Callable[[Any], StepResult] = lambda batch: run.step(batch)
        run.first_key = joined.policy.index * -(-run.plan.batch // run.plan.micro_batch)
        # Weights that are not finite are replaced at the end of the round, not by a stop.
        run.skips.limit = sys.maxsize
        self._unsaved = ""
        self._untrimmed = set[int]()
        self._sent: dict[str, torch.Tensor] | None = None
        self._is_whole = True  # no fragment of the last round was discarded
        self.common.since = self.common.since or [0] * len(joined.fragments)
        run.recorder.events.listeners.append(self._on_event)
        self._install_pull_hook()

    @property
    def has_work(self) -> bool:
        """Return whether samples are left: a shared stream has no end."""
        return True

    def save_start(self) -> None:
        """Save the state before the first round, where islands need it."""

    def one(self) -> MergeResult:
        """Train one round; return the merge of its last fragment.

        Raises:
            IslandLost: an island is lost.
            TrainingError: changes are refused.
        """
        common, run, policy = self.common, self.run, self.policy
        if not common.dealt:
            self._deal_samples([None] * policy.count)
        began_s = time.perf_counter()
        spans = common.dealt[policy.index]
        steps = cut_steps(spans, self.loader.samples, run.plan.batch)
        moments = self.joined.method.schedule_fragments(len(steps))
        self.compute_s = self.exposed_s = 0.0
        self.tokens, self.used, merges = 0, 0, []
        run.recorder.restart_clock()
        since_s = time.perf_counter()
        for number, batch in enumerate(self.loader.over(steps), 1):
            run.lr_step = common.round * policy.period + (number - 1) * policy.period // len(steps)
            result = self.run_step(batch)
            self.tokens += round(result.targets)
            common.since = [tokens + round(result.targets) for tokens in common.since]
            self.used += batch.next_position - batch.position
            self.compute_s += time.perf_counter() - since_s
            self.steps_per_s = number / self.compute_s
            merges += self._send_and_apply(moments, number)
            since_s = time.perf_counter()
        merge = merges[-1]
        self._close_round(merges, began_s, len(steps))
        return merge

    def can_resume_after(self, merge: MergeResult) -> bool:
        """Return whether a run can resume after the round of this merge: not if regions differ."""
        everyone = len(merge.partners) == self.policy.count and self._is_whole
        return self._is_round_over(merge) and (everyone or self.policy.regions == 1)

    def load_merged(self) -> None:
        """Replace this island's weights by the merged weights, and drop its later changes."""
        load_merged_weights(self.run, self.joined, max(0, self.common.round - 1))
        self.common.lost(range(self.policy.count))

    def check_moved(self) -> None:
        """Raise TrainingError, on all ranks, if no inner step of this island moved a weight."""
        so = "no step of this island moved a weight"
        self.run.skips.check_moved(self.first_step, self.run.step_count, so)

    def _send_and_apply(
        self, moments: Sequence[FragmentSchedule], number: int
    ) -> list[MergeResult]:
        """Send and apply the fragments that are due after inner step `number`."""
        began_s, done = time.perf_counter(), []
        if self.joined.is_alone:
            self._check_before_merge(moments, number)
            return []
        for moment in moments:
            if moment.send_after == number:
                self._send(moment, last=moment is moments[-1])
                if moment is moments[0]:
                    self._finish_save()
            if moment.apply_after == number:
                done.append(self._apply(moment, last=moment is moments[-1]))
        self.exposed_s += time.perf_counter() - began_s
        if done:
            self.run.recorder.restart_clock()
        return done

    def _check_before_merge(self, moments: Sequence[FragmentSchedule], number: int) -> None:
        """Refuse a replay without the other islands that reaches a merge.

        Raises:
            ConfigError: names the last step that can be repeated.
        """
        if any(moment.apply_after == number for moment in moments):
            step = self.run.step_count
            raise ConfigError(
                f"--step: after step {step} a fragment arrives from the other islands, whose "
                f"changes are not recorded; try: --step {step}"
            )

    def _send(self, moment: FragmentSchedule, *, last: bool) -> None:
        joined = self.joined
        weights, plain = collect_merge_tensors(self.run)
        names = [name for name in joined.fragments[moment.fragment] if name in weights]
        local = {name: weights[name][0] for name in names}
        outer = joined.common.outer.at(joined.common.round)
        trains_on = moment.apply_after > moment.send_after
        self._sent = joined.method.sent(outer, names, local) if trains_on else None
        message = joined.method.message(outer, names, self._sent or local)
        tokens, joined.common.since[moment.fragment] = joined.common.since[moment.fragment], 0
        say = MergeProposal(tokens, self.used, self.steps_per_s, self.run.stopping, self.used)
        averaged = {name: tensor.to("cpu") for name, (tensor, _) in plain.items()} if last else {}
        joined.merger.round_s = self.compute_s
        joined.merger.send(joined.common.round, moment.fragment, message, say, averaged)

    def _start_save(self) -> None:
        """Start to save the islands' last agreement; the next vote waits for its end."""
        self._unsaved = ""
        self.joined.merger.last_save.begin()
        self.run.save(wait=False)

    def _finish_save(self) -> None:
        """Wait for the save in progress, and report its end to the exchange and the other islands.

        It runs in the first fragment of a round: after a change of W the round before could not be
        saved.
        """
        last_save = self.joined.merger.last_save
        try:
            self.run.checkpoint_saver.wait_pending()
        except ShoalError as failure:
            last_save.end(str(failure))
            raise
        last_save.end(self._unsaved)

    def _on_event(self, event: dict[str, Any]) -> None:
        """Record a failed checkpoint, on the island's first rank, which votes for it."""
        if event["event"] == "checkpoint_failed":
            self._unsaved = f"round {self.common.round} is not on its disk: {event['reason']}"

    def _apply(self, moment: FragmentSchedule, *, last: bool) -> MergeResult:
        joined, index = self.joined, self.policy.index
        with phase("merge with the other islands"):
            merge = joined.merger.result()
        refused = merge.refused(index)
        weights, plain = collect_merge_tensors(self.run)
        names = [name for name in joined.fragments[moment.fragment] if name in weights]
        local = {name: weights[name][0] for name in names}
        overwrite = bool(refused) or not merge.committed
        outer = joined.common.outer.at(merge.round)
        joined.method.apply_merge(outer, names, local, refused=overwrite, sent=self._sent)
        self._sent = None
        for name, mean in merge.plain.items():
            plain[name][0].copy_(mean)
        reducer_of(self.run.program).publish()
        self.run.guards.writes.allow_write()
        if overwrite:
            joined.common.since[moment.fragment] = 0
            self._reset_broken()
        if overwrite and last:  # the round's samples are dealt again, so its changes are dropped
            load_merged_weights(self.run, joined, merge.round)
        return merge

    def _close_round(self, merges: Sequence[MergeResult], began_s: float, steps: int) -> None:
        """Return unused samples, write events and a checkpoint; raise if refusals are too many."""
        common, policy, merge = self.common, self.policy, merges[-1]
        self._is_whole = all(one.committed for one in merges)
        self._return_samples(merge)
        round_number, over = common.round, self._is_round_over(merge)
        if over:
            common.round, common.digest = common.round + 1, merge.digest
        common.failures = 0 if merge.committed else common.failures + 1
        stops = common.refusals.count(merge.partners, collect_refusals(merges))
        self._deal_samples([ballot.steps_per_s for ballot in merge.ballots])
        if merge.committed and self.joined.method.resets_inner:
            self.run.optimizer.state.clear()
        round_s = time.perf_counter() - began_s
        sent = sum(self.joined.inner.gather_json(sum(one.sent_bytes for one in merges)))
        exchange_s = sum(one.seconds for one in merges)
        self._emit_round(
            merges, round_number, round_s, steps, sent_bytes=sent, exchange_s=exchange_s
        )
        if over and common.round == self.last:
            self.load_merged()
        if over:
            common.keep()
        unsaved = not merge.ballots[policy.index].saved
        if self.run.recorder.folder is not None and (unsaved or self.can_resume_after(merge)):
            self._start_save()
        if policy.index in stops:
            raise TrainingError(
                f"island {policy.index}: its change was refused {policy.refusals} rounds in a row "
                f"(last: {collect_refusals(merges)[policy.index]}); its data or its machine are "
                "at fault"
            )
        self._stop_after_failures(merge)

    def _stop_after_failures(self, merge: MergeResult) -> None:
        """Raise an error if too many rounds in a row were discarded."""
        failures = self.common.failures
        if failures < self.policy.refusals:
            return
        numbers, nearest = commit_failure_remedy(merge.ballots)
        if all(ballot.saved for ballot in merge.ballots):
            self.check_moved()  # 0 targets of all islands: a mean over them is not finite
        line = f"islands: {failures} rounds in a row were discarded, last because "
        kind = TrainingError if numbers else ClusterError
        raise kind(f"{line}{merge.why}; try: {nearest}")

    def _is_merge_committed(self, merge: MergeResult, island: int) -> bool:
        """Return whether the merge of an island and its partners was committed."""
        partners = self.joined.method.partners(merge.round, island, self.policy.count)
        return decide_commit(merge.ballots, partners).committed

    def _is_round_over(self, merge: MergeResult) -> bool:
        """Return whether the round ends, for all islands: some merge of it was committed."""
        return any(self._is_merge_committed(merge, island) for island in range(self.policy.count))

    def _return_samples(self, merge: MergeResult) -> None:
        """Return samples to the stream that no committed round used.

        Samples of steps after the last fragment was sent stay: the next message covers them.
        """
        common = self.common
        before = [*common.underway, *[()] * self.policy.count]
        common.underway = []
        for island, spans in enumerate(common.dealt):
            used = merge.ballots[island].used if self._is_merge_committed(merge, island) else 0
            lost = () if used else (*spans, *before[island])
            common.stream = common.stream.return_unused(lost)
            common.underway.append(drop_consumed(spans, used) if used else ())

    def _deal_samples(self, speeds: Sequence[float | None]) -> None:
        common, samples = self.common, self.loader.samples
        if self.policy.pace == "equal":
            speeds = [None] * self.policy.count
        steps = inner_steps(self.policy.period, speeds)
        wanted = common.stream.count_samples(steps, self.run.plan.batch, samples)
        common.stream, dealt = common.stream.deal(wanted)
        common.dealt = list(dealt)

    def _emit_round(
        self,
        merges: Sequence[MergeResult],
        round_number: int,
        round_s: float,
        steps: int,
        **sums: Any,
    ) -> None:
        if not self.run.world.is_first:
            return
        emit, step = self.run.recorder.events.emit, self.run.step_count
        emit(
            "round_committed" if merges[-1].committed else "round_discarded",
            step=step,
            round=round_number,
            seconds=round_s,
            compute_s=self.compute_s,
            exposed_s=self.exposed_s,
            **sums,
            tokens=self.tokens,
            steps=steps,
            **collect_round_fields(merges),
        )
        for island, why in collect_refusals(merges).items():
            emit("island_refused", step=step, island=island, why=why)
        lines = format_merge_lines(merges)
        if merges[-1].committed:
            changes = sum(weight > 0 for weight in merges[-1].weights.values())
            lines += self.describe_untrimmed_round(round_number, changes)
        for line in lines:
            emit("notice", step=step, text=line)

    def describe_untrimmed_round(self, round_number: int, changes: int) -> list[str]:
        """Return the line on a trimmed mean that dropped nothing, once for each number of changes.

        A round may have fewer changes than the first one: some were refused, or an owner is done.
        """
        if self.policy.merge != "trimmed" or changes in self._untrimmed:
            return []
        self._untrimmed.add(changes)
        text = describe_untrimmed(self.policy.trim, changes)
        return [f"round {round_number}: {text}"] if text else []

    def _install_pull_hook(self) -> None:
        """Install the update hook of a method that pulls inner steps towards the merged weights."""
        run, method = self.run, self.joined.method
        if not method.pulls:
            return
        canonical = self.joined.canonical
        outer: MergedWeights = self.common.outer if canonical is None else canonical.anchor
        local = run.program.local
        for name, one in local.items():
            if name in outer.weights and outer.weights[name].numel() != one.parameter.numel():
                raise ConfigError(
                    f"islands.method = {self.policy.method}: pulls whole parameters, and "
                    f"{run.plan.layout.text()} steps slices of them; try: layout.strategy=fsdp"
                )
        parameters = {name: one.parameter for name, one in local.items() if name in outer.weights}
        run.adjust = lambda: method.before_update(outer, parameters)

    def _reset_broken(self) -> None:
        """Delete optimizer state that is not finite: it would spoil the loaded weights."""
        state = self.run.optimizer.state
        for parameter, kept in list(state.items()):
            tensors = [value for value in kept.values() if isinstance(value, torch.Tensor)]
            if not all(all_finite(tensor) for tensor in tensors):
                state.pop(parameter)
