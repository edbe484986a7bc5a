"""A machine measured with real processes: one document, read back as a cluster."""

from __future__ import annotations

from pathlib import Path

from shoal.forecast.machines.measured_machine import BUSY_BYTES, read_measured

KINDS = ("all_reduce", "reduce_scatter", "all_gather")


def test_all_ranks_hold_the_same_machine(worlds, tmp_path: Path) -> None:
    one, two = worlds(2).call("machine_case:measure", cache=str(tmp_path))
    assert one["first"] == two["first"] == one["second"] == two["second"]
    assert one["quiet"], "what is known is not measured again"
    assert list(one["first"]["links"]) == ["inside"]
    for kind in KINDS:
        assert [size for size, _ in one["first"]["links"]["inside"][kind]["points"]] == [
            1024,
            65536,
        ]
    cluster = read_measured(tmp_path, 2)
    assert cluster is not None
    assert (cluster.nodes, cluster.per_node, cluster.device.kind) == (1, 2, "cpu")
    measured = one["first"]["links"]["inside"]["all_reduce"]["bytes_per_s"]
    assert cluster.inside.bytes_per_s == measured / BUSY_BYTES
    assert read_measured(tmp_path, 4) is None


def test_every_collective_in_every_group_and_every_pair(worlds) -> None:
    """The same on all ranks, of the slowest of them: one is 30 ms late in one kind of one group."""
    answers = worlds(4).call("machine_case:every")
    assert all(answer == answers[0] for answer in answers)
    pairs, whole = answers[0]["groups"]
    assert (pairs["name"], pairs["at_once"]) == ("2 neighbours", 2)
    assert (whole["name"], whole["at_once"]) == ("all 4 ranks", 1)
    for group in (pairs, whole):
        assert list(group["links"]) == [*KINDS, "broadcast", "all_to_all"]
        for kind in group["links"].values():
            assert [point["bytes"] for point in kind["points"]] == [1024, 65536]
            off = [abs(p["model_s"] / p["median_s"] - 1) for p in kind["points"]]
            assert abs(sum(off) / len(off) - kind["error"]) < 1e-9
    assert min(point["median_s"] for point in pairs["links"]["broadcast"]["points"]) >= 0.03
    assert min(point["best_s"] for point in whole["links"]["broadcast"]["points"]) < 0.03
    assert len(answers[0]["pairs"]) == 6


def test_every_axis_has_its_own_links(worlds) -> None:
    answers = worlds(4).call("machine_case:axes")
    assert all(answer == answers[0] for answer in answers)
    for axis in ("across", "inside"):
        assert answers[0][axis]["ranks"] == 2
        assert all(answers[0][axis][kind]["bytes_per_s"] > 0 for kind in KINDS)
