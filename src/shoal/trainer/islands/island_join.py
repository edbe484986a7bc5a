"""Connection of an island's run with the other islands: agreement and the common restart point.

    meet at islands.at ── the least micro-batch ── the same configuration? ── which rounds does each
    hold? ── the newest that all hold with equal hashes is restored, else all begin with the same
    weights

The common state of islands (`island_state.py`) is saved in the checkpoints of every island, with
its own model and optimizer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.layouts.island_options import IslandsPolicy, check_keep
from shoal.base.runlog.events import Emit
from shoal.checkpoint.format.checkpoint_faults import DamagedFileError, DamagedStepError
from shoal.checkpoint.format.folders import make_temporary_path, quarantine
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest, step_folder
from shoal.fabric import World
from shoal.fabric.compressed.codecs import ErrorFeedback, find_codec
from shoal.fabric.duplicate_group import destroy_duplicate, duplicate_world
from shoal.fabric.islands.inter_island_group import InterIslandGroup, connect_islands
from shoal.fabric.islands.island_rendezvous import join_island_store
from shoal.forecast.time.island_costs import IslandsFacts, islands_cost
from shoal.islands.admission import AdmissionTest, RefusalCounter
from shoal.islands.changing.change_merge import join_digests
from shoal.islands.common_round import (
    ResumePoint,
    decode_rounds,
    encode_rounds,
    find_resume_point,
    is_before_first_round,
    refuse_damaged,
)
from shoal.islands.error_feedback_files import IslandErrorFeedback
from shoal.islands.method import MergeMethod
from shoal.islands.methods import find_method
from shoal.islands.peer_deadline import PeerDeadline
from shoal.islands.round_exchange import FragmentMerger
from shoal.islands.sample_ranges import SampleStream
from shoal.islands.send_slices import MessageShards
from shoal.parallel.build.full_state import local_state
from shoal.parallel.program import Part
from shoal.planning.micro_batch_sizes import with_micro_batch
from shoal.trainer.autotune.micro_batch_size import record_micro_batch
from shoal.trainer.autotune.share_fits import set_micro_batch
from shoal.trainer.islands.canonical_parts import CanonicalParts
from shoal.trainer.islands.island_state import CommonState
from shoal.trainer.islands.owner_states import OwnerStates
from shoal.trainer.run import Run
from shoal.trainer.step.optimizer_step import reducer_of
from shoal.wire.phases import phase
from shoal.wire.run_token import read_token

LOOPBACK = "127.0.0.1"
PROBE_BYTES = 1 << 18
MEET_S = 300.0
"""Seconds that the first island waits for the start of the last one."""


@dataclass
class IslandConnection:
    """Connection of an island to the others, with its part of the common state.

    Attributes:
        fragments: names of the parameters of each fragment that is sent by itself.
        bytes_per_s, latency_s: of the links, as measured by a probe.
        as_in_calls: until `close` the weights have torch's own classes: no user code runs between
            the calls of an island's run.
        canonical: division of the outer weights if islands come and go; None: as the layout is.
    """

    policy: IslandsPolicy
    method: MergeMethod
    fragments: tuple[tuple[str, ...], ...]
    common: CommonState
    merger: FragmentMerger
    plane: InterIslandGroup
    inner: World
    bytes_per_s: float
    latency_s: float
    as_in_calls: ExitStack = field(default_factory=ExitStack)
    canonical: CanonicalParts | None = None

    @property
    def is_alone(self) -> bool:
        """Return whether other islands of the run take no part: a replay of this one's steps."""
        return self.plane.count < self.policy.groups

    def compute_digest(self) -> str:
        """Return the digest of the outer weights and state, over all ranks of the island."""
        return join_digests(self.inner.gather_json(self.common.outer.list_digests()))

    def close(self) -> None:
        """Disconnect from the other islands; every rank of the island calls it."""
        self.plane.close()
        destroy_duplicate(self.inner)
        if self.canonical is not None:
            destroy_duplicate(self.canonical.world)
        self.as_in_calls.close()


