"""Health checks of the links between processes: pairwise rates, and sums with known results.

Pairs     one pair talks at a time while the others wait, so no two share a wire. The shortest of
          ROUNDS round trips of one word gives the latency, of MESSAGE_BYTES messages the rate
Slow      a pair that takes SLOW × as long as the median pair, in two passes
Sums      all ranks run all-reduce, reduce-scatter and all-gather on float32 and int64 numbers with
          known results, as `fabric/collectives/json_messages.py` does at a start
Clocks    of machines: a round trip returns the other's wall clock; the error is half the trip
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from shoal.base.text.units import bytes_text, seconds_text
from shoal.fabric import World
from shoal.fabric.collectives.json_messages import find_wrong_sums
from shoal.fabric.device import synchronize
from shoal.fabric.exchanges.point_to_point import PointToPoint
from shoal.machine.health_check import CheckResult

SLOW = 3.0
ROUNDS, LARGE_ROUNDS, MESSAGE_BYTES = 20, 4, 2**20
MOST_RANKS = 16
"""With more ranks, one of each machine: the number of pairs grows as the square."""

Pair = dict[str, float]
"""a, b: ranks; latency_s, one way; bytes_per_s."""


def check_links(world: World, hosts: Sequence[str]) -> list[CheckResult]:
    """Run all checks of a world and return the same results on all ranks; a collective.

    Args:
        hosts: host name by rank.
    """
    if world.size == 1:
        return [CheckResult("links", True, "one process, no links")]
    firsts = sorted({host: hosts.index(host) for host in hosts}.values())
    talk = PointToPoint(world)
    told = [check_sums(check_collectives(world), world.size)]
    members = range(world.size) if world.size <= MOST_RANKS else firsts
    pairs = measure_pairs(world, talk, list(combinations(members, 2)))
    if slow := select_slow_pairs(pairs):
        again = measure_pairs(world, talk, [(int(p["a"]), int(p["b"])) for p in slow])
        pairs = best_pairs(pairs, again)
    told += check_pairs(pairs, hosts)
    if len(firsts) > 1:
        told.append(report_clocks(measure_clocks(world, talk, firsts), hosts))
    return told


def measure_pairs(world: World, talk: PointToPoint, pairs: Sequence[tuple[int, int]]) -> list[Pair]:
    """Measure latency and rate of each pair of ranks, one pair at a time; same on all ranks."""
    mine: list[Pair] = []
    for a, b in pairs:
        world.barrier()
        if world.rank in (a, b):
            word = _round_trip_s(world, talk, a, b, 4, ROUNDS)
            large = _round_trip_s(world, talk, a, b, MESSAGE_BYTES, LARGE_ROUNDS)
            rate = MESSAGE_BYTES / max(1e-9, (large - word) / 2, large / 200)
            if world.rank == a:
                mine.append({"a": a, "b": b, "latency_s": word / 2, "bytes_per_s": rate})
    return sorted(
        (pair for told in world.gather_json(mine) for pair in told), key=lambda p: (p["a"], p["b"])
    )


def _round_trip_s(
    world: World, talk: PointToPoint, a: int, b: int, size: int, rounds: int
) -> float:
    """Return the seconds of the shortest round trip from `a` to `b`, after a warm-up trip."""
    other = b if world.rank == a else a
    out = torch.zeros(size, dtype=torch.uint8, device=world.device)
    taken = []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        if world.rank == a:
            talk.send(out, other).wait()
        talk.receive((size,), torch.uint8, other).wait()
        if world.rank == b:
            talk.send(out, other).wait()
        synchronize(world.device)
        taken.append(time.perf_counter() - began_s)
    return min(taken[1:])


def best_pairs(pairs: Sequence[Pair], again: Sequence[Pair]) -> list[Pair]:
    """Return the better figures of two passes; the second may lack some pairs."""
    second = {(p["a"], p["b"]): p for p in again}
    return [
        {
            **one,
            "latency_s": min(one["latency_s"], other["latency_s"]),
            "bytes_per_s": max(one["bytes_per_s"], other["bytes_per_s"]),
        }
        for one in pairs
        for other in [second.get((one["a"], one["b"]), one)]
    ]


def select_slow_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Return pairs with SLOW × the median pair's latency, or less than its rate / SLOW."""
    if len(pairs) < 2:
        return []
    latency_s = statistics.median_low(p["latency_s"] for p in pairs)
    rate = statistics.median_high(p["bytes_per_s"] for p in pairs)
    return [p for p in pairs if p["latency_s"] > SLOW * latency_s or p["bytes_per_s"] * SLOW < rate]


def check_pairs(pairs: Sequence[Pair], hosts: Sequence[str]) -> list[CheckResult]:
    """Return one failed check per slow pair, or one passed check if all pairs are similar."""
    latency_s = statistics.median_low(p["latency_s"] for p in pairs)
    rate = statistics.median_high(p["bytes_per_s"] for p in pairs)
    median = f"{seconds_text(latency_s)}, {bytes_text(rate)}/s"
    slow = select_slow_pairs(pairs)
    if not slow:
        many = f"{len(pairs)} pair{'s' * (len(pairs) > 1)} of ranks alike, the median"
        return [
            CheckResult("links", True, f"{many if len(pairs) > 1 else '1 pair of ranks:'} {median}")
        ]
    return [
        CheckResult(
            "links",
            False,
            f"ranks {_rank(p['a'], hosts)} and {_rank(p['b'], hosts)} take "
            f"{seconds_text(p['latency_s'])}, {bytes_text(p['bytes_per_s'])}/s; the median pair "
            f"{median}",
            "look at what joins the two: cable, switch port, tc qdisc, another program's traffic",
        )
        for p in slow
    ]


