"""Compressed gradients between real processes: nothing is lost, nothing differs, bytes are true."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from netns import told_by
from shoal.base.text.argument_names import use_argument_names
from shoal.fabric.compressed.compressed_sums import CODES

DEADLINE_S = 400
DDP = ("int8", "one-bit", "powersgd:2", "topk:0.05")
ALL = [(codec, "ddp") for codec in DDP] + [
    (codec, layout) for codec in CODES for layout in ("zero1", "zero2", "fsdp")
]
LONG = [("topk:0.05", "ddp"), ("int8", "zero1"), ("one-bit", "zero1")]


def some(rows: list[Any], long: list[Any]) -> list[Any]:
    """Rows, of which `make proof` runs the long ones: others hold most of them."""
    return [pytest.param(*row, marks=[pytest.mark.proof] if row in long else []) for row in rows]


IN_FP64 = [(codec, layout) for codec in CODES for layout in ("ddp", "zero1", "zero2", "fsdp")]
"""Held under every layout by the sums in fp64, to more digits; here one row stays."""
TELESCOPED = some(ALL, [row for row in IN_FP64 if row != ("int8", "zero2")])
SKIPPED = some(
    ALL,
    [*LONG, *((codec, layout) for codec in CODES for layout in ("ddp", "zero2")), ("int8", "fsdp")],
)


@pytest.mark.parametrize(("codec", "layout"), TELESCOPED)
def test_decoded_sums_and_what_is_kept_make_the_true_sums(worlds, codec: str, layout: str) -> None:
    """Over 12 steps of two micro-batches; and what is kept is not nothing."""
    told = worlds(4).call("compress_case:telescope", compress=codec, layout=layout, micro_batches=2)
    assert told[0]["buckets"] == (3 if layout != "fsdp" else 6)
    assert max(one["apart"] for one in told) <= 1e-6  # fp32: rounding of 12 additions
    assert min(one["without"] for one in told) >= 1e-5
    assert len({one["digest"] for one in told}) == 1, "weights differ between ranks"


@pytest.mark.parametrize(
    ("codec", "ranks"),
    some([(codec, ranks) for codec in CODES for ranks in (2, 4)],
         [("int8", 4), *((codec, 2) for codec in CODES)]),
)  # fmt: skip
def test_in_fp64_they_make_them_to_the_last_digits(worlds, codec: str, ranks: int) -> None:
    """Rows, vectors and buckets that no number of ranks divides, under every layout."""
    for layout in ("ddp", "zero1", "zero2", "fsdp"):
        told = worlds(ranks).call(
            "compress_case:telescope", compress=codec, layout=layout, precision="fp64", steps=3
        )
        assert max(one["apart"] for one in told) <= 1e-14, layout
        assert min(one["without"] for one in told) >= 1e-4, layout


def test_owners_of_unequal_parts_and_of_nothing(worlds) -> None:
    """As for optimizers that step whole parameters, each of which has one owner."""
    for codec in CODES:
        told = worlds(4).call("compress_case:uneven", code=codec)
        assert [one["own"] for one in told] == [0, 501, 0, 803]
        assert max(one["apart"] for one in told) <= 1e-13
        assert told[1]["far"] > 0
        assert codec != "int8" or all(one["far"] <= one["bound"] for one in told)


@pytest.mark.parametrize(("codec", "layout"), SKIPPED)
def test_a_skipped_step_leaves_no_trace(worlds, codec: str, layout: str) -> None:
    """Rank 1's gradient breaks: all skip, keep what they kept, and go on as if it had not been."""
    told = worlds(4).call("compress_case:skip", compress=codec, layout=layout)
    for one in told:
        assert one["skipped"] == [True]
        assert one["kept"] == [True]
        assert one["finite"]
        assert len(set(one["digests"])) == 1
    assert len({one["digests"][0] for one in told}) == 1


OTHERS: dict[str, tuple[dict[str, str], str]] = {
    "fsdp": ({"layout": "zero2"}, "layout was fsdp (dp_shard = 2), is zero2 (dp_shard = 2)"),
    "zero2": ({"compress": "one-bit"}, "compress was int8, is one-bit"),
    "ddp": ({"layout": "fsdp"}, "layout was ddp (dp_replicate = 2), is fsdp (dp_shard = 2)"),
}
RESUMED = [("int8", "zero2"), ("one-bit", "fsdp"), ("int8", "ddp"), ("powersgd:2", "ddp"),
           ("one-bit", "zero1"), ("int8", "fsdp")]  # fmt: skip


