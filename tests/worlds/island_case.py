"""Checks among real islands: each member is one process of one of them."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cases
import shoal
from shoal.base.errors import ClusterError, TrainingError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.fabric import World
from shoal.fabric.device import HOST
from shoal.fabric.islands.inter_island_group import IslandLost
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.islands.fragments import partition_parameters, schedule_fragments
from shoal.islands.sample_ranges import SampleStream, cut_steps
from shoal.parallel.build.full_state import gather_weights, local_state
from shoal.trainer.islands.island_join import (
    IslandConnection,
    collect_merge_tensors,
    join_islands,
    resume_common_round,
)
from shoal.trainer.islands.island_loop import IslandRounds
from shoal.trainer.run import Run
from shoal.wire.phases import set_phase_listener

LR = 0.05
MICRO_BATCH = 2
RUN = {"model", "layout", "optimizer", "batch", "precision", "micro_batch", "seed"}
"""What `opened` is told; the rest is a policy of islands."""
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR),
    "momentum": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def opened(
    world: World,
    *,
    model: str = "llama",
    layout: Any = "single",
    optimizer: str = "sgd",
    batch: int = 8,
    folder: str | None = None,
    precision: str = "fp64",
    micro_batch: int = MICRO_BATCH,
    seed: int = 3,
) -> tuple[Run, Any]:
    """A run in float64 with a batch of `batch` samples, and its data; one thread, for equal bits."""
    torch.set_num_threads(1)
    data = cases.dataset(model)
    run = shoal.parallelize(
        cases.build(model),
        OPTIMIZERS[optimizer],
        cases.loss(model),
        layout,
        batch=batch,
        micro_batch=micro_batch,
        precision=precision,
        seed=seed,
        folder=folder,
        world=world,
        sample=lambda: torch.utils.data.default_collate([data[k] for k in range(2)]),
    )
    return run, data


def leave(run: Run, joined: IslandConnection | None = None) -> None:
    """As a process that ends, but the world stays for the next check."""
    set_phase_listener(None)
    if joined is not None:
        joined.close()
    run.checkpoint_saver.close()
    for undo in run.program.on_close:
        undo()
    if run.lease is not None:
        run.lease.release()


def train(
    world: World,
    index: int,
    count: int,
    at: str,
    *,
    rounds: int,
    folder: str = "",
    trouble: list[dict[str, Any]] | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """Some rounds; what came out, with the merged weights in place.

    trouble   what goes wrong, see `Trouble`: {"island": 1, "round": 2, "what": "nan"}
    asked     arguments of `opened`, and keys of `IslandsPolicy`
    """
    own = str(Path(folder) / f"island-{index}") if folder else None
    run, data = opened(world, folder=own, **{k: asked.pop(k) for k in RUN & set(asked)})
    policy = {"pace": "equal", **asked}  # speeds differ from run to run
    phases: set[str] = set()
    set_phase_listener(lambda doing: phases.update(one.name for one in doing))
    joined = join_islands(run, IslandsPolicy(count=count, at=at, index=index, **policy).resolved())
    resume_common_round(run, joined)
    began = joined.common.round
    loop = IslandRounds(run, joined, run.loader(data))
    Trouble(loop, [one for one in trouble or [] if one["island"] == index])
    try:
        merges = [loop.one() for _ in range(rounds - began)]
    except IslandLost as lost:
        run.checkpoint_saver.wait_pending()
        leave(run, joined)
        told = {"line": str(lost), "islands": list(lost.islands), "after_s": lost.after_s}
        return {**told, "round": joined.common.round}
    except (TrainingError, ClusterError) as stop:
        run.checkpoint_saver.wait_pending()
        leave(run, joined)
        return {"line": str(stop), "code": stop.exit_code, "round": joined.common.round}
    feedback = joined.merger.feedback
    left = {} if feedback is None else feedback.tensors()
    own, stream = gather_weights(run.program), joined.common.stream.to_json()
    own = {name: weight.clone() for name, weight in own.items()}
    loop.load_merged()
    weights = gather_weights(run.program)
    told = {
        "began": began,
        "committed": [merge.committed for merge in merges],
        "why": [merge.why for merge in merges],
        "exchange_s": [merge.seconds for merge in merges],
        "learnt_s": [seconds for seconds, _ in joined.merger.patience._past],
        "refused": [{str(k): why for k, why in m.verdict.refused.items()} for m in merges],
        "digests": [merge.digest for merge in merges],
        "divisors": [merge.divisor for merge in merges],
        "tokens": [[ballot.tokens for ballot in merge.ballots] for merge in merges],
        "sent_bytes": [merge.sent_bytes for merge in merges],
        "stream": stream,
        "dealt": [[[s.start, s.stop] for s in spans] for spans in joined.common.dealt],
        "own": digest(own),
        "weights": digest(weights),
        "norm": norm(weights),
        "spread": [merge.spread for merge in merges],
        "phases": sorted(phases),
        "left": {tag: digest({tag: one}) for tag, one in left.items()},
    }
    if folder:
        run.checkpoint_saver.wait_pending()
        for name, found in (("weights", weights), ("own", own)) if world.is_first else ():
            host = {n: tensor.cpu() for n, tensor in found.items()}
            torch.save(host, Path(folder) / f"{name}-{index}.pt")
    leave(run, joined)
    return told


class Trouble:
    """Makes one island misbehave in a round.

    nan, flip, huge   its message is not finite, points the other way, is 1000 × as long; of one
                      `fragment` only where that is said
    poison            after an inner step its own weights are not finite
    statistics        so are the running statistics, which no optimizer moves
    bit               one bit of one of its outer weights flips, once
    slow              every inner step sleeps so many `seconds`
    die, stop         SIGKILL or SIGSTOP of the process itself, `at`: steps, reduce (after the first
                      half), commit (before its vote), voted (after it)
    full              its disk is, for the first `saves` saves of what that many rounds agreed on
    stall             so long its disk does not answer then, in `seconds`
    hasty             it waits for others no longer than so many `seconds`
    """

    def __init__(self, loop: IslandRounds, asked: list[dict[str, Any]]) -> None:
        self.loop, self.asked = loop, asked
        if not asked:
            return
        run, merger = loop.run, loop.joined.merger
        self.step, self.message = run.step, merger.method.message
        self.outer_step, self.gather = merger.method.step, merger.plane.gather
        run.step = self.slowly
        merger.method.message = self.altered
        merger.method.step = self.before_vote
        merger.plane.gather = self.gathered
        self.saver = run.checkpoint_saver.prepare()
        self.write, self.deadline_s = self.saver._write, merger.patience.deadline_s
        self.saver._write = self.written
        merger.patience.deadline_s = self.hastily
        merger.last_save.pause_s = 0.1

    def due(self, *what: str) -> dict[str, Any] | None:
        now = self.loop.common.round
        return next((a for a in self.asked if a["what"] in what and a["round"] in (now, -1)), None)

    def end(self, at: str) -> None:
        asked = self.due("die", "stop")
        if asked and asked["at"] == at:
            os.kill(os.getpid(), signal.SIGKILL if asked["what"] == "die" else signal.SIGSTOP)

    def slowly(self, batch: Any) -> Any:
        self.end("steps")
        if asked := self.due("slow"):
            time.sleep(asked["seconds"])
        result = self.step(batch)
        if (asked := self.due("bit")) and not asked.get("done"):
            asked["done"] = True
            outer = self.loop.common.outer.at(asked["round"])
            next(iter(outer.weights.values())).view(torch.int64).view(-1)[0] ^= 1 << 22
        asked = self.due("poison", "statistics")
        if asked:
            weights, plain = collect_merge_tensors(self.loop.run)
            for tensor, _ in (weights if asked["what"] == "poison" else plain).values():
                tensor.detach().fill_(math.nan)
        return result

    def written(self, save: Any) -> None:
        if asked := self.due("stall"):
            time.sleep(asked["seconds"])
        if (asked := self.due("full")) and asked["saves"] > 0:
            asked["saves"] -= 1
            save.problem = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.write(save)

    def hastily(self, *given: Any) -> float:
        asked = self.due("hasty")
        return asked["seconds"] if asked else self.deadline_s(*given)

    def altered(self, *given: Any) -> dict[str, torch.Tensor]:
        asked = self.due("nan", "flip", "huge")
        parts = self.loop.joined.fragments
        if asked and "fragment" in asked and tuple(given[1]) != parts[asked["fragment"]]:
            asked = None
        factor = {"nan": math.nan, "flip": -1.0, "huge": 1000.0}[asked["what"]] if asked else 1.0
        return {name: part * factor for name, part in self.message(*given).items()}

    def before_vote(self, *given: Any) -> bool:
        finite = self.outer_step(*given)
        self.end("commit")
        return finite

    def gathered(self, message: bytes, **more: Any) -> list[bytes]:
        told = self.gather(message, **more)
        self.end("voted" if b"digest" in message else "reduce")
        return told


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of every bit."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.sqrt(sum((t.double() ** 2).sum() for t in tensors.values())))


def single(device: torch.device = HOST) -> World:
    """A world of this process alone."""
    return World(ProcessInfo(), device, None)


def in_turn(
    world: World,
    *,
    count: int,
    rounds: int,
    period: int,
    lr: float,
    momentum: float,
    **asked: Any,
) -> dict[str, Any]:
    """The same islands one after another in one process, with a torch optimizer outside.

    asked   arguments of `opened`
    """
    found = [opened(single(world.device), **asked) for _ in range(count)]
    runs, loaders = [run for run, _ in found], [run.loader(data) for run, data in found]
    batch = runs[0].plan.batch
    names = runs[0].program.names
    local = [{n: local_state(run.program)[n][0] for n in names} for run in runs]
    merged = {n: local[0][n].clone() for n in names}
    outer = torch.optim.SGD(
        [torch.nn.Parameter(w) for w in merged.values()], lr=lr, momentum=momentum,
        nesterov=momentum > 0,
    )  # fmt: skip
    weights = dict(zip(names, outer.param_groups[0]["params"], strict=True))
    position = 0
    for _ in range(rounds):
        tokens = []
        for island, run in enumerate(runs):
            run.first_key = island * (batch // MICRO_BATCH)
            start = position + island * period * batch
            steps = [(start + k * batch, start + (k + 1) * batch) for k in range(period)]
            tokens.append(sum(run.step(one).targets for one in loaders[island].over(steps)))
        position += count * period * batch
        for name in names:
            total = (merged[name] - local[0][name]) * float(tokens[0])
            for island in range(1, count):
                total += (merged[name] - local[island][name]) * float(tokens[island])
            mean = total / float(sum(tokens))
            weights[name].grad = mean
        outer.step()
        for name in names:
            merged[name] = weights[name].detach().clone()
            for island in range(count):
                local[island][name].copy_(merged[name])
    weights_now = gather_weights(runs[0].program)
    for run in runs:
        leave(run)
    return {"weights": digest(weights_now), "norm": norm(weights_now)}


def two_tiers_in_turn(
    world: World,
    *,
    count: int,
    rounds: int,
    period: int,
    regions: int,
    far_period: int,
    fragments: int,
    overlap: int,
    **asked: Any,
) -> dict[str, Any]:
    """Streaming islands of two tiers one after another in one process; outer SGD of torch, 0.7 and 0.9.

    Every island takes its step, then what is due after it is sent and applied.
    """
    torch.set_num_threads(1)
    found = [opened(single(world.device), **asked) for _ in range(count)]
    runs, loaders = [run for run, _ in found], [run.loader(data) for run, data in found]
    batch, per_epoch, names = runs[0].plan.batch, loaders[0].samples, runs[0].program.names
    local = [{n: local_state(run.program)[n][0] for n in names} for run in runs]
    tiers = [OuterTier(local[0]) for _ in range(regions + 1)]  # the last one is of all
    sizes = {n: local[0][n].numel() * local[0][n].element_size() for n in names}
    parts = partition_parameters(sizes, fragments)
    moments = schedule_fragments(period, fragments, overlap)
    since = [[0] * fragments for _ in runs]
    sent: dict[int, list[dict[str, torch.Tensor]]] = {}
    tokens: dict[int, list[int]] = {}
    stream = SampleStream()
    for run, first in zip(runs, range(count), strict=True):
        run.first_key = first * -(-batch // MICRO_BATCH)
    for round_number in range(rounds):
        stream, dealt = stream.deal(stream.count_samples([period] * count, batch, per_epoch))
        steps = [
            iter(loader.over(cut_steps(spans, per_epoch, batch)))
            for loader, spans in zip(loaders, dealt, strict=True)
        ]
        is_far = (round_number + 1) % far_period == 0
        for number in range(1, period + 1):
            for island, run in enumerate(runs):
                targets = round(run.step(next(steps[island])).targets)
                since[island] = [one + targets for one in since[island]]
            for moment in moments:
                p = moment.fragment
                if moment.send_after == number:
                    sent[p] = [{n: own[n].clone() for n in parts[p]} for own in local]
                    tokens[p] = [one[p] for one in since]
                    for one in since:
                        one[p] = 0
                if moment.apply_after == number:
                    size = count if is_far else count // regions
                    for start in range(0, count, size):
                        group = range(start, start + size)
                        tier = tiers[-1 if is_far else start // size]
                        tier.step(
                            parts[p],
                            [sent[p][island] for island in group],
                            [tokens[p][island] for island in group],
                        )
                        for island in group:
                            for n in parts[p]:
                                own, new = local[island][n], tier.weights[n].detach()
                                late = moment.apply_after > moment.send_after
                                own.copy_(own + (new - sent[p][island][n]) if late else new)
                    if is_far:
                        for near in tiers[:-1]:
                            near.restart(parts[p], tiers[-1])
    told = {
        "own": [digest(gather_weights(run.program)) for run in runs],
        "weights": digest({n: weight.detach() for n, weight in tiers[-1].weights.items()}),
    }
    for run in runs:
        leave(run)
    return told


class OuterTier:
    """Weights of one tier, and torch's optimizer over them."""

    def __init__(self, local: dict[str, torch.Tensor]) -> None:
        self.weights = {n: torch.nn.Parameter(weight.clone()) for n, weight in local.items()}
        parameters = list(self.weights.values())
        self.optimizer = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)

    def step(
        self, names: Sequence[str], sent: Sequence[dict[str, torch.Tensor]], tokens: Sequence[int]
    ) -> None:
        for n in names:
            total = torch.zeros(())
            for place, (one, count) in enumerate(zip(sent, tokens, strict=True)):
                part = (self.weights[n].detach() - one[n]) * float(count)
                total = part if place == 0 else total + part
            self.weights[n].grad = total / float(sum(tokens))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def restart(self, names: Sequence[str], other: OuterTier) -> None:
        for n in names:
            self.weights[n].data = other.weights[n].detach().clone()
            self.optimizer.state.pop(self.weights[n], None)


def data_parallel(
    world: World,
    *,
    steps: int,
    batch: int,
    model: str,
    optimizer: str,
    folder: str,
    kept: str | None = None,
) -> str:
    """`steps` optimizer steps of one process over whole batches; saved for comparison.

    kept   a run folder for a checkpoint after the last step
    """
    alone = single(world.device)
    run, data = opened(alone, model=model, optimizer=optimizer, batch=batch, folder=kept)
    for done, one in enumerate(run.loader(data), 1):
        run.step(one)
        if done == steps:
            break
    weights = gather_weights(run.program)
    torch.save({n: w.cpu() for n, w in weights.items()}, Path(folder) / "weights-dp.pt")
    if kept:
        run.save()
    leave(run)
    return digest(weights)
