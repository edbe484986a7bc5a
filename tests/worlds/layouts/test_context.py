"""Context parallelism on real processes: one process's numbers, 1/n of its activations."""

from __future__ import annotations

import sys
from typing import Any

import pytest


def long(*row: Any) -> Any:
    """A row that `make proof` runs: others hold most of it."""
    return pytest.param(*row, marks=pytest.mark.proof)


CASES: list[Any] = [
    long(2, "llama", {"cp": 2}),  # `own loss` below: loss and weights of the same layout
    long(2, "llama", {"cp": 2, "context": "gather"}),
    long(2, "dropout", {"cp": 2}),
    (2, "gpt", {"cp": 2, "context": "ring"}),
    (4, "untied", {"cp": 4}),
    long(4, "gpt", {"cp": 2, "dp_shard": 2}),
    (4, "llama", {"cp": 2, "dp_shard": 2, "zero": 2, "context": "ulysses"}),
    long(4, "dropout", {"cp": 2, "tp": 2}),
    long(4, "gpt", {"cp": 2, "tp": 2, "sequence_parallel": "off", "context": "ulysses"}),
    long(4, "dropout", {"cp": 2, "pp": 2}),
    long(4, "untied", {"cp": 2, "pp": 2, "schedule": "dualpipe"}),
    long(4, "moe", {"cp": 2, "dp_replicate": 2, "ep": 2}),
    long(4, "moe", {"cp": 2, "dp_shard": 2, "ep": 2}),
]


@pytest.mark.parametrize(("size", "model", "layout"), CASES, ids=str)
def test_equals_one_process(worlds, size: int, model: str, layout: dict[str, Any]) -> None:
    report = worlds(size).call("context_case:prove", model=model, layout=layout)[0]
    assert report["verdict"] == "equal", report["cause"] or report["reason"]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dropout", {"cp": 2, "tp": 2, "pp": 2}),
        ("gpt", {"cp": 2, "tp": 2, "dp_shard": 2}),
        ("llama", {"cp": 2, "pp": 2, "dp_shard": 2}),
    ],
    ids=str,
)
def test_with_two_more_axes_equals_one_process(worlds, model: str, layout: dict[str, Any]) -> None:
    """Each pair of axes is on four processes above; what `fsdp` does is beside all of them alike."""
    report = worlds(8).call("context_case:prove", model=model, layout=layout)[0]
    assert report["verdict"] == "equal", report["cause"] or report["reason"]


@pytest.mark.proof
@pytest.mark.parametrize("model", ["dropout", "gpt"])
def test_with_all_axes_equals_one_process(worlds, model: str) -> None:
    layout = {"cp": 2, "tp": 2, "pp": 2, "dp_shard": 2}
    report = worlds(16).call("context_case:prove", model=model, layout=layout)[0]
    assert report["verdict"] == "equal", report["cause"] or report["reason"]


