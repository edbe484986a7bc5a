"""Canonical units: every layout divides, hashes and steps the merged state alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.base.layouts.changing_members import check_rank_addresses
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.base.plans.tensor_shards import Shard
from shoal.config.differences import compare_configurations
from shoal.islands.changing.canonical_outer import CanonicalOuterState
from shoal.islands.changing.canonical_units import (
    CanonicalUnits,
    count_numbers,
    cut_units,
    join_segments,
)
from shoal.islands.changing.change_merge import join_digests
from shoal.islands.changing.change_store import HASH_BYTES, ChangeStore, hash_list
from shoal.islands.membership.committed_turn import Seat, TurnProposal
from shoal.islands.methods import find_method
from shoal.islands.outer_optimizer import UNFIT, make_outer_builder
from shoal.trainer.islands.island_state import CommonState
from shoal.trainer.islands.member_settings import FORMAT, NARROW, describe_settings

SIZES = {"a": 1000, "b.w": 37, "c": 5, "d": 64, "e": 1}
UNITS = CanonicalUnits(cut_units(SIZES, 101), cut_units({"mean": 130}, 101))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 30])
def test_every_number_is_of_one_rank(ranks: int) -> None:
    cuts = UNITS.cuts(ranks)
    assert cuts[0] == 0
    assert cuts[-1] == len(UNITS.all)
    assert cuts == sorted(cuts)
    own = [UNITS.of_rank(rank, ranks) for rank in range(ranks)]
    assert sum((one.coded for one in own), ()) == UNITS.coded
    assert sum((one.plain for one in own), ()) == UNITS.plain
    assert own[0].coded, "the first rank has the list of hashes"
    if ranks < 6:
        most = max(sum(map(count_numbers, one.all)) for one in own)
        assert most <= (sum(SIZES.values()) + 130) / ranks + 101


def states(ranks: int, build: Any, start: dict[str, torch.Tensor]) -> list[CanonicalOuterState]:
    """The outer state of each rank of an island."""
    found = []
    for rank in range(ranks):
        segments = join_segments(UNITS.of_rank(rank, ranks).coded)
        local = {name: start[name][s[0].start : s[-1].stop] for name, s in segments.items()}
        found.append(CanonicalOuterState(local, build, segments))
    return found


OUTER = sorted(
    name.lower()
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name.lower() not in UNFIT
)


@pytest.mark.parametrize("outer", [*OUTER, "fedopt"])
def test_steps_and_digests_do_not_depend_on_the_ranks(outer: str) -> None:
    """Also where a vector instruction ends in the middle of a rank's numbers."""
    policy = IslandsPolicy("diloco", outer=outer, outer_lr=0.3)
    if outer == "fedopt":
        policy = IslandsPolicy("fedopt", outer_lr=0.3)
    build = find_method(policy.resolved()).optimizer_builder()
    draw = torch.Generator().manual_seed(4)
    start = {name: torch.randn(size, generator=draw) for name, size in SIZES.items()}
    steps = [
        {name: torch.randn(size, generator=draw) for name, size in SIZES.items()} for _ in range(3)
    ]
    told = set[str]()
    for ranks in (1, 2, 3, 5):
        island = states(ranks, build, start)
        for mean in steps:
            for one in island:
                spans = {name: (s[0].start, s[-1].stop) for name, s in one._segments.items()}
                assert one.propose({name: mean[name][a:b] for name, (a, b) in spans.items()})
                one.commit()
        told.add(join_digests(one.list_digests() for one in island))
    assert len(told) == 1


def test_a_rank_with_one_number_of_a_tensor_saves_its_count_of_steps_whole() -> None:
    """The state of one number has as many numbers as the weight here, and another shape."""
    units = CanonicalUnits(cut_units({"a": 7}, 2), ())
    segments = join_segments(units.of_rank(3, 4).coded)
    build = make_outer_builder(IslandsPolicy("diloco", outer="adam", outer_lr=0.3).resolved())
    outer = CanonicalOuterState({"a": torch.ones(1)}, build, segments)
    assert outer.propose({"a": torch.ones(1)})
    outer.commit()
    state = SimpleNamespace(
        left=SimpleNamespace(parts=dict), owners=None, outer=outer, merged_parts=None, _owner=lambda name: "a",
        shards={"a": Shard("a", (7,), "float32", (((6, 7),),))},
    )  # fmt: skip
    shards = {name: shard for name, (_, shard) in CommonState.parts(state).items()}  # type: ignore[arg-type]
    assert shards["outer.a.step"] == Shard.whole("outer.a.step", (), "float32")
    assert shards["outer.a.exp_avg"].slices == (((6, 7),),)


class Links:
    """Connections to one other island, whose ranks are stores in this process."""

    def __init__(self, stores: list[ChangeStore], alter: Callable[[bytes], bytes]) -> None:
        self.stores, self.alter, self.asked = stores, alter, list[tuple[str, int]]()

    def fetch(self, name: int, key: str, *, lane: int = 0) -> bytes | None:
        self.asked.append((key.rpartition("/")[2], lane))
        found, offset = b"", 0
        while True:  # in pieces, as over the network
            told = self.stores[lane].provide(key, offset, 100)
            if told is None:
                return None
            size, piece = told
            found, offset = found + piece, offset + len(piece)
            if offset >= size:
                return self.alter(found) if key.count("/") == 2 else found


