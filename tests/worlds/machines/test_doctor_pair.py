"""`shoal doctor` on three machines, as a launcher starts it: the one pair with a slow link is named."""

from __future__ import annotations

import json
import subprocess

import pytest

from forks import shared
from netns import Forbidden, Net, skip

RANKS, PORT, RATE = 3, "29417", "200mbit"


def join(net: Net, one: int, other: int) -> None:
    """Give two machines a slow cable of their own, by which all goes that they tell each other."""
    peer = f"type veth peer name eth1 netns {net.islands[other]}"
    command(net, one, f"ip link add eth1 {peer}")
    for here, there in ((one, other), (other, one)):
        command(net, here, "ip link set eth1 up")
        shaped = f"root tbf rate {RATE} burst 256kb latency 400ms"
        command(net, here, f"tc qdisc add dev eth1 {shaped}")
        command(net, here, f"ip route add {net.addresses[there]}/32 dev eth1")


def command(net: Net, machine: int, words: str) -> None:
    subprocess.run([*net.inside(machine), *words.split()], check=True)


def doctors(net: Net) -> list[tuple[int, str, str]]:
    """(exit status, output, errors) of the command on each machine."""
    started = []
    for rank in range(RANKS):
        environ = {
            **{"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"},
            **{"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": net.addresses[0], "MASTER_PORT": PORT},
            **{"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
        }
        place = {"net": net.path(rank), "host": f"node{rank}"}
        words = ["-m", "shoal", "doctor", "--json", "--free-gib", "0.1"]
        started.append(shared().start(words, {**environ, "SHOAL_TEST_NODE": json.dumps(place)}))
    try:
        told = [one.communicate(timeout=300) for one in started]
    finally:
        for one in started:
            one.kill()
    return [(one.returncode, *said) for one, said in zip(started, told, strict=True)]


@pytest.mark.parametrize("slow", [pytest.param(False, marks=pytest.mark.proof), True])
def test_the_slow_pair_of_three_machines_is_named(slow: bool) -> None:
    try:
        net = Net(RANKS)
    except Forbidden as refusal:
        skip("links between machines NOT TESTED", str(refusal))
    with net:
        if slow:
            join(net, 1, 2)
        ends = doctors(net)
    assert [code for code, _, _ in ends] == [int(slow)] * RANKS, ends
    assert [out for _, out, _ in ends[1:]] == ["", ""], "rank 0 tells"
    told = [json.loads(line) for line in ends[0][1].splitlines()]
    assert {one["host"] for one in told} == {"node0", "node1", "node2", ""}
    wrong = [one for one in told if not one["ok"]]
    assert [one["check"] for one in wrong] == ["links"] * slow
    assert all(one["what"].startswith("ranks 1 (node1) and 2 (node2) take ") for one in wrong)
    apart = next(one["what"] for one in told if one["check"] == "clocks")
    assert apart.startswith("against node0: node1 ")