def test_layers_share_tokens_and_weights_at_once(worlds) -> None:
    """Not that cp works on whole sequences beside tp: each rank has 1/4 of a layer's tokens."""
    for told in worlds(4).call("context_case:divides", layout={"cp": 2, "tp": 2}):
        assert told["notices"] == []
        assert told["tokens"] == [4 // 2]  # of 8, between layers
        assert told["heads"] == [[4, 2, 1]]  # tokens, heads and key heads in attention, of 8, 4, 2


@pytest.mark.parametrize("case", ["own loss", "other length", long("ignored"), long("recomputed")])
def test_what_a_run_may_meet_equals_one_process(worlds, case: str) -> None:
    for told in worlds(2).call("context_case:same_as_one", case=case):
        assert told["loss"] <= 1e-14
        assert told["validated"] <= 1e-14
        assert told["weights"] <= 1e-12
        whole = [line for line in told["notices"] if "runs whole on every rank for inputs" in line]
        assert bool(whole) == (case == "other length")


BESIDE = {"tp": {"cp": 2, "tp": 2}, "pp": {"cp": 2, "pp": 2}}
MET = ["other length", "ignored", "recomputed", "frozen"]
SHORT = [("tp", "recomputed"), ("pp", "ignored")]
"""What hangs on each axis most: dropout in split layers, targets on stages. Both are held here alone."""


@pytest.mark.parametrize(
    ("axis", "case"),
    [
        (axis, case) if (axis, case) in SHORT else long(axis, case)
        for axis in BESIDE
        for case in MET
    ],
)
def test_what_a_run_may_meet_beside_another_axis(worlds, axis: str, case: str) -> None:
    """Tokens that do not divide, targets on one rank only, dropout drawn again, frozen weights."""
    answers = worlds(4).call("context_case:same_as_one", case=case, layout=BESIDE[axis])
    for told in answers:
        assert told["loss"] <= 1e-14
        assert told["validated"] <= 1e-14
        assert told["weights"] <= 1e-12


def test_a_whole_layer_with_a_backward_of_its_own(worlds) -> None:
    """Its gradients are summands, which parts of several ranks must not be put together from."""
    for told in worlds(2).call("context_case:norm_whole"):
        assert any("norm runs whole on every rank" in line for line in told["notices"])
        assert told["weights"] <= 1e-12


def test_frozen_layers_share_tokens(worlds) -> None:
    for told in worlds(2).call("context_case:same_as_one", case="frozen"):
        assert told["notices"] == []
        assert told["weights"] <= 1e-12


def test_ring_sends_keys_and_values_only(worlds) -> None:
    """Per layer: two all-to-alls each way for the balance, keys and values, and their gradients."""
    told = worlds(2).call("context_case:travels", context="ring")[0]
    tokens, dim, kv_dim, width = 2 * 8, 16, 8, 4  # on a rank
    kinds = [kind for kind, _ in told["calls"]]
    assert "all_gather" not in kinds
    sends = sorted(size for kind, size in told["calls"] if kind == "send")
    part = tokens * kv_dim * width
    # forward: k, v once; backward: k, v once, their gradients twice; two layers
    assert sends == [part] * (2 * (2 + 2 + 4))
    swaps = sorted(size for kind, size in told["calls"] if kind == "all_to_all")
    half = tokens // 2 * width  # the late half of rank 0 and the early one of rank 1 stay or go
    assert swaps == sorted(2 * [half * (dim + 2 * kv_dim), half * dim] * 2)
    assert told["notices"] == []


@pytest.mark.parametrize("samples", [long(1), 2])
def test_a_rank_never_holds_more_than_two_ranks_keys_and_values(worlds, samples: int) -> None:
    """Its own among them, under a window that reaches two ranks back, and padding."""
    answers = worlds(4).call("context_case:keys_held", samples=samples)
    assert max(max(told) for told in answers) == 2.0
    assert len({len(told) for told in answers}) > 1  # rank 0 sees no rank before it


def test_gathering_is_told(worlds) -> None:
    for told in worlds(2).call("context_case:travels", context="gather"):
        assert "send" not in [kind for kind, _ in told["calls"]]
        assert any("blocks.0 (and 1 like it) gathers" in line for line in told["notices"])


@pytest.mark.parametrize(("ranks", "sequence"), [(2, 768), long(4, 1536)])
def test_activations_are_a_part_of_one_process(worlds, ranks: int, sequence: int) -> None:
    answers = worlds(ranks).call("context_case:memory", sequence=sequence)
    alone = answers[0]
    for told in answers:
        assert told["rank kept"] <= 1.1 * alone["alone kept"] / ranks
        # Tables of positions are whole.
        assert told["rank peak"] <= 1.2 * alone["alone peak"] / ranks


@pytest.mark.proof
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_a_sequence_that_one_process_cannot_hold_runs(worlds) -> None:
    """Under the same limit on every process's memory; the shares themselves are counted above."""
    answers = worlds(4).call("context_case:beyond", sequence=16384, room_mib=72)
    for told in answers:
        assert "can't allocate memory" in str(told["alone"])
        assert told["together"] == pytest.approx(answers[0]["right"], rel=1e-5)
        assert told["kept"] <= 1.1 * answers[0]["kept alone"] / 4


REFUSED = {
    "odd": ({"cp": 2}, "layout.cp = 2: Llama works on 15 tokens, which do not divide into 2 equal"),
    "mlp": ({"cp": 2}, "layout.cp = 2: no layer of Sequential can share a sequence: "),
}


def test_strict_refuses_what_would_run_whole(worlds) -> None:
    layout = {"cp": 2, "strict": True}
    for told in worlds(2).call("context_case:refused", layout=layout, kind="strict"):
        assert told.startswith("layout.cp = 2 with strict: 1 shares tokens in its parts only")
        assert told.endswith('try: strict=False, or layout={"cp": 1}')


@pytest.mark.proof  # `cp in bf16, full` in test_compositions.py
def test_products_in_bf16(worlds) -> None:
    for together, alone in worlds(2).call("context_case:in_bf16"):
        assert together == pytest.approx(alone, rel=3e-3)


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_share_are_refused(worlds, kind: str) -> None:
    layout, line = REFUSED[kind]
    for told in worlds(2).call("context_case:refused", layout=layout, kind=kind):
        assert told.startswith(line)
        assert 'try: layout={"cp": 1}' in told


BUGS = {
    "position restart": ("llama", "position restart"),
    "position restart, learnt": ("gpt", "position restart"),
    "joined twice": ("llama", "factor of cp"),
    "all differentiate": ("llama", "factor of cp"),
    "all speak": ("llama", "count of targets"),
    "not joined": ("llama", "part gradients not summed"),
    "own keys": ("llama", "forward pass"),
}
BUGS_OF_PROOF = ("position restart, learnt", "all differentiate", "joined twice", "own keys")
"""Others stay: those that test_user_clues.py reads, and positions that restart."""


@pytest.mark.parametrize("bug", [long(bug) if bug in BUGS_OF_PROOF else bug for bug in BUGS])
def test_planted_bugs_are_named(planted, bug: str) -> None:
    model, name = BUGS[bug]
    report = planted(2, "context_case:prove", model=model, layout={"cp": 2}, bug=bug)[0]
    assert report["verdict"] == "different"
    assert report["cause"]["name"] == name, report["cause"]