@phase("meet the other islands")
def join_islands(
    run: Run,
    policy: IslandsPolicy,
    *,
    is_open_size: bool = False,
    tokenizer: Any = None,
    alone: bool = False,
) -> IslandConnection:
    """Connect to the other islands and agree with them; every rank of every island calls it.

    Args:
        run: the island's; it opens its loaders after this call, which may change its micro-batch.
        policy: of the islands.
        is_open_size: the user left the micro-batch of this island to Shoal.
        tokenizer: of this island's data, if it is text: a `tokenizers.Tokenizer`.
        alone: without the others: a replay of this island's steps up to the next merge.

    Raises:
        ConfigError: the islands' configurations differ, or an island keeps too few checkpoints.
        ClusterError: an island does not connect.
    """
    check_keep(run.plan.keep)
    as_in_calls = ExitStack()
    as_in_calls.enter_context(run.meeting.hide_views())
    run.recorder.saves_apart = "hooks: islands save where they merge, so no hook can ask for it"
    count, inner = policy.groups, duplicate_world(run.world)
    weights, plain = collect_merge_tensors(run)
    wide = any(t.dtype == torch.float64 for t, _ in weights.values())
    dtype = torch.float64 if inner.all_true(wide) else torch.float32
    method = find_method(policy, seed=run.plan.seed)
    by_members = policy.changes_members  # they connect in `member_job.py`
    canonical, local = None, {name: tensor for name, (tensor, _) in weights.items()}
    if by_members:
        canonical = CanonicalParts(weights, plain, duplicate_world(run.world), dtype)
    outer = method.open(local) if canonical is None else canonical.open_outer(method, local)
    shards = method.message_shards({name: shard for name, (_, shard) in weights.items()})
    shards |= {name: shard for name, (_, shard) in plain.items()}
    fragments = method.fragments(_parameter_bytes(weights, inner))
    feedback = ErrorFeedback(method.keeps) if policy.codec in FEEDS_BACK else None
    common = CommonState(
        outer,
        tuple(AdmissionTest(policy.bound, policy.cosine) for _ in range(2 * len(fragments))),
        RefusalCounter(policy.refusals),
        canonical.shards if canonical else {name: shard for name, (_, shard) in weights.items()},
        count,
        SampleStream(),
        IslandErrorFeedback(feedback, inner.rank, _codec_settings(run, policy)),
        index=policy.index,
        merged_parts=None if canonical is None else partial(canonical.list_merged, outer),
    )
    if policy.owned:
        own = policy.owners_of(policy.index)
        common.owners = OwnerStates(run, own, common.shards, policy.groups)
    plane = _connect(policy, inner, run.recorder.notice, alone=alone or by_members)
    merger = FragmentMerger(
        plane,
        inner,
        MessageShards(shards, inner, dtype),
        method,
        outer,
        find_codec(policy.codec, dtype),
        feedback,
        common.admission,
        PeerDeadline(),
    )
    run.extra_state = common
    joined = IslandConnection(
        *(policy, method, fragments, common, merger, plane, inner, *measure_island_links(plane)),
        *(as_in_calls, canonical),
    )
    if policy.owned:
        check_same_tokenizer(plane, inner, tokenizer)
    agree_micro_batch(run, plane, is_open=is_open_size)
    check_agreement(plane, shared_settings(run, policy))
    if run.world.is_first and not by_members:
        owners = {"owners": policy.count} if policy.owned else {}
        run.recorder.events.emit(
            "islands_met", count=count, at=policy.at, encrypted=False, **owners
        )
    return joined


OWN = ("at", "index")
"""Keys that may differ between islands: an address may have two names."""

FEEDS_BACK = ("e3m0", "sign", "top2bit")
"""Codecs whose error is so large that it must be fed back (e3m0: islands.md has the loss)."""


def collect_merge_tensors(run: Run) -> tuple[dict[str, Part], dict[str, Part]]:
    """Return this rank's (weights that merges update, statistics that are only averaged)."""
    parts = local_state(run.program)
    names = set(run.program.names)
    weights = {name: part for name, part in parts.items() if name in names and part[1].slices}
    frozen = set(run.program.frozen)
    plain = {
        name: (tensor, shard)
        for name, (tensor, shard) in parts.items()
        if name not in names and name not in frozen and tensor.is_floating_point()
    }
    return weights, plain


def _codec_settings(run: Run, policy: IslandsPolicy) -> dict[str, Any]:
    """Return the settings that decide which slices of the weights an island's codec encodes."""
    return {
        "islands.index": policy.index,
        "islands.count": policy.groups,
        "islands.regions": policy.regions,
        "islands.codec": policy.codec,
        "islands.fragments": policy.fragments,
        "layout": run.plan.layout.text(),
        "launch.processes": run.world.size,
    }


def _parameter_bytes(weights: Mapping[str, Part], inner: World) -> dict[str, int]:
    """Return the bytes of every parameter of the whole model, the same on every rank."""
    mine = {
        name: tensor.element_size() * torch.Size(shard.global_shape).numel()
        for name, (tensor, shard) in weights.items()
    }
    return {name: size for told in inner.gather_json(mine) for name, size in told.items()}


