"""A model is built once per machine: with the bits of a plain build, and at the cost of one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from worlds import Members, close_all

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="weights are handed on by /proc, which Linux has"
)


def long(*row: Any) -> Any:
    """A row that `make proof` runs: others hold most of it."""
    return pytest.param(*row, marks=pytest.mark.proof)


SHARED = ["own", "gpt", "moe", "resnet", "transformers", "normed"]
ALONE = {
    "reads": "RuntimeError: Tensor.item() cannot be called on meta tensors",
    "keeps": "it keeps tensors that are no parameters and no buffers",
    "talks": "ForbiddenCollective: barrier at build_case.py",
    "odd": "links is a sparse_coo tensor",
    "recurrent": "it keeps parameters in ways that torch cannot follow (weak references, as in an",
}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, 2 if name == "transformers" else 4) for name in SHARED),
        *(long(name, 4 if name == "transformers" else 2) for name in SHARED),
    ],
)
def test_one_rank_builds_and_all_have_the_bits_of_a_plain_build(
    worlds: Any, name: str, ranks: int
) -> None:
    if name == "transformers":
        pytest.importorskip("transformers")
    for rank, told in enumerate(worlds(ranks).call("build_case:built", name=name)):
        assert told["apart"] == []
        assert told["lines"] == []
        assert told["asked"] == ["meta" if rank else "cpu"]
        assert told["ties"]
        assert told["kept"]
        assert told["alone"], "a rank sees what another one wrote"


def test_other_threads_may_open_files_while_ranks_map_them(worlds: Any) -> None:
    """Of a process that may open few, while the files of its weights wait for the last rank.

    A run's meeting thread and loaders do. Who got the last number had its luck: the other one, the
    rank that builds, went on without its run's other ranks, which waited for it in a collective.
    """
    asked = {"name": "normed", "late_s": 0.3, "busy": True, "deadline_s": 40}
    for told in worlds(2).call("build_case:built", **asked):
        assert told["unopened"] == []
        assert told["lines"] == []
        assert told["apart"] == []


FAMILIES = {
    **dict.fromkeys(("llama", "gpt2", "qwen2", "qwen3", "gemma2", "gpt_neox"), ""),
    **dict.fromkeys(("mistral", "phi", "opt", "bloom"), ""),
    **dict.fromkeys(("mixtral", "olmoe"), ".mlp.experts."),
}
"""Of transformers, and in the names of which tensors their loading merges several of the files."""
SHORT = ("llama", "gpt2", "mixtral")
"""Linear layers, layers whose weights lie the other way, merged experts."""


@pytest.mark.parametrize("kind", [kind if kind in SHORT else long(kind) for kind in FAMILIES])
def test_a_checkpoint_of_transformers_is_mapped_where_it_lies(
    worlds: Any, tmp_path: Any, kind: str
) -> None:
    """`from_pretrained` in a builder, tied weights and merged experts among them."""
    pytest.importorskip("transformers")
    asked = {"name": "pretrained", "checkpoint": str(tmp_path), "kind": kind}
    for rank, told in enumerate(worlds(2).call("build_case:built", **asked)):
        assert told["lines"] == []
        assert told["apart"] == []
        assert told["asked"] == ["meta" if rank else "cpu"]
        assert told["ties"]
        assert told["files"] > 2
        assert bool(told["made"]) == bool(FAMILIES[kind])
        assert all(FAMILIES[kind] in name for name in told["made"])


@pytest.mark.parametrize("layout", ["fsdp", long({"tp": 2}), long({"pp": 2})], ids=str)
def test_a_rank_reads_its_share_of_a_checkpoint(worlds: Any, tmp_path: Any, layout: Any) -> None:
    """Of files that are on the disk alone; the machine reads no page twice.

    A look at the model, where a layout is derived from it, reads one block and what is beside the
    blocks. Parts of rows that are shorter than a few pages are read as whole rows, by one of tp's
    ranks. Headers, and each tensor's first page, are read by the rank that builds.
    """
    pytest.importorskip("transformers")
    if os.stat(tmp_path).st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("temporary files are in memory here, and nothing is read from a disk")
    ranks = worlds(2).call("build_case:read", layout=layout, folder=str(tmp_path))
    for told in ranks:
        assert told["weights"] > 120 * 2**20
        assert told["files"] > 5
        assert told["apart"] == []
        assert told["lines"] == []
        looked = 0 if layout == "fsdp" else told["block"] + told["beside"]
        assert told["read"] <= 1.05 * told["share"] + looked + told["narrow"], told
        assert bool(told["narrow"]) == ("tp" in layout)
    assert 0.9 < sum(told["read"] for told in ranks) / ranks[0]["weights"] <= 1.01


def test_weights_of_another_format_are_read_once_per_machine_and_named(
    worlds: Any, tmp_path: Any
) -> None:
    pytest.importorskip("transformers")
    asked = {"layout": "fsdp", "folder": str(tmp_path), "dtype": "bfloat16", "parts": {"tiny": 2}}
    for told in worlds(2).call("build_case:read", **asked):
        assert told["apart"] == []
        (line,) = told["lines"]
        assert "as the model holds them (another format, merged, or missing), first: inner." in line
        assert "one process of each machine reads those whole" in line


@pytest.mark.parametrize("name", list(ALONE))
def test_a_builder_that_needs_values_is_run_by_every_rank_and_named(worlds: Any, name: str) -> None:
    for told in worlds(2).call("build_case:built", name=name):
        assert told["apart"] == []
        assert told["asked"][-1] == "cpu"
        (line,) = told["lines"]
        assert "processes build all of it for themselves, " in line
        assert ALONE[name] in line


@pytest.mark.parametrize("name", ["gpt", "odd"])
def test_a_small_model_is_built_by_every_rank_without_a_word(worlds: Any, name: str) -> None:
    for told in worlds(2).call("build_case:built", name=name, least_bytes=2**30):
        assert told["apart"] == []
        assert told["lines"] == []
        assert told["asked"] == ["cpu"]


def test_a_builder_that_breaks_says_so_on_every_rank(worlds: Any) -> None:
    for told in worlds(2).call("build_case:built", name="breaks"):
        assert told["failed"].startswith("UserError: model: the builder raised ValueError: no such")


LEGS: tuple[Any, ...] = ({"tp": 2, "pp": 2}, "fsdp", {"pp": 2, "dp_shard": 2}, {"tp": 4}, {"pp": 4})
"""A run goes on over these, and each is built with the bits of a plain build there."""
FEW_LEGS = ({"tp": 2}, {"pp": 2}, "fsdp")
"""On two ranks, for `make test`."""


@pytest.mark.parametrize(
    "layout",
    [
        *(
            long(layout)
            for layout in (
                *("hsdp", {"pp": 2, "dp_shard": 2}),
                *LEGS[:2],
                *LEGS[3:],
                {"tp": 2, "dp_shard": 2},
                {"ep": 2, "dp_replicate": 4},
                {"ep": 2, "dp_shard": 4},
            )
        ),
    ],
    ids=str,
)
def test_a_run_starts_and_learns_as_from_plain_builds(worlds: Any, layout: Any) -> None:
    """`make test` compares the start under three layouts, below."""
    ask = worlds(4).call
    shared = ask("build_case:started", layout=layout, least_bytes=0)
    plain = ask("build_case:started", layout=layout, least_bytes=2**40)
    assert shared == plain
    for told in shared:  # a device is given what the rank keeps; under zero 3 unit by unit
        rows = "fsdp" in layout or "hsdp" in layout or "dp_shard" in layout
        assert told["moved"] == ([] if rows else [told["held"]])


@pytest.mark.parametrize(("ranks", "legs"), [(2, FEW_LEGS), long(4, LEGS)], ids=["2", "4"])
def test_runs_go_on_and_export_whatever_their_layouts(
    worlds: Any, tmp_path: Any, ranks: int, legs: tuple[Any, ...]
) -> None:
    """Each is built once per machine, and takes over what another layout saved."""
    ask, folder = worlds(ranks).call, str(tmp_path)
    whole = ask("build_case:started", layout="ddp", least_bytes=2**40)[0]
    before: dict[str, str] = {}
    for layout in legs:
        told = ask("build_case:started", layout=layout, least_bytes=0, folder=folder)
        for leg in told:
            assert leg["built"] == whole["start"]
            rows = "fsdp" in layout or "dp_shard" in layout
            assert leg["moved"] == ([] if rows else [leg["held"]])
            assert leg["found"] == bool(before)
            assert leg["start"] == (before or whole["start"])
            assert leg["exported"] == leg["end"]
        before = told[0]["end"]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, {"dp_shard": 2}), long(4, {"dp_shard": 4}), long(4, {"tp": 2, "dp_shard": 2})],
    ids=str,
)
def test_files_of_weights_go_while_units_are_cut(worlds: Any, ranks: int, layout: Any) -> None:
    """Else a machine holds the whole model beside all that its ranks make of it."""
    for first, *after in worlds(ranks).call("build_case:in_files", layout=layout):
        assert first > 0
        assert after == sorted(after, reverse=True)
        assert after[len(after) // 2] < 0.7 * first
        assert after[-1] == 0


@pytest.fixture
def fresh(tmp_path: Any) -> Iterator[Members]:
    """Four processes whose heaps nobody else has filled and freed, nor will find so."""
    members = Members(4, tmp_path)
    yield members
    close_all([members])


@pytest.mark.proof  # what a start holds: test_peak.py, and of files the test above
@pytest.mark.parametrize("layout", ["fsdp", {"pp": 2, "dp_shard": 2}], ids=str)
def test_a_start_holds_a_share_and_two_units(fresh: Members, layout: Any) -> None:
    """Gathered flat and as parameters; holes in the C heap vary. With all weights it was thrice this."""
    fresh.call("build_case:started", layout=layout, least_bytes=2**40)
    for told in fresh.call("build_case:held", layout=layout):
        share, mib = told["weights"] / 4, 2**20
        assert told["weights"] > 290 * mib
        assert told["peak"] < share + 2 * told["unit"] + 110 * mib, told
        assert told["after"] < share + 90 * mib, told
