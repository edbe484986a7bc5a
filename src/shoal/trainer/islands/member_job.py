"""Main job of an island whose fellow islands come and go: from the meeting to the last save.

    own disk ─→ meet (all start together), or a seat in a running session ─→ turn after turn
    the end      the last round is merged, or a stop was asked: the others get a goodbye

The first island of the last turn validates for all; the others wait longer for it then.

An island of several processes listens at one port for each. Its first rank takes part for all.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from shoal.base.errors import UNSAVED_CODE, ConfigError
from shoal.base.layouts.changing_members import (
    check_rank_addresses,
    list_addresses,
    rank_address,
)
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.config.sections import Config
from shoal.data.loading.loader import Loader
from shoal.data.sources import Source
from shoal.fabric.duplicate_group import destroy_duplicate, duplicate_world
from shoal.fabric.islands.island_rendezvous import parse_address
from shoal.fabric.islands.member_links import MemberLinks
from shoal.fabric.rendezvous.rendezvous_store import is_loopback
from shoal.islands.changing.change_merge import ChangeMerge
from shoal.islands.changing.island_ranks import IslandRanks
from shoal.islands.changing.member_driver import MemberDriver
from shoal.islands.changing.member_waits import ResumeCommand
from shoal.islands.changing.rank_merges import RankMerges
from shoal.islands.membership.committed_turn import Dealing, Seat
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.session_meeting import ArrivalReport
from shoal.islands.sample_ranges import SampleStream, inner_steps
from shoal.trainer.islands.canonical_parts import require_canonical
from shoal.trainer.islands.island_data import fingerprint_dataset
from shoal.trainer.islands.island_join import IslandConnection
from shoal.trainer.islands.member_rounds import MemberRounds, check_one_machine
from shoal.trainer.islands.member_settings import collect_settings, describe_settings
from shoal.trainer.islands.member_state import MemberCheckpoints
from shoal.trainer.jobs.run_end import emit_run_end
from shoal.trainer.jobs.validation import make_validator
from shoal.trainer.run import Run
from shoal.trainer.state.replaced_folder import save_if_deleted
from shoal.wire.member_keys import MAKE, MemberKeys, open_member_keys
from shoal.wire.run_token import TOKEN, read_token

RUN, STOPPED = "run.toml", 143
END_S = 10.0
"""Longest time for which an island that is ready waits for the others to learn the last turn."""

RANKS_TIMEOUT = timedelta(days=7)
"""Longest time for which the ranks of an island wait for a turn; a dead rank is noticed before."""


def train_members(
    run: Run, joined: IslandConnection, source: Source, config: Config, total_steps: int
) -> int:
    """Train to the end, or to a stop, with islands that come and go; return the exit code.

    Raises:
        ClusterError: too few islands are left for longer than islands.wait_s.
        ConfigError: the islands' settings or data differ.
    """
    validate = make_validator(run, source, config)
    loader = run.loader(source.train, workers=config.data.workers, collate=source.collate)
    settings = {
        "train.steps": total_steps,
        "train.validate_every": config.train.validate_every,
        **_fingerprints(source, config),
    }
    rounds = open_member_rounds(run, joined, loader, total_steps, settings)
    began_s = time.perf_counter()
    try:
        done = train_turns(rounds, validate, config.train.validate_every)
    except BaseException:
        rounds.ranks.close()
        raise
    if not done:
        return _stop(run, joined, rounds)
    saved = run.save()
    rounds.ranks.finish(END_S)
    if rounds.has_trained:
        rounds.plain.check_moved()
    values = validate() if rounds.is_first() else None
    saved = save_if_deleted(run, saved)
    wall_s, steps = time.perf_counter() - began_s, run.step_count - rounds.plain.first_step
    if line := describe_fewer_steps(rounds.last, total_steps, run.step_count):
        run.recorder.notice(line)
    how = "completed" if saved else "completed; the last checkpoint could not be written"
    emit_run_end(run, source, values, steps=steps, wall_s=wall_s, how=how)
    destroy_duplicate(rounds.ranks.world)
    joined.close()
    run.close()
    return 0 if saved else UNSAVED_CODE


def describe_fewer_steps(rounds: int, total_steps: int, step: int) -> str:
    """Return why an island completes the run before step `total_steps`; "" if it does not.

    >>> describe_fewer_steps(6, 30, 30)
    ''
    >>> describe_fewer_steps(6, 30, 17).partition(";")[0]
    'all 6 rounds of the run are done (train.steps = 30)'
    """
    if step >= total_steps:
        return ""
    return (
        f"all {rounds} rounds of the run are done (train.steps = {total_steps}); this island is at "
        f"step {step}: a slower island takes fewer steps of its own in a round"
    )


def describe_unmerged(steps: int, round_number: int) -> str:
    """Return why an island that stops has no checkpoint of its last steps; "" if it made none.

    >>> describe_unmerged(0, 4)
    ''
    >>> describe_unmerged(2, 4).partition(";")[0]
    'steps since round 4 that are in no checkpoint: 2, as this island did not merge their round'
    """
    if not steps:
        return ""
    return (
        f"steps since round {round_number} that are in no checkpoint: {steps}, as this island did "
        f"not merge their round; --resume takes the newest round of the other islands"
    )


def train_turns(
    rounds: MemberRounds, validate: Callable[[], Any] = lambda: None, validate_every: int = 0
) -> bool:
    """Train turn after turn; return False if the island stopped on request before the end."""
    period, policy = rounds.policy.period, rounds.policy
    while True:
        before = rounds.common.round
        turn = rounds.next_turn()
        if turn is None:
            return False
        fact = turn.fact
        if fact.round >= rounds.last:
            return True
        if rounds.ranks.leaves:
            return False
        if not turn.train:
            continue
        if (
            validate_every
            and fact.round * period // validate_every > before * period // validate_every
        ):
            if rounds.is_first():
                validate()
            else:
                rounds.joined.merger.patience.extend_next_deadline()
        if len(fact.trainers()) >= policy.least:
            rounds.train(fact)
        rounds.finish_save()


def open_member_rounds(
    run: Run,
    joined: IslandConnection,
    loader: Any,
    total_steps: int,
    settings: dict[str, Any],
) -> MemberRounds:
    """Restore this island's newest checkpoint, and begin to look for the other islands.

    Args:
        settings: further values that must be equal on all islands.

    Raises:
        ConfigError: the run cannot have islands that come and go.
    """
    check_one_machine(run)
    if not isinstance(loader, Loader):
        raise ConfigError(
            "data.source: islands deal samples by their number, and an iterable has none; try: a "
            "dataset with __getitem__ and __len__"
        )
    policy, world = joined.policy, run.world
    addresses = list_addresses(policy.at)
    check_rank_addresses(addresses, policy.index, world.size)
    threads = duplicate_world(world, RANKS_TIMEOUT)
    checkpoints = MemberCheckpoints(run, joined, threads, policy.wait_s)
    start = joined.compute_digest()
    held = checkpoints.restore_newest(run.recorder.events.emit)
    merges = RankMerges(_make_merge(joined))
    seat = Seat(policy.index, checkpoints.count_start(held, policy.index))
    driver = None
    if world.is_first:
        alike = collect_settings(run, policy, require_canonical(joined.canonical).dtype) | settings
        deal = _make_dealing(policy, run.plan.batch, loader.samples)
        driver = MemberDriver(
            IslandMember(
                seat, held, tuple(addresses), deal, least=policy.least, is_saved=held is not None
            ),
            merges,
            joined.merger.patience,
            arrival=ArrivalReport(seat, held, start),
            count=policy.count,
            wait_s=policy.wait_s,
            resume=_name_resume(checkpoints.root.parent),
            settings=alike,
            describe=lambda other, name: describe_settings(alike, other, policy.index, name),
            provide_state=checkpoints.provide,
            tell=run.recorder.notice,
        )
    ranks = IslandRanks(threads, merges, driver)
    keys = _open_keys(run, policy)
    if keys is not None and held is not None:
        keys.known_to |= {*held.names()}
    links = _open_links(run, seat, addresses, ranks, keys)
    checkpoints.links = links
    if driver is not None:
        checkpoints.has_newer = driver.has_newer
    last = -(-total_steps // policy.period)
    rounds = MemberRounds(run, joined, loader, ranks, checkpoints, last)
    ranks.start(links)
    return rounds


def _name_resume(folder: Path) -> ResumeCommand:
    """Return the command that goes on with the run of an island's folder.

    The folders of islands that one command started lie in that of their run.
    """
    is_whole = bool(re.fullmatch(r"island-\d+", folder.name) and (folder.parent / RUN).exists())
    whole = folder.parent if is_whole else folder
    return ResumeCommand(f"shoal train --resume {shlex.quote(str(whole))}", is_whole)


def _make_merge(joined: IslandConnection) -> ChangeMerge:
    """Return the merge of whole changes of this rank's units of the model."""
    common = joined.common
    return ChangeMerge(
        joined.method,
        common.outer,
        require_canonical(joined.canonical).units,
        joined.inner,
        joined.merger.codec,
        common.admission[1],
    )