def _connect(
    policy: IslandsPolicy, inner: World, tell: Callable[[str], None], *, alone: bool
) -> InterIslandGroup:
    lane, index, groups = str(inner.rank), policy.index, policy.groups
    if alone:
        index, groups = 0, 1
    at = policy.at or f"{LOOPBACK}:0"
    store = join_island_store(
        at,
        index,
        groups,
        deadline_s=MEET_S,
        lane=lane,
        token=read_token(os.environ),
        tell=tell,
    )
    return connect_islands(
        store,
        lane,
        index,
        groups,
        connections=policy.connections,
        host=at.rpartition(":")[0],
        deadline_s=MEET_S,
        tell=tell,
    )


def measure_island_links(plane: InterIslandGroup) -> tuple[float, float]:
    """Measure roughly (bytes/s that one process sends, seconds per message) of the slowest link."""
    if plane.count == 1:
        return math.inf, 0.0
    times_s = []
    for size in (8, 8, PROBE_BYTES):
        began_s = time.monotonic()
        plane.gather(bytes(size), deadline_s=MEET_S)
        times_s.append(time.monotonic() - began_s)
    latency_s = min(times_s[:2])
    sent = (plane.count - 1) * PROBE_BYTES
    return sent / max(times_s[2] - latency_s, 1e-6), latency_s


