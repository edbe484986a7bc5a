"""Rounds of data owners: islands whose data stay with them, or groups that train several.

    round   owners are drawn → each group trains its drawn owners, one after another, all from the
            merged weights → their changes travel → commit: positions move on, a checkpoint is
            written

It differs from `IslandRounds` in what an owner has for itself: its samples, their order and its
epochs, the inner optimizer, the method's control. All owners, also those that did not train, hold
the merged weights after a round. An owner whose change is refused repeats its samples.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.base.errors import ConfigError, TrainingError
from shoal.base.layouts.trimmed_mean import check_trim, count_drawn
from shoal.checkpoint.format.weighted_paths import BRANCH
from shoal.config.sections import Config
from shoal.data.owner_split import deal_samples
from shoal.data.sources import Source
from shoal.islands.merge_proposal import (
    IslandChange,
    MergeProposal,
    MergeResult,
    collect_refusals,
)
from shoal.islands.owner_schedule import OwnerSchedule
from shoal.optim.schedule import warmup_steps
from shoal.trainer.islands.island_join import (
    IslandConnection,
    collect_merge_tensors,
    load_merged_weights,
)
from shoal.trainer.islands.island_loop import IslandRounds
from shoal.trainer.islands.owner_data import (
    OwnerData,
    agree_on_owners,
    deal_held_out,
    describe_sent_data,
    find_worst_owner,
    make_owner_validator,
    open_owners,
)
from shoal.trainer.islands.owner_shares import OwnerShares
from shoal.trainer.jobs.opening_lines import record_total_steps
from shoal.trainer.jobs.validation import make_validator
from shoal.trainer.run import Run
from shoal.trainer.state.initial_weights import hash_weights
from shoal.trainer.step.metrics_rows import write_rows_together
from shoal.trainer.step.skipped_steps import SpikeDetector
from shoal.wire.phases import phase

UNLIKE_ACCURACY = {"mean": 76, "median": 39, "trimmed": 49}
"""Accuracy in percent of five right owners, dirichlet:0.1, ten rounds: docs/proof/owners.md."""
UNLIKE_WRONG = {"mean": 63, "median": 31, "trimmed": 44}
"""The same, one of the five owners with permuted labels."""


def open_owner_rounds(
    run: Run, joined: IslandConnection, source: Source, config: Config, total_steps: int
) -> tuple[OwnerRounds, Callable[[], Any]]:
    """Open the owners' data and return their rounds, and the validation of all owners.

    Args:
        total_steps: inner steps of an owner, if `train.epochs` does not limit them.

    Raises:
        ConfigError: as of `open_owners` and `agree_on_owners`.
    """
    deal = None
    if config.data.split:
        deal = deal_samples(
            source.train, config.islands.count, config.data.split, config.train.seed
        )
    owners = open_owners(run, source, config, deal)
    held, names = agree_on_owners(joined, owners)
    for test in joined.common.admission:
        test.names = names
    policy = joined.policy
    schedule = OwnerSchedule(
        tuple(held),
        run.plan.batch,
        policy.period,
        policy.epochs,
        config.train.epochs,
        policy.sample,
        run.plan.seed,
    )
    rounds = OwnerRounds(
        run,
        joined,
        {one.number: one for one in owners},
        schedule,
        schedule.count_rounds(total_steps),
        names,
    )
    run.rate.length.total_steps = rounds.last * schedule.round_steps
    has_text = source.tokenizer is not None
    _record_group_steps(rounds)
    if policy.merge == "trimmed":
        full = sum(samples > 0 for samples in held)
        check_trim(policy.trim, count_drawn(policy.sample, full), f"{full} owners have samples")
    line = describe_sent_data(run, joined, held, names, has_text=has_text)
    if run.world.is_first and not run.step_count:
        for text in (line, *_describe_choices(config, schedule)):
            run.recorder.notice(text)
    if deal is None:
        return rounds, make_owner_validator(run, joined, owners, config)
    # The first group validates for all owners, in one pass over what is held out.
    if not policy.index:
        source, line = deal_held_out(source, deal, names)
        if line and run.world.is_first and not run.step_count:
            run.recorder.notice(line)
    validate = make_validator(run, source, config, find_worst_owner)
    return rounds, validate if not policy.index else joined.merger.patience.extend_next_deadline


def _record_group_steps(rounds: OwnerRounds) -> None:
    """Record the steps of this group in the whole run, which the progress shows."""
    run, common = rounds.run, rounds.common
    if run.recorder.folder is None or not run.world.writes_files:
        return
    steps = rounds.schedule.count_group_steps(
        rounds.owners,
        range(common.round, rounds.last),
        common.positions,
        stopped=common.refusals.at_limit(),
        first_step=run.step_count,
    )
    if steps:
        record_total_steps(run.recorder.folder, steps)


def _describe_choices(config: Config, schedule: OwnerSchedule) -> list[str]:
    """Return a line for each choice of keys that does less than a reader may expect."""
    islands, train, lines = config.islands, config.train, list[str]()
    if islands.method == "scaffold":
        lines += _describe_scaffold_rate(config, schedule)
    if islands.merge != "mean" and config.data.split not in ("", "even"):
        mean, robust = UNLIKE_ACCURACY["mean"], UNLIKE_ACCURACY[islands.merge]
        lines.append(
            f"islands.merge = {islands.merge}: owners are unlike (data.split = "
            f"{config.data.split}), and robust merges lose accuracy on unlike data: on the digits "
            f"{robust} % instead of {mean} % with the mean, also {UNLIKE_WRONG[islands.merge]} % "
            f"instead of {UNLIKE_WRONG['mean']} % with one wrong owner of five; try: "
            f"islands.merge=mean"
        )
    if islands.sample < 1 and train.epochs and islands.epochs:
        rounds = schedule.count_rounds(0)
        lines.append(
            f"islands.sample = {islands.sample:g}: train.epochs / islands.period make {rounds} "
            f"rounds, and an owner trains in {rounds * islands.sample:.3g} of them in the mean: "
            f"{train.epochs * islands.sample:.3g} passes over its samples"
        )
    return lines


def _describe_scaffold_rate(config: Config, schedule: OwnerSchedule) -> list[str]:
    """Return a line for each key with which SCAFFOLD's inner steps are not those of its paper.

    Its controls are means of gradients over a round, for inner steps of SGD at one rate. A warm-up
    of several rounds made a CNN need twice as many rounds (docs/reference/federated.md). A shorter
    one ends in the first round, in which all controls are zero.
    """
    optimizer, lines = config.optimizer, list[str]()
    if optimizer.name != "sgd":
        lines.append(
            f"islands.method = scaffold: the paper's inner optimizer is sgd, and here it is "
            f"{optimizer.name}; all owners weigh the same; try: optimizer.name=sgd "
            f"optimizer.schedule=constant optimizer.warmup_steps=0"
        )
    total_steps = schedule.count_rounds(config.train.steps) * schedule.round_steps
    rise = warmup_steps(optimizer, total_steps) if optimizer.schedule != "one-cycle" else 0
    if rise > schedule.round_steps:
        by = "the default, a tenth of the run" if optimizer.warmup_steps < 0 else f"{rise} steps"
        lines.append(
            f"islands.method = scaffold: the rate rises over the first "
            f"{-(-rise // schedule.round_steps)} rounds (optimizer.warmup_steps: {by}), and "
            f"controls of small rates are wrong for the full one: it can take twice as many "
            f"rounds; try: optimizer.warmup_steps=0"
        )
    return lines


class OwnerRounds(IslandRounds):
    """Rounds of the data owners that one group of processes trains.

    Args:
        owners: their data, by number.
        last: the round after which the run ends; 0: never.
        names: of all owners, by number.
    """

    def __init__(
        self,
        run: Run,
        joined: IslandConnection,
        owners: Mapping[int, OwnerData],
        schedule: OwnerSchedule,
        last: int = 0,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(run, joined, run.feed.loaders[0], last)
        common, states = joined.common, joined.common.owners
        if states is None:
            raise ConfigError("islands.data = shared: owners hold data of their own; try: own")
        self.owners, self.schedule, self.states = owners, schedule, states
        self.round_steps = schedule.round_steps
        common.held = list(schedule.held)
        common.positions = common.positions or [0] * len(common.held)
        if states.takes_turns:  # the losses of different owners are no series
            run.spikes = SpikeDetector("off")
        self._saved_step = run.step_count
        self._steps = 0
        self.names = names or [str(owner) for owner in range(len(common.held))]
        self.shares = OwnerShares(self.names, common.held, common.round)

    @property
    def has_work(self) -> bool:
        """Return whether a data owner has samples left to train on."""
        return bool(self.schedule.active(self.common.positions, self.common.refusals.at_limit()))

    def check_moved(self) -> None:
        """Raise TrainingError if no step of this group moved a weight, or its owner was stopped.

        A group whose owners were not drawn made no step, and nothing is wrong. A stopped owner
        among several of a group is reported by a line alone.
        """
        if self._steps:
            super().check_moved()
        stopped = set(self.common.refusals.at_limit()) & set(self.owners)
        if stopped and not self.states.takes_turns:
            name = self.owners[stopped.pop()].name
            raise TrainingError(
                f"owner {name}: its change was refused {self.policy.refusals} rounds in a row, and "
                f"the others went on without it; its data or its machine are at fault"
            )

    def save_start(self) -> None:
        """Save the state before the first round, so that all groups always hold a common round."""
        if self.run.recorder.folder is None or self.common.digest:
            return
        if not self.common.round:
            self.run.check_folder()  # an owner that is not drawn at once takes its first step later
            self.common.digest = self.joined.compute_digest()
            self.common.keep()
            self._start_save()

    def one(self) -> MergeResult:
        """Train one round; return its merge.

        Raises:
            IslandLost: a group is lost.
            TrainingError: changes are refused.
        """
        common, run, policy = self.common, self.run, self.policy
        began_s = time.perf_counter()
        stopped = common.refusals.at_limit()
        drawn = self.schedule.draw(common.round, common.positions, stopped)
        senders = [
            [owner for owner in policy.owners_of(group) if owner in drawn]
            for group in range(policy.groups)
        ]
        steps = {
            owner: len(self.schedule.cut_steps(owner, common.positions[owner])) for owner in drawn
        }
        self.compute_s = self.exposed_s = self.steps_per_s = 0.0
        self.tokens, self.used = 0, 0
        first_step = run.step_count
        run.recorder.restart_clock()
        _, plain = collect_merge_tensors(run)
        before = {name: tensor.detach().clone() for name, (tensor, _) in plain.items()}
        changes, controls = [], {}
        for place, owner in enumerate(senders[policy.index]):
            if place:
                self._load_start(before)
            change, controls[owner] = self._train_owner(owner)
            changes.append(change)
        merge = self._merge_changes(changes, senders, before)
        counts = set(merge.verdict.admitted) if merge.committed else set()
        for owner, control in controls.items():
            if owner in counts:
                self.states.keep_control(owner, control)
        if merge.committed:
            common.positions = self.schedule.advance(common.positions, drawn, counts)
            self.shares.add_round(steps, merge.weights, by_size=policy.merge == "mean")
        self._steps += run.step_count - first_step
        self._close_owners_round(merge, drawn, began_s, run.step_count - first_step)
        return merge

    def can_resume_after(self, merge: MergeResult) -> bool:
        """Return whether a run can resume after this merge."""
        return merge.committed

    def load_merged(self) -> None:
        """Replace this group's weights by the merged weights."""
        load_merged_weights(self.run, self.joined, max(0, self.common.round - 1))

    def _train_owner(self, owner: int) -> tuple[IslandChange, dict[str, torch.Tensor]]:
        """Take the inner steps of a data owner; return its change, and its new control."""
        common, run, method = self.common, self.run, self.joined.method
        data, steps = self.owners[owner], self.schedule.cut_steps(owner, common.positions[owner])
        self.states.install(owner)
        method.start_owner(self.states.control(owner))
        run.first_key = owner * -(-run.plan.batch // run.plan.micro_batch)
        tokens, used, since_s = 0, 0, time.perf_counter()
        done = common.round * self.round_steps
        if data.loader is None:
            raise ConfigError(f"data.source: owner {data.name} was drawn and has no sample")
        # A resume repeats the round, so a death loses no row that counts.
        with write_rows_together(run.recorder):
            for number, batch in enumerate(data.loader.over(steps)):
                run.lr_step = done + number * self.round_steps // len(steps)
                tokens += round(self.run_step(batch).targets)
                used += batch.next_position - batch.position
        seconds = time.perf_counter() - since_s
        self.tokens, self.used = self.tokens + tokens, self.used + used
        self.compute_s += seconds
        self.steps_per_s = len(steps) / seconds
        if method.saves_branches:
            self._save_branch(owner, len(steps))
        weights, plain = collect_merge_tensors(run)
        local = {name: tensor for name, (tensor, _) in weights.items()}
        names = [name for name in self.joined.fragments[0] if name in local]
        message = method.message(common.outer, names, local)
        if method.before_send is not None:
            message = method.before_send(message)
        self.states.store(owner)
        proposal = MergeProposal(
            tokens, used, self.steps_per_s, run.stopping, self.schedule.held[owner]
        )
        averaged = {name: tensor.to("cpu", copy=True) for name, (tensor, _) in plain.items()}
        return IslandChange(owner, message, proposal, averaged), method.end_owner()

    def _save_branch(self, owner: int, steps: int) -> None:
        """Save the weights of an owner as an expert, before the merge changes them."""
        run, name = self.run, self.owners[owner].name
        if run.recorder.folder is None:
            return
        plain = re.fullmatch(r"[\w.-]+", name)
        tag = f"{BRANCH}{name if plain else owner}"
        digest = hash_weights(run.program)
        saved = run.save(tag=tag)
        if saved is not None and run.world.is_first:
            line = f"owner {name}: {steps} steps alone; its branch is {saved}, digest {digest[:12]}"
            run.recorder.events.emit("notice", text=line, weights=digest)

    def _merge_changes(
        self,
        changes: Sequence[IslandChange],
        senders: Sequence[Sequence[int]],
        before: Mapping[str, torch.Tensor],
    ) -> MergeResult:
        """Exchange the changes, and load the merged weights."""
        joined, common, run = self.joined, self.common, self.run
        began_s = time.perf_counter()
        names = [name for name in joined.fragments[0] if name in common.outer.weights]
        like = joined.method.message_like(common.outer, names)
        wanted = run.stopping or any(joined.inner.gather_json(run.stop_wanted))
        say = MergeProposal(self.tokens, self.used, self.steps_per_s, wanted)
        joined.merger.round_s = self.compute_s
        joined.merger.send_changes(common.round, 0, changes, say, (like, before), senders)
        self._finish_save()
        with phase("merge with the other islands"):
            merge = joined.merger.result()
        self._load_start({**before, **merge.plain})
        if any(merge.refused(owner) for owner in senders[self.policy.index]):
            self._reset_broken()
        self.exposed_s += time.perf_counter() - began_s
        run.recorder.restart_clock()
        return merge

    @torch.no_grad()
    def _load_start(self, plain: Mapping[str, torch.Tensor]) -> None:
        """Load the merged weights, and running statistics, from which every owner starts."""
        _, parts = collect_merge_tensors(self.run)
        for name, tensor in plain.items():
            parts[name][0].copy_(tensor)
        load_merged_weights(self.run, self.joined, self.common.round, checks_soon=False)

    def _close_owners_round(
        self, merge: MergeResult, drawn: Sequence[int], began_s: float, steps: int
    ) -> None:
        """Write events and a checkpoint; raise if refusals are too many."""
        common, policy, run = self.common, self.policy, self.run
        round_number = common.round
        if merge.committed:
            common.round, common.digest = common.round + 1, merge.digest
        common.failures = 0 if merge.committed else common.failures + 1
        before = common.refusals.at_limit()
        refused = collect_refusals([merge])
        stopped = set(common.refusals.count(drawn, refused)) - set(before)
        if merge.committed and self.joined.method.resets_inner:
            run.optimizer.state.clear()
        self._emit_round(
            [merge],
            round_number,
            time.perf_counter() - began_s,
            steps,
            sent_bytes=sum(self.joined.inner.gather_json(merge.sent_bytes)),
            exchange_s=merge.seconds,
            owners=policy.count,
            by_owner=self.shares.last_round if merge.committed else {},
        )
        if merge.committed and (common.round == self.last or not self.has_work):
            run.recorder.notice(self.shares.describe())
        if merge.committed:
            common.keep()
        unsaved = not merge.ballots[policy.index].saved
        if run.recorder.folder is not None and (unsaved or merge.committed):
            # A group whose owners were not drawn made no step, and each save has a step of its own.
            run.step_count = max(run.step_count, self._saved_step + 1)
            self._saved_step = run.step_count
            self._start_save()
        for owner in sorted(stopped):
            run.recorder.notice(
                f"refused {policy.refusals} rounds in a row, last because {refused[owner]}: it "
                f"trains no more in this run, and gets the merged weights"
            )
        self._stop_after_failures(merge)