@pytest.mark.parametrize(("codec", "layout"), some(RESUMED, [RESUMED[0], RESUMED[2], *RESUMED[4:]]))
def test_what_is_left_survives_a_resume(worlds, codec: str, layout: str, tmp_path: Path) -> None:
    """Bit for bit on the same layout; on another, or in another code, it is told that it is lost."""
    other, said = OTHERS.get(layout, OTHERS["ddp"])
    if codec.startswith("powersgd"):
        other, said = {"layout": "fsdp", "compress": "int8"}, "compress was powersgd:2, is int8"
    folder = str(tmp_path / "run")
    answers = worlds(2).call(
        "compress_case:resume", compress=codec, layout=layout, other=other, folder=folder
    )
    for told in answers:
        assert min(told["kept"]) > 0
        assert told["resumed"] == told["straight"] != told["forgot"]
        assert told["resumed said"] == told["forgot said"] == ""
        assert told["lost"].startswith(f"layout.compress = {other.get('compress', codec)}: what ")
        assert "of earlier steps is lost, once: " in told["lost"]
        assert said in told["lost"] or layout == "zero1"
        assert told["zero"]
    assert answers[0]["straight"] == answers[1]["straight"]


@pytest.mark.parametrize("code", CODES)
def test_sums_are_those_of_another_author(worlds, code: str) -> None:
    """In fp64, four steps, both errors fed back, blocks that begin anew inside of parts."""
    for scattered in (False, True):
        for apart in worlds(4).call(
            "compress_case:against_reference", code=code, scattered=scattered
        ):
            assert apart <= 1e-13


@pytest.mark.parametrize(
    ("code", "layout"),
    some(
        warm := [
            ("one-bit:3", "ddp"),
            ("one-bit", "fsdp"),
            ("one-bit:3", "zero2"),
            ("one-bit", "zero1"),
        ],
        warm[2:],
    ),
)
def test_first_steps_travel_in_int8(worlds, code: str, layout: str, tmp_path: Path) -> None:
    """Three of them, or a third of nine; counted on through a resume, also by another number."""
    for told in worlds(2).call(
        "compress_case:warm", compress=code, layout=layout, folder=str(tmp_path / "run")
    ):
        early, late = told["int8"][-1], told["one-bit:0"][-1]
        assert early > late
        # The first step of a run says more: its batches, and that something moved.
        assert told[code][1:] == [early, early, late, late]
        assert told["resumed"][1:] == [late, late]
        assert min(told[code][0], told["resumed"][0]) >= early
        assert told["dropped"] == ""


def test_a_third_of_an_unknown_length_is_refused_on_every_rank(worlds) -> None:
    for told in worlds(2).call("compress_case:endless"):
        assert told == (
            "compress = one-bit: the first third of the run's steps travels in int8, and "
            "nobody said how many it has; try: total_steps=…, or compress=one-bit:100"
        )


