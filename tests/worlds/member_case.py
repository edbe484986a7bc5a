"""Islands that come and go, as processes; and the same committed turns in one process."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from island_case import MICRO_BATCH, RUN, digest, leave, opened, single
from shoal.base.errors import ShoalError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.fabric import World
from shoal.fabric.duplicate_group import destroy_duplicate
from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.changing import canonical_units
from shoal.islands.changing.witness import Witness
from shoal.islands.membership.committed_turn import FIRST_WITNESS, Seat
from shoal.islands.membership.message_json import decode_message
from shoal.islands.sample_ranges import SampleStream, cut_steps, drop_consumed
from shoal.parallel.build.full_state import gather_weights, local_state
from shoal.trainer.islands import canonical_parts
from shoal.trainer.islands.island_join import collect_merge_tensors, join_islands
from shoal.trainer.islands.member_job import open_member_rounds, train_turns


def train(
    world: World,
    index: int,
    addresses: list[str],
    *,
    rounds: int,
    folder: str,
    trouble: list[dict[str, Any]] | None = None,
    step_s: float = 0.0,
    clock_s: float = 0.0,
    unit: int = 0,
    **asked: Any,
) -> dict[str, Any]:
    """Some rounds of one island; what it ends with, and its weights in the folder.

    trouble   {"island": 3, "round": 2, "what": "die"}: SIGKILL in the inner steps of a round, of all
              ranks or of one "rank"; "stop": a stop is asked for; "die alone": SIGKILL before the
              save of the first turn that this island merged alone
    step_s    every inner step sleeps so long · clock_s   the wall clock is wrong by so much
    unit      numbers of a canonical unit, for models that are smaller than one
    """
    canonical_parts.UNIT = unit or canonical_units.UNIT
    own = str(Path(folder) / f"island-{index}")
    run, data = opened(world, folder=own, **{k: asked.pop(k) for k in RUN & set(asked)})
    given = {"pace": "equal", "least": 1, "count": len(addresses), **asked}
    policy = IslandsPolicy(at=",".join(addresses), index=index, **given).resolved()
    joined = join_islands(run, policy)
    clock = time.time
    time.time = lambda: clock() + clock_s
    loop = open_member_rounds(run, joined, run.loader(data), rounds * policy.period, {})
    time.time = clock
    due = [one for one in trouble or [] if one["island"] == index]
    step, began = run.step, time.monotonic()
    first_seats: dict[int, Any] = {}

    def is_back(name: int) -> bool:
        """Whether an island that died asks to join, or has a seat again, since it was quick."""
        member = loop.ranks.driver.member if loop.ranks.driver else None
        seat = member.fact.seat_of(name) if member and member.fact else None
        if seat is not None:
            first_seats.setdefault(name, seat)
        if member is None or name in member.joiners:
            return True
        return seat is not None and seat != first_seats[name]

    def slowly(batch: Any) -> Any:
        time.sleep(step_s)
        for one in due:
            if one["what"] == "await":
                is_back(one["for"])  # notes the first seat
            if loop.common.round == one["round"]:
                if one["what"] == "die" and one.get("rank", world.rank) == world.rank:
                    os.kill(os.getpid(), signal.SIGKILL)
                if one["what"] == "stop":
                    run.request_stop()
                while one["what"] == "await" and world.is_first and not is_back(one["for"]):
                    time.sleep(0.05)
        return step(batch)

    run.step, save = slowly, run.save

    def save_or_die(**given: Any) -> Any:
        fact = decode_message(loop.common.members)
        if any(one["what"] == "die alone" for one in due) and fact.committers == (index,):
            time.sleep(1.0)  # until the witness knows the turn
            os.kill(os.getpid(), signal.SIGKILL)
        return save(**given)

    run.save = save_or_die
    try:
        finished = train_turns(loop)
        run.checkpoint_saver.wait_pending()
        loop.ranks.finish(10.0 if finished else 0.0)
    except ShoalError as failure:
        run.checkpoint_saver.wait_pending()
        loop.ranks.close()
        destroy_duplicate(loop.ranks.world)
        leave(run, joined)
        return {"line": str(failure), "round": loop.common.round}
    weights = gather_weights(run.program)
    if world.is_first:
        torch.save({n: w.cpu() for n, w in weights.items()}, Path(folder) / f"weights-{index}.pt")
    told = {
        "finished": finished,
        "round": loop.common.round,
        "digest": loop.common.digest,
        "weights": digest(weights),
        "stream": loop.common.stream.to_json(),
        "seconds": time.monotonic() - began,
    }
    destroy_duplicate(loop.ranks.world)
    leave(run, joined)
    return told


def canonical(world: World, *, unit: int, **asked: Any) -> list[Any]:
    """The canonical numbers of all ranks, and whether this rank gets its own parts back."""
    canonical_parts.UNIT = unit
    run, _ = opened(world, **asked)
    found = []
    with run.meeting.hide_views():
        weights, plain = collect_merge_tensors(run)
        canon = canonical_parts.CanonicalParts(weights, plain, world, torch.float64)
        for kind, exchange in ((weights, canon.weights), (plain, canon.plain)):
            local = {name: tensor for name, (tensor, _) in kind.items()}
            numbers = exchange.collect(local)
            for name, back in exchange.distribute(numbers).items():
                assert back.shape == local[name].shape, name
                assert torch.equal(back, local[name].to(back.dtype)), name
            rows = {name: numbers[name].tolist() for name in sorted(numbers)}
            found.append([list(exchange.range.items()), digest_of_rows(world, rows)])
            if world.size > 1:
                sent = sum(
                    map(sum, world.gather_json(canonical_parts._count(exchange._collected[0])))
                )
                wholes = {name: shard.global_shape for name, (_, shard) in kind.items()}
                everyones = {n: s for told in world.gather_json(wholes) for n, s in told.items()}
                assert sent == sum(map(math.prod, everyones.values())), "each number once"
    leave(run)
    return found


def digest_of_rows(world: World, rows: dict[str, list[float]]) -> str:
    """The digest of tensors whose numbers the ranks hold one after another."""
    whole: dict[str, list[float]] = {}
    for told in world.gather_json(rows):
        for name, numbers in told.items():
            whole.setdefault(name, []).extend(numbers)
    return digest({name: torch.tensor(numbers) for name, numbers in whole.items()})


def witness(world: World, addresses: list[str], listen: str) -> dict[str, Any]:
    """A witness of these islands, until the run ends; what it printed."""
    lines: list[str] = []
    seat = Seat(FIRST_WITNESS, int(time.time() * 1000))
    voter = Witness(seat, tuple(range(len(addresses))), lines.append)
    known = {**dict(enumerate(addresses)), seat.name: listen}
    links = MemberLinks(
        seat.name, seat.boot, known, b"", voter.on_message, voter.provide, lines.append
    )
    ended = voter.run(links, lambda: False)
    links.close()
    return {"ended": ended, "lines": lines}


def repeated(
    world: World, *, turns: list[dict[str, Any]], first: list[int], period: int, **asked: Any
) -> str:
    """The digest of the weights after committed turns, computed by one island, without momentum inside.

    turns   events of the turns: "members", "seats" and "round" of each, in order
    first   the seats of the first turn
    """
    run, data = opened(single(world.device) if world.size == 1 else world, **asked)
    loader = run.loader(data)
    local = {n: local_state(run.program)[n][0] for n in run.program.names}
    names = list(local)
    merged = {n: local[n].clone() for n in names}
    outer = torch.optim.SGD(
        [torch.nn.Parameter(w) for w in merged.values()], lr=0.7, momentum=0.9, nesterov=True
    )
    weights = dict(zip(names, outer.param_groups[0]["params"], strict=True))
    batch, per_epoch = run.plan.batch, loader.samples
    stream, seats = SampleStream(), first
    for turn in turns:
        wanted = stream.count_samples([period] * len(seats), batch, per_epoch)
        stream, dealt = stream.deal(wanted)
        total, tokens = {n: torch.zeros_like(w) for n, w in merged.items()}, []
        work = {name: (steps, samples, count) for name, steps, samples, count in turn["members"]}
        for place, name in enumerate(seats):
            if name not in work:
                stream = stream.return_unused(dealt[place])
                continue
            run.first_key = name * -(-batch // MICRO_BATCH)
            run.step_count = turn["round"] * period
            for n in names:
                local[n].copy_(merged[n])
            steps = cut_steps(dealt[place], per_epoch, batch)[: work[name][0]]
            tokens.append(sum(round(run.step(one).targets) for one in loader.over(steps)))
            assert tokens[-1] == work[name][2]
            stream = stream.return_unused(drop_consumed(dealt[place], work[name][1]))
            for n in names:
                part = (merged[n] - local[n]) * float(tokens[-1])
                total[n] = total[n] + part if len(tokens) > 1 else part
        seats = turn["seats"]
        if not tokens:
            continue
        for n in names:
            weights[n].grad = total[n] / float(sum(tokens))
        outer.step()
        for n in names:
            merged[n] = weights[n].detach().clone()
            local[n].copy_(merged[n])
    found = digest(gather_weights(run.program))
    leave(run)
    return found