def _make_dealing(policy: IslandsPolicy, batch: int, samples: int) -> Dealing:
    """Return how many samples of the stream each member gets, by the members' speeds."""

    def deal(stream: SampleStream, speeds: Sequence[float | None]) -> list[int]:
        known = [None] * len(speeds) if policy.pace == "equal" else list(speeds)
        return stream.count_samples(inner_steps(policy.period, known), batch, samples)

    return deal


def _open_keys(run: Run, policy: IslandsPolicy) -> MemberKeys | None:
    """Open this island's keys; without keys, say what the connections lack.

    Raises:
        ConfigError: a file of islands.key or islands.keys cannot be used.
    """
    tell = run.recorder.notice
    keys = open_member_keys(policy.key, policy.keys, policy.index, tell)
    host, _ = parse_address(list_addresses(policy.at)[policy.index])
    if keys is not None:
        lacks = "" if keys.allows(keys.own.certificate) else ", and this one is none of them"
        tell(
            f"islands.key: connections are encrypted; this island's key is {keys.own.fingerprint}, "
            f"and {keys.count} may join ({keys.where}){lacks}"
        )
    elif not is_loopback(host):
        open_to = "" if read_token(os.environ) else ", and whoever reaches a port can join the run"
        near = f"{MAKE}, then islands.key and islands.keys"
        near += f"; or a private network and the same {TOKEN} for all islands"
        tell(f"islands.at: connections between islands are not encrypted{open_to}; try: {near}")
    return keys