def expected_bytes(
    codec: str, layout: str, buckets: list[int], starts: list[list[list[int]]], ranks: int
) -> float:
    """Of one rank, by what the module's docstring promises; for the bare model of the case."""
    hops = (ranks - 1) / ranks
    if codec in CODES:
        halves = 2 if layout == "ddp" else 1
        codes = CODES[codec](torch.float32)
        # fsdp has one unit here, of which each rank has so many rows of everything
        parts = buckets if layout != "fsdp" else [ranks * (600 + 8 * 50 + 4 * 72 + 10 + 4)]
        sizes = []
        for elements, of_parts in zip(parts, starts, strict=True):
            part = -(-elements // ranks)
            ends = [[0, *anew, part] for anew in of_parts]
            found = [[codes.size_bytes(b - a) for a, b in pairwise(one)] for one in ends]
            sizes.append(max(map(sum, found)))
            assert any(of_parts), "no parameter begins inside of a block"
        return sum(halves * hops * ranks * size for size in sizes)
    if codec.startswith("topk"):
        return sum((ranks - 1) * 8 * -(-n // 20) for n in buckets)
    thin = 2 * ((40 + 60) + (30 + 50) + (16 + 72))  # the 3 × 4 matrix is small enough as it is
    return 2 * hops * 4 * (thin + 37 + 1 + 12)


COUNTED = [("one-bit", "ddp"), ("int8", "zero1"), ("one-bit", "zero2"), ("int8", "fsdp")]
"""Bytes for `make proof`: each code and each layout is in another row."""


@pytest.mark.parametrize(("codec", "layout"), some(ALL, COUNTED))
def test_bytes_counted_are_bytes_given_to_collectives(worlds, codec: str, layout: str) -> None:
    for told in worlds(4).call("compress_case:sent", compress=codec, layout=layout):
        assert told["counted"] == sum(size for _, size in told["given"])
        of_gradients = told["given"][:-1]  # the last is the step's own numbers
        if codec in CODES:
            of_gradients = [one for one in of_gradients if one[0] != "all_reduce"]
        if layout == "fsdp":  # whose weights are gathered as ever
            of_gradients = [one for one in of_gradients if one[0] != "all_gather"]
        gradients = sum(size for _, size in of_gradients)
        assert gradients == expected_bytes(codec, layout, told["buckets"], told["starts"], 4)


TRAINED = [("int8", "ddp", 0.01), ("int8", "zero2", 0.01), ("powersgd:8", "ddp", 0.05),
           ("topk:0.1", "ddp", 0.05)]  # fmt: skip


@pytest.mark.proof  # that no part of a sum is lost is held above, step by step
@pytest.mark.parametrize(("codec", "layout", "tolerance"), TRAINED)
def test_training_arrives_where_it_would(
    worlds, codec: str, layout: str, tolerance: float, plain: float
) -> None:
    """int8's error of a step is 0.5 %; the others deliver a tenth of a gradient, so they lag."""
    told = worlds(2).call("compress_case:train", compress=codec, layout=layout, steps=100)
    assert told[0]["loss"] == pytest.approx(plain, rel=tolerance)
    assert len({one["digest"] for one in told}) == 1


@pytest.fixture(scope="module")
def plain(worlds) -> float:
    """The loss without compression: far below the first one."""
    told = worlds(2).call("compress_case:train", compress="none", layout="ddp", steps=100)[0]
    assert told["loss"] < 0.3 * told["first"]
    return told["loss"]


@pytest.mark.proof  # what is kept is not nothing: `without` above
def test_it_is_error_feedback_that_does_it(worlds, plain: float) -> None:
    told = worlds(2).call(
        "compress_case:train", compress="topk:0.1", layout="ddp", steps=100, forget=True
    )
    assert told[0]["loss"] > 1.07 * plain


@pytest.mark.proof  # that no part of a sum is lost is held above
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_one_bit_learns_and_lags(worlds, plain: float, layout: str) -> None:
    """After 100 steps by a quarter here; on real text, and with first steps in int8: compress.md."""
    told = worlds(2).call("compress_case:train", compress="one-bit", layout=layout, steps=100)
    assert plain < told[0]["loss"] < 0.35 * told[0]["first"]
    assert len({one["digest"] for one in told}) == 1


@pytest.mark.parametrize(
    ("codec", "layout", "said"),
    [
        ("topk", "fsdp", "layout.compress = topk: fsdp cuts gradients where no matrix ends and "
         "gives each rank its part only, which codes number by number carry; try: "
         "layout.compress=int8, or layout.strategy=ddp"),
        ("int4", "ddp", "layout.compress = int4: not one of none, int8, one-bit, powersgd, topk; "
         "try: int8"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_on_every_rank(worlds, codec: str, layout: str, said: str) -> None:
    for told in worlds(2).call("compress_case:refused", compress=codec, layout=layout):
        assert told.endswith(use_argument_names(said))
        assert "\n" not in told


KERNEL = [(2, "int8", "zero2"), (4, "none", "ddp"), (4, "int8", "ddp"), (4, "powersgd:4", "ddp"),
          (4, "topk:0.01", "ddp"), (4, "one-bit", "ddp"), (4, "int8", "fsdp"),
          (4, "one-bit", "fsdp"), (4, "one-bit", "zero2")]  # fmt: skip


@pytest.fixture(scope="module")
def counted() -> dict[Any, dict[str, Any]]:
    """A step of 36 MiB of gradients in a network namespace of its own, per case."""
    requests = [[n, {"compress": codec, "layout": layout}] for n, codec, layout in KERNEL]
    told = told_by(
        "in_namespace.py", "compress_case:measure", json.dumps(requests),
        what="bytes on the wire NOT MEASURED", deadline_s=DEADLINE_S,
    )  # fmt: skip
    return dict(zip(KERNEL, told, strict=True))


@pytest.mark.parametrize("case", KERNEL, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.proof
def test_the_kernel_counts_the_same(counted: dict[Any, Any], case: tuple[int, str, str]) -> None:
    """Within 2 %, or 512 KiB where codes are so few that headers and a barrier show."""
    told, ranks = counted[case], case[0]
    assert told["kernel"] == pytest.approx(ranks * told["counted"], rel=0.02, abs=2**19)


@pytest.mark.proof
def test_codes_are_as_small_as_promised(counted: dict[Any, Any]) -> None:
    whole = counted[4, "none", "ddp"]["kernel"]
    assert counted[4, "int8", "ddp"]["kernel"] < 0.26 * whole
    assert counted[4, "powersgd:4", "ddp"]["kernel"] < 0.02 * whole
    assert counted[4, "topk:0.01", "ddp"]["kernel"] < 0.05 * whole