def forecast_rounds(
    run: Run, joined: IslandConnection, step_s: float, sequence: int, optimizer_bytes: int = 0
) -> dict[str, Any]:
    """Return the planner's cost of a round, for plan.json.

    Args:
        step_s: forecast of an inner step.
        sequence: tokens of a sample.
        optimizer_bytes: state of the inner optimizer per fp32 parameter.
    """
    wide, policy = joined.merger.shares.dtype == torch.float64, joined.policy
    if policy.epochs:  # as many steps as this owner takes in them
        loader = run.feed.loaders[0]
        steps = policy.epochs * -(-getattr(loader, "samples", 1) // run.plan.batch)
        policy = replace(policy, epochs=0, period=max(1, steps))
    facts = IslandsFacts(
        run.plan.parameters,
        step_s,
        joined.bytes_per_s,
        joined.latency_s,
        tokens=run.plan.batch * sequence,
        ranks=run.world.size,
        element_bytes=8 if wide else 4,
        inner_numbers=optimizer_bytes / 4,
    )
    return islands_cost(policy, facts).record()


def check_same_tokenizer(plane: InterIslandGroup, inner: World, tokenizer: Any) -> None:
    """Compare the tokenizers of all owners, by hash; every rank of every island calls it.

    Raises:
        ConfigError: names the first owner whose tokenizer is not that of owner 0.
    """
    text = tokenizer.to_str() if inner.is_first and tokenizer is not None else ""
    own = inner.broadcast_json(hashlib.sha256(text.encode()).hexdigest() if text else "")
    told = [one.decode() for one in plane.gather(own.encode(), deadline_s=MEET_S)]
    for island, other in enumerate(told):
        if other != told[0]:
            names = [digest[:8] or "none" for digest in (other, told[0])]
            raise ConfigError(
                f"data.tokenizer: {names[0]} on island {island}, {names[1]} on island 0: the "
                f"token ids of all owners must mean the same; try: copy hub/tokenizer.json of "
                f"island 0's run folder to all owners, and data.tokenizer=PATH of the copy"
            )


def shared_settings(run: Run, policy: IslandsPolicy) -> dict[str, Any]:
    """Return the values that must be equal on all islands, by their keys in run.toml."""
    plan = run.plan
    return {
        **{f"islands.{key}": value for key, value in asdict(policy).items() if key not in OWN},
        "layout": plan.layout.text(),
        "train.batch": plan.batch,
        "train.micro_batch": plan.micro_batch,
        "train.seed": run.plan.seed,
        "precision.compute": plan.compute,
        **({"precision.residual": "bf16"} if plan.residual == "bf16" else {}),
        "parameters of the model": plan.parameters,
    }


def agree_micro_batch(run: Run, plane: InterIslandGroup, *, is_open: bool) -> None:
    """Take the least micro-batch of all islands, if the user left it to Shoal on each of them.

    Memory differs between machines, and `train.on_oom=halve` changes one island alone. Islands of
    other batches or layouts are refused afterwards (`check_agreement`). All ranks of all islands
    call it.

    Args:
        run: this island's, without loaders so far. Its folder records another size.
        plane: connects the islands.
        is_open: this island leaves the micro-batch to Shoal.
    """
    message = json.dumps([run.plan.micro_batch, is_open]).encode()
    told = [json.loads(one) for one in plane.gather(message, deadline_s=MEET_S)]
    was, least = run.plan.micro_batch, min(size for size, _ in told)
    if least == was or not all(open_size for _, open_size in told):
        return
    set_micro_batch(run, with_micro_batch(run.plan, least))
    folder = run.recorder.folder
    if folder is None or not run.world.writes_files:
        return
    record_micro_batch(folder, run.plan)
    line = f"train.micro_batch: {was} → {least}, the least of all islands"
    if list_checkpoints(folder / "checkpoints"):
        line += (
            "; masks of dropout and statistics of BatchNorm, which belong to a micro-batch, are "
            "others"
        )
    run.recorder.notice(line)


def check_agreement(plane: InterIslandGroup, own: Mapping[str, Any]) -> None:
    """Compare these values with those of the other islands; all ranks of all islands call it.

    Raises:
        ConfigError: names the first key in which an island differs from island 0.
    """
    message = json.dumps(own).encode()
    told = [json.loads(one) for one in plane.gather(message, deadline_s=MEET_S)]
    for island, other in enumerate(told):
        for key, value in told[0].items():
            if other.get(key) != value:
                hint = f"{key}={value}" if "." in key else "the same configuration"
                raise ConfigError(
                    f"{key} = {other.get(key)} on island {island}, {value} on island 0: islands of "
                    f"a run are alike; try: {hint} on all of them"
                )


def resume_islands(run: Run, joined: IslandConnection, *, alone: bool) -> None:
    """Restore the round from which the islands go on.

    Islands that come and go find it later, when they meet (`member_job.py`).

    Args:
        alone: without the others: a replay of this island's steps.
    """
    if alone or not joined.policy.changes_members:
        resume_common_round(run, joined)


@phase("meet the other islands")
def resume_common_round(run: Run, joined: IslandConnection) -> None:
    """Restore the newest round that all islands hold; else check for equal first weights.

    Every rank of every island calls it, once the run's loader is open.

    Raises:
        ConfigError: the islands' weights differ.
        CheckpointError: an island holds no round of the run.
    """
    folder = run.recorder.folder
    common, plane, policy = joined.common, joined.plane, joined.policy
    here: dict[str, Any] = {}
    damaged = ""
    if folder is not None and run.world.is_first:
        here = list_held_rounds(folder, policy.period, run.recorder.events.emit)
        damaged = (
            str(folder / "checkpoints")
            if not here and list_checkpoints(folder / "checkpoints")
            else ""
        )
    here, damaged = joined.inner.broadcast_json([here, damaged])
    while True:
        message = encode_rounds({int(round_): digest for round_, (digest, _) in here.items()})
        told = plane.gather(message, deadline_s=MEET_S)
        held = [decode_rounds(one, island) for island, one in enumerate(told)]
        point = None if is_before_first_round(held) else find_resume_point(held)
        if point is not None:
            check_donors(point, owned=policy.owned)
        if point is None or restore_round(run, plane, here, point.round):
            break
    if point is None:
        _start_first_round(run, plane, damaged)
    else:
        digest, step = here[str(point.round)]
        if digest == _single_run_digest(step):
            _convert_single_run(run, joined, point.round)
        elif not common.own:
            load_merged_weights(run, joined, point.round - 1)
        if common.dropped:
            run.recorder.notice(f"island {policy.index}: {common.dropped}")
    mine = [joined.compute_digest(), any(common.since)]
    heard = [json.loads(one) for one in plane.gather(json.dumps(mine).encode(), deadline_s=MEET_S)]
    common.lost([k for k, (_, brings) in enumerate(heard) if not (brings or joined.is_alone)])
    for island, (other, _) in enumerate(heard):
        if other != heard[0][0]:
            raise ConfigError(
                f"island {island}: its weights before round {common.round + 1} are not those of "
                f"island 0; try: the same model, seed and versions on all islands"
            )
    if point is not None and folder and run.world.is_first:
        _delete_later_checkpoints(folder, run.step_count)


def _start_first_round(run: Run, plane: InterIslandGroup, damaged: str) -> None:
    """Begin with the first round; refuse it over damaged checkpoints of any island."""
    told = plane.gather(json.dumps(damaged).encode(), deadline_s=MEET_S)
    refuse_damaged([str(json.loads(one)) for one in told])
    run.recorder.cut(0)
    if run.recorder.folder is not None and run.world.is_first:
        _delete_later_checkpoints(run.recorder.folder, -1)


def restore_round(
    run: Run, plane: InterIslandGroup, here: dict[str, Any], round_number: int
) -> bool:
    """Restore a round that all islands hold; return False on all if a copy of it is damaged.

    Args:
        here: rounds that this island holds (`list_held_rounds`). A damaged one is moved to
        `*.damaged`
            and removed from it, so that all can agree on an earlier one.

    Raises:
        DamagedStepError: the island holds no other round; a person must decide to start again.
    """
    _, step = here[str(round_number)]
    try:
        run.restore(step=step)
        whole = True
    except DamagedStepError:
        if len(here) == 1:
            raise
        del here[str(round_number)]
        whole = False
        if run.recorder.folder is not None and run.world.is_first:
            kept = quarantine(step_folder(run.recorder.folder / "checkpoints", step))
            text = f"round {round_number} is damaged here, so all islands go on from an earlier one"
            run.recorder.notice(f"{text}; kept as {kept.name}")
    heard = plane.gather(json.dumps(whole).encode(), deadline_s=MEET_S)
    return all(json.loads(one) for one in heard)


def load_merged_weights(
    run: Run, joined: IslandConnection, round_number: int, *, checks_soon: bool = True
) -> None:
    """Replace the island's weights by the merged weights of a round, and drop its changes.

    Args:
        checks_soon: as of `discard_checksums`.
    """
    weights, _ = collect_merge_tensors(run)
    local = {name: tensor for name, (tensor, _) in weights.items()}
    outer = joined.common.outer.at(round_number)
    if joined.canonical is not None:
        joined.canonical.load_merged(outer, local, pulls=joined.method.pulls)
    else:
        joined.method.apply_merge(outer, list(local), local, refused=True)
    reducer_of(run.program).publish()
    run.guards.writes.allow_write(soon=checks_soon)
    joined.common.since = [0] * len(joined.fragments)


def _convert_single_run(run: Run, joined: IslandConnection, round_number: int) -> None:
    """Continue a run without islands as islands: its weights become W, the optimizer stays."""
    common, state = joined.common, run.feed.state
    weights, _ = collect_merge_tensors(run)
    begun = joined.method.open({name: tensor for name, (tensor, _) in weights.items()})
    common.outer.load(begun.tensors())
    common.round = round_number
    common.stream = SampleStream(int(state[0].get("position", 0)) if state else 0)
    run.recorder.notice(
        f"goes on from step {run.step_count} of a run without islands; its steps count as "
        f"{round_number} rounds"
    )


def check_donors(point: ResumePoint, *, owned: bool = False) -> None:
    """Raise CheckpointError, the same on all islands, if an island holds no round; name a donor.

    Args:
        owned: islands are owners, and another owner's optimizer state is of other data.
    """
    for island, donor in enumerate(point.donors):
        if donor != island:
            copy = (
                f"copy checkpoints/ of island {donor}'s run folder into that of island {island}, "
                "then resume"
            )
            lost = "bring them back from a copy, or start a new run" if owned else copy
            raise CheckpointError(
                f"island {island}: holds no round of this run, island {donor} holds round "
                f"{point.round}; try: shoal train --resume on island {island}, with the run folder "
                f"that has its checkpoints; only if they are lost, {lost}"
            )


def _delete_later_checkpoints(folder: Path, step: int) -> None:
    """Delete checkpoints of later steps, since their rounds are not held by all islands.

    They would collide with the new checkpoints of the same steps, which need not be equal.
    """
    for found in list_checkpoints(folder / "checkpoints"):
        if found.step > step:
            doomed = make_temporary_path(found.path)
            found.path.rename(doomed)
            shutil.rmtree(doomed)


def list_held_rounds(
    folder: Path, period: int, emit: Emit | None = None
) -> dict[str, tuple[str, int]]:
    """Return round → (digest, step) of every checkpoint of an island's run folder.

    Args:
        period: inner steps of a round; checkpoints from before the run had islands are counted in
            it.
        emit: reports manifests that cannot be read.
    """
    held_rounds: dict[str, tuple[str, int]] = {}
    for found in list_checkpoints(folder / "checkpoints"):
        try:
            kept = read_manifest(found.path).record.get("islands")
        except DamagedFileError as problem:
            if emit is not None:
                emit("checkpoint_damaged", rank=0, folder=str(found.path), **problem.fields())
            continue
        if kept is None:
            kept = {"round": found.step // period, "digest": _single_run_digest(found.step)}
        held_rounds.setdefault(str(kept["round"]), (str(kept["digest"]), found.step))
    return held_rounds


def _single_run_digest(step: int) -> str:
    """Return the value in place of a digest for a checkpoint of a run without islands."""
    return f"step {step} of a run without islands"