def change_of(sizes: list[int]) -> tuple[str, bytes, list[bytes]]:
    """The name, the hashes and the units of a change."""
    units = [bytes([place]) * size for place, size in enumerate(sizes)]
    hashes = b"".join(hashlib.sha256(unit).digest() for unit in units)
    return hash_list(hashes), hashes, units


def fetched(
    there: int, here: int, rank: int, alter: Callable[[bytes], bytes] = lambda found: found
) -> tuple[ChangeStore, Links, TurnProposal, list[bytes]]:
    """A rank of an island of `here` ranks fetches a change of an island of `there` ranks."""
    sizes = [4 * count_numbers(unit) for unit in UNITS.all]
    name, hashes, units = change_of(sizes)
    stores = [ChangeStore(UNITS, sizes, k, there) for k in range(there)]
    for store, (first, last) in zip(stores, pairwise(UNITS.cuts(there)), strict=True):
        store.add(name, hashes, units[first:last])
    store, links = ChangeStore(UNITS, sizes, rank, here), Links(stores, alter)
    store.links = links  # type: ignore[assignment]
    store._fetch_from(1, name)
    first, last = UNITS.cuts(here)[rank : rank + 2]
    return store, links, TurnProposal(Seat(1, 1), name, 8, 8), units[first:last]


@pytest.mark.parametrize(("there", "here"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3)])
def test_a_rank_fetches_its_units_from_ranks_that_are_divided_otherwise(
    there: int, here: int
) -> None:
    lanes = set[int]()
    for rank in range(here):
        store, links, proposal, wanted = fetched(there, here, rank)
        assert store.find([proposal]) == [wanted]
        lanes |= {lane for _, lane in links.asked}
        if there == here:
            assert [lane for _, lane in links.asked] == [0, rank]
        assert not store.is_missing(proposal)
    assert lanes == set(range(there)), "each rank sends its part"


def test_altered_units_never_count() -> None:
    def alter(found: bytes) -> bytes:
        return found[:5] + b"x" + found[6:]

    store, _, proposal, _ = fetched(2, 1, 0, alter)
    assert store.find([proposal]) is None
    assert store.is_missing(proposal)


def test_a_list_of_another_model_or_of_no_ranks_is_refused() -> None:
    sizes = [4 * count_numbers(unit) for unit in UNITS.all]
    for hashes, ranks in ((bytes(HASH_BYTES * 3), 1), (bytes(HASH_BYTES * len(sizes)), 0)):
        store, name = ChangeStore(UNITS, sizes), hash_list(hashes)
        other = ChangeStore(UNITS, sizes, 0, 1)
        other.add(name, hashes, [])
        other.ranks = ranks
        links = Links([other], lambda found: found)
        store.links = links  # type: ignore[assignment]
        store._fetch_from(1, name)
        assert len(links.asked) == 1
        assert store.find([TurnProposal(Seat(1, 1), name, 8, 8)]) is None


class DeadMember(Links):
    """Connections to island 0, a chair that has all units; island 1 is dead."""

    def fetch(self, name: int, key: str, *, lane: int = 0) -> bytes | None:
        if name == 1:
            raise ConnectionError("it is dead")
        return super().fetch(name, key, lane=lane)


def test_the_chair_gives_the_units_of_a_dead_member() -> None:
    _, links, proposal, wanted = fetched(2, 1, 0)
    store = ChangeStore(UNITS, [4 * count_numbers(unit) for unit in UNITS.all])
    store.links = DeadMember(links.stores, links.alter)  # type: ignore[assignment]
    told = list[str]()
    store.notify = told.append
    store._run(proposal.change, [1, 0])
    assert store.find([proposal]) == [wanted]
    assert told == [proposal.change]


def test_each_island_checks_its_own_ports() -> None:
    """Another island may have more processes, or fewer."""
    at = {0: "10.0.0.1:29400", 1: "10.0.0.1:29401", 2: "10.0.0.1:29403"}
    check_rank_addresses(at, 0, 1)
    check_rank_addresses(at, 1, 2)
    with pytest.raises(ConfigError) as refused:
        check_rank_addresses(at, 1, 3)
    assert str(refused.value) == (
        "islands.at = 10.0.0.1:29400,10.0.0.1:29401,10.0.0.1:29403: an island of 3 processes "
        "listens at 3 ports, and those of islands 1 and 2 overlap; try: 10.0.0.1:29404 for island 2"
    )


def test_merged_weights_are_fp64_everywhere_or_nowhere() -> None:
    line = describe_settings({FORMAT: NARROW}, {FORMAT: "fp64"}, 0, 1)
    assert line == (
        "precision.compute = fp64 on island 1, fp32, bf16 or fp16 on island 0: merged weights are "
        "fp64 on all islands, or on none; try: precision.compute=fp32"
    )


@pytest.mark.parametrize(("least", "changes"), [(0, True), (2, False)])
def test_the_checkpoint_of_an_unlike_island_may_be_taken_over(least: int, changes: bool) -> None:
    """A resume by hand compares it with the own configuration."""
    text = "[islands]\nleast = {}\n[precision]\ncompute = '{}'\n[train]\nmicro_batch = {}\n"
    found = compare_configurations(text.format(least, "fp32", 2), text.format(least, "bf16", 4))
    assert {one.key: one.changes for one in found} == {
        "precision.compute": changes,
        "train.micro_batch": changes,
    }