def _open_links(
    run: Run,
    seat: Seat,
    addresses: dict[int, str],
    ranks: IslandRanks,
    keys: MemberKeys | None,
) -> MemberLinks:
    """Listen at this rank's port; the first rank connects to the other islands too."""
    rank, token = run.world.rank, read_token(os.environ)
    own, driver = addresses[seat.name], ranks.driver
    if driver is None:
        return MemberLinks(
            *(seat.name, seat.boot, {seat.name: rank_address(own, rank)}, token),
            *(_ignore_message, ranks.provide, run.recorder.notice, keys),
        )
    return MemberLinks(
        *(seat.name, seat.boot, addresses, token),
        *(driver.on_message, driver.provide, run.recorder.notice, keys),
    )


def _ignore_message(name: int, address: str, message: Any) -> None:
    """Ignore a message of another island: the first rank gets them."""


def _fingerprints(source: Source, config: Config) -> dict[str, Any]:
    """Return the fingerprint of the training data, as JSON values."""
    return {"data.source": fingerprint_dataset(source.train, config.data.workers)}


def _stop(run: Run, joined: IslandConnection, rounds: MemberRounds) -> int:
    """Say goodbye, wait for the last save, and close; return the exit code."""
    outcome = run.checkpoint_saver.wait_pending()
    saved = outcome is None or outcome.failure is None
    rounds.ranks.finish(0.0)
    trouble = "" if saved else "; the last save failed"
    if line := describe_unmerged(rounds.work.steps, joined.common.round):
        run.recorder.notice(line)
    how = f"stopped on request after round {joined.common.round}{trouble}"
    if run.world.is_first:
        run.recorder.events.emit("run_finished", step=run.step_count, how=how)
    destroy_duplicate(rounds.ranks.world)
    joined.close()
    run.close()
    return STOPPED if saved else UNSAVED_CODE
