"""Planes between islands that are real processes: sums bit for bit, few bytes, and who is lost."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from netns import told_by
from plane_case import Raw, free_port, message
from shoal.base.errors import BugError, ClusterError, ConfigError
from shoal.fabric.islands.compressed_all_reduce import COARSE, ChunkLayout
from shoal.fabric.islands.inter_island_group import connect_islands, join_island_store

SCRIPT_S = 60


def here() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("islands", [2, 4])
def test_sums_are_those_of_a_loop_bit_for_bit(worlds, islands: int) -> None:
    """Sizes down to nothing, parts of unequal length, weights; both formats; also whole messages."""
    for told in worlds(islands).call("plane_case:sums", at=here()):
        assert len(told) == 24
        for one in told:
            assert one["equal"], one
            assert one["gram"] <= 1e-12 * max(1, one["elements"])
            assert one["finite"] == [True] * islands


@pytest.mark.parametrize("codec", ["int8", "e3m0", "sign", "top2bit"])
def test_lossy_codes(worlds, codec: str) -> None:
    """Weight 0 keeps a NaN out; the owner codes once; feedback serves every chunk once per half."""
    told = worlds(4).call("plane_case:coded", at=here(), name=codec)
    assert len({one["bits"] for one in told}) == 1
    for island, one in enumerate(told):
        assert one["far"] <= 1e-6, one  # false where NaN
        assert one["finite"] == [True, False, True, True]
        assert one["sent"] == one["theory"]
        owners = 1 if codec == "top2bit" else 4
        messages = {tag: n for tag, n in one["tags"].items() if not tag.startswith("3/sum/")}
        sums = {tag: n for tag, n in one["tags"].items() if tag not in messages}
        assert sum(messages.values()) == 100_001
        assert {tag.split("/")[1] for tag in messages} == {str(owner) for owner in range(owners)}
        part = ChunkLayout(100_001, 4)
        share = part.piece(island, 0)[0], part.piece(island + 1, 0)[0]
        assert sum(sums.values()) == (0 if owners == 1 else share[1] - share[0])


def test_some_of_the_islands(worlds) -> None:
    for told in worlds(4).call("plane_case:parts", at=here()):
        assert all(told["right"]), told
        assert told["counted"]
        assert all("beat" in key for key in told["keys"]), "addresses of groups were left behind"


def test_nobody_else_is_listened_to(worlds) -> None:
    """Of a plane at 127.0.0.1, store and groups listen there and nowhere else."""
    for told in worlds(2).call("plane_case:listening", at=here()):
        assert told
        assert {address.split(":")[0] for address in told} == {"0100007F"}


def test_one_island_needs_no_other() -> None:
    store = join_island_store("", 0, 1, deadline_s=1)
    plane = connect_islands(store, "0", 0, 1, connections=2, host="", deadline_s=1)
    flat = message(0, 300_000)
    arrived = plane.start_compressed_all_reduce(flat, Raw(), feedback=None, tag="", deadline_s=1)
    assert arrived.gram[0][0] == pytest.approx(float(flat.double().square().sum()), rel=1e-12)
    assert torch.equal(arrived.finish([3.0], 3.0, deadline_s=1), flat * 3 / 3)
    assert plane.gather(b"alone", deadline_s=1) == [b"alone"]
    assert plane.subgroup((0,)) is plane
    assert plane.sent_bytes == 0
    with pytest.raises(BugError, match="float64.*for codec raw of"):
        plane.start_compressed_all_reduce(flat.double(), Raw(), feedback=None, tag="", deadline_s=1)
    with pytest.raises(BugError, match=r"weights \[1.0, 1.0\] / 2.0 for 1 messages"):
        arrived.finish([1.0, 1.0], 2.0, deadline_s=1)
    plane.close()


@pytest.mark.parametrize("elements", [0, 1, 4096, 100_001, 3_000_000, 12_500_000])
@pytest.mark.parametrize("owners", [1, 2, 3, 5])
def test_every_number_has_one_owner(elements: int, owners: int) -> None:
    cut = ChunkLayout(elements, owners)
    ends = [cut.piece(owner, chunk) for owner in range(owners) for chunk in range(cut.chunks)]
    full = [end for end in ends if end[0] < end[1]]
    assert sum(last - first for first, last in full) == elements
    assert [first for first, _ in full] == [0, *(last for _, last in full)][: len(full)]
    assert elements < owners * 16 * COARSE or all(first % COARSE == 0 for first, _ in full)


def test_islands_that_cannot_meet(worlds) -> None:
    with pytest.raises(ConfigError, match=r"islands.at = far: not HOST:PORT; try: far:29400"):
        join_island_store("far", 0, 2, deadline_s=1)
    with pytest.raises(ClusterError, match="island 0 cannot listen there: Cannot assign requested"):
        join_island_store("192.0.2.1:29400", 0, 2, deadline_s=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterError, match="cannot listen there: Address already in use"):
            join_island_store(at, 0, 2, deadline_s=1)
    at = here()
    with pytest.raises(ClusterError, match=f"islands.at = {at}: island 1 of 2 did not come within"):
        join_island_store(at, 0, 2, deadline_s=0.2)
    at = here()
    with pytest.raises(ClusterError, match=f"{at}: island 1 does not reach island 0 there within"):
        join_island_store(at, 1, 2, deadline_s=0.5)
    for settings, said in [
        ({"index": 1, "count": 3}, "ConfigError: islands.count = 3 on island 1: the islands at "),
        ({"index": 1, "count": 2, "times": 2}, "ConfigError: islands.index = 1: another island "),
    ]:
        assert said in worlds(2).call("plane_case:refused", at=here(), **settings)[1]


def script(case: str) -> dict[str, Any]:
    what = "links between islands NOT TESTED"
    return told_by("plane_case.py", case, what=what, deadline_s=SCRIPT_S)


@pytest.fixture(scope="module")
def faults() -> dict[str, Any]:
    return script("faults")


FAULTS = ["KILL-1-1", "KILL-1-2", "STOP-2-1", "STOP-2-2", "KILL-0-1", "STOP-0-2"]


@pytest.mark.parametrize("case", FAULTS)
def test_a_lost_island_is_named(faults: dict[str, Any], case: str) -> None:
    _, victim, half = case.split("-")
    for told in faults[case]:
        assert told["islands"] == [int(victim)], told
        assert f"island {victim}: silent" in told["said"]
        assert ("first" if half == "1" else "second") in told["said"]
        assert "\n" not in told["said"]
        assert told["again"], "a broken plane says so again"


def test_who_is_late_is_not_called_dead(faults: dict[str, Any]) -> None:
    for told in faults["late"]:
        assert told["islands"] == [1]
        assert "island 1: alive, but did not come; given up after 1." in told["said"]


@pytest.fixture(scope="module")
def links() -> dict[str, Any]:
    return script("links")


def test_bytes_on_the_interface(links: dict[str, Any]) -> None:
    """Within 5 % of 2(R−1)/R × codes, headers, heartbeats and a gathering included."""
    for told in links["told"]:
        assert told["payload"] == pytest.approx(links["whole"], rel=0.01)
        assert links["whole"] <= told["wire"] <= 1.05 * links["whole"]


def test_a_link_that_comes_back_is_survived(links: dict[str, Any]) -> None:
    assert len({digest for told in links["told"] for digest in told["digests"]}) == 1
    assert all(told["sent_again"] > 0 for told in links["told"]), "the link was not away"


def test_a_link_that_is_gone(links: dict[str, Any]) -> None:
    """Each side sees the other one silent; both stop."""
    for island, told in enumerate(links["told"]):
        assert told["gone"]["islands"] == ([0] if island == 2 else [2])
        assert "silent" in told["gone"]["said"]