def _rank(rank: float, hosts: Sequence[str]) -> str:
    one = int(rank)
    return f"{one} ({hosts[one]})" if len(set(hosts)) > 1 else f"{one}"


def check_collectives(world: World) -> list[str]:
    """Return by rank which collective returned a wrong result, and which; "" for none."""
    found = find_wrong_sums(world)
    mine = ""
    if found[world.rank]:
        place, got, right = found[world.rank]
        mine = f"all-reduce of float32 gave {got:g} at place {place:g}, {right:g} is right"
    for dtype in (torch.int64, torch.float32):
        also = _check_collectives_of(
            world, dtype
        )  # in any case: the other ranks call its collectives too
        mine = mine or also
    return [str(one) for one in world.gather_json(mine)]


def _check_collectives_of(world: World, dtype: torch.dtype) -> str:
    """Run each collective on numbers that float32 holds exactly; return the first wrong one."""
    part, size, name = 513, world.size, str(dtype).split(".")[1]
    place = torch.arange(part * size, device=world.device) % 13 + 1
    ours = (place * (world.rank % 64 + 1)).to(dtype)
    total = (place * sum(rank % 64 + 1 for rank in range(size))).to(dtype)
    cuts = [part * rank for rank in range(size + 1)]
    summed = ours.clone()
    world.all_reduce(summed)
    results = {
        "all-reduce": (summed, total),
        "reduce-scatter": (
            world.reduce_scatter(ours, cuts).result(),
            total[cuts[world.rank] : cuts[world.rank + 1]],
        ),
        "all-gather": (
            world.all_gather(ours),
            torch.stack([(place * (rank % 64 + 1)).to(dtype) for rank in range(size)]),
        ),
    }
    for kind, (got, right) in results.items():
        unlike = (got != right).reshape(-1).nonzero()
        if len(unlike):
            at = int(unlike[0])
            values = f"{got.reshape(-1)[at].item():g} at place {at}"
            return f"{kind} of {name} gave {values}, {right.reshape(-1)[at].item():g} is right"
    return ""


def check_sums(wrong: Sequence[str], size: int) -> CheckResult:
    """Check that every rank got the known result of every collective."""
    ranks = [rank for rank, what in enumerate(wrong) if what]
    if not ranks:
        what = f"all-reduce, reduce-scatter, all-gather of known numbers right on {size} ranks"
        return CheckResult("sums", True, what)
    told = ", ".join(map(str, ranks))
    what = f"rank {ranks[0]}: {wrong[ranks[0]]} (wrong on ranks {told} of {size})"
    return CheckResult(
        "sums", False, what, "do not train there: leave out that card, link or machine"
    )


Ahead = tuple[int, float, float]
"""A rank, by how many seconds its wall clock is ahead, and the error of that in seconds."""


def measure_clocks(world: World, talk: PointToPoint, firsts: Sequence[int]) -> list[Ahead]:
    """Compare the wall clock of one rank of each machine with the first machine's."""
    home, mine = firsts[0], []
    for other in firsts[1:]:
        world.barrier()
        if world.rank == other:
            for _ in range(ROUNDS):
                talk.receive((1,), torch.int64, home).wait()
                now = torch.tensor([time.time_ns()], device=world.device)
                talk.send(now, home).wait()
        elif world.rank == home:
            mine.append((other, *_clock_lead_s(world, talk, other)))
    told: list[Any] = world.gather_json(mine)[home]
    return [(int(rank), float(ahead_s), float(error_s)) for rank, ahead_s, error_s in told]


def _clock_lead_s(world: World, talk: PointToPoint, other: int) -> tuple[float, float]:
    """Return a clock's lead and its error, from the shortest round trip (Cristian 1989)."""
    tries = []
    for _ in range(ROUNDS):
        began = time.time_ns()
        talk.send(torch.zeros(1, dtype=torch.int64, device=world.device), other).wait()
        theirs = int(talk.receive((1,), torch.int64, other).wait().item())
        trip = time.time_ns() - began
        tries.append((trip / 2e9, (theirs - began - trip / 2) / 1e9))
    error_s, ahead_s = min(tries)
    return ahead_s, error_s


def report_clocks(found: Sequence[Ahead], hosts: Sequence[str]) -> CheckResult:
    """Report how far machines' wall clocks differ; never a failure, as no run compares them."""
    lines = [
        f"{hosts[rank]} {ahead_s * 1e3:+.1f} ms (± {error_s * 1e3:.1f})"
        for rank, ahead_s, error_s in found
    ]
    return CheckResult("clocks", True, f"against {hosts[0]}: {', '.join(lines)}")
