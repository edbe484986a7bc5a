"""Planted bugs in models too large for memory: tensors in files, and one block of each kind.

The limits are those of small models, put at 0: what is asked is that every cause has its evidence.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shoal.proof import reference_limits, tensor_spill
from shoal.proof.reduced_model import cut_blocks, cuts_text
from shoal.view.proof_lines import verdict_line

DATA, DIVIDED = "planted:prove", "planted_divided:prove"
PLAIN = {"tp": 2, "sequence_parallel": "off"}


def some(rows: list[Any], short: tuple[str, ...]) -> list[Any]:
    """Rows, of which `make test` takes those with one of these bugs."""
    marks = [[] if row[1]["bug"] in short else [pytest.mark.proof] for row in rows]
    return [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks, strict=True)]


FILED_SHORT = ("batch norm drift", "dropped")
"""What evidence is found in: buffers, as weights, and micro-batches again."""
CUT_SHORT = ("row bias",)

# what is asked, name of the cause
FILED: list[tuple[str, dict[str, Any], str]] = [
    (DATA, {"bug": "mean of means", "case": "mlp"}, "mean of means"),
    (DATA, {"bug": "short window", "case": "mlp"}, "last short window"),
    (DATA, {"bug": "frozen updated", "case": "mlp"}, "frozen parameter moved"),
    (DATA, {"bug": "optimizer first", "case": "mlp"}, "optimizer over other tensors"),
    (DATA, {"bug": "norm of a half", "case": "mlp"}, "norm of a local shard"),
    (DATA, {"bug": "batch norm drift", "case": "cnn"}, "BatchNorm drift"),
    (DATA, {"bug": "stale shard", "case": "mlp", "layout": "zero1"}, "stale shard"),
    (DIVIDED, {"bug": "backward not summed", "model": "gpt", "layout": PLAIN},
     "missing backward reduction"),
    (DIVIDED, {"bug": "dropped", "model": "gpt", "layout": {"pp": 2}}, "micro-batch dropped"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "asked", "cause"), some(FILED, FILED_SHORT), ids=[f[1]["bug"] for f in FILED]
)
def test_a_planted_bug_is_named_from_files(worlds, what, asked, cause) -> None:
    told = worlds(2).call(what, **asked, in_files=True)[0]
    assert told["verdict"] == "different"
    assert told["cause"]["name"] == cause, told["cause"]["text"]


CUT: list[tuple[str, dict[str, Any], str]] = [
    (DATA, {"bug": "mean of means", "case": "gpt"}, "mean of means"),
    (DATA, {"bug": "tie twice", "case": "gpt"}, "tie counted twice"),
    (DIVIDED, {"bug": "backward not summed", "model": "deep", "layout": PLAIN},
     "missing backward reduction"),
    (DIVIDED, {"bug": "row bias", "model": "deep", "layout": {"tp": 2}},
     "row bias on every rank"),
    (DIVIDED, {"bug": "qkv in one", "model": "deep", "layout": {"tp": 2}},
     "fused weight cut wrongly"),
    (DIVIDED, {"bug": "joined twice", "model": "deep", "layout": {"tp": 2}}, "factor of tp"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "asked", "cause"), some(CUT, CUT_SHORT), ids=[c[1]["bug"] for c in CUT]
)
def test_a_planted_bug_is_named_by_blocks(worlds, what, asked, cause) -> None:
    told = worlds(2).call(what, **asked, by_blocks=True)[0]
    assert told["verdict"] == "different"
    assert verdict_line(told).startswith("different, by blocks: ")
    assert told["cause"]["name"] == cause, told["cause"]["text"]
    names = {p["name"] for p in told["trajectories"][0]["parameters"]}
    assert any(name.startswith("blocks.1.") for name in names)
    assert not any(name.startswith("blocks.2.") for name in names)


@pytest.mark.parametrize(
    ("layout", "kept"),
    [
        pytest.param({"tp": 2}, 2, marks=pytest.mark.proof),  # `row bias` is found by blocks above
        ({"pp": 2, "chunks": 1}, 2),
    ],
    ids=["tp", "pp"],
)
def test_what_was_not_seen_is_told(worlds, layout: dict[str, int], kept: int) -> None:
    (told, *_) = worlds(2).call(
        DIVIDED, bug="nothing", model="untied", layout=layout, by_blocks=True, in_files=True
    )
    assert told["verdict"] == "equal"
    assert verdict_line(told).startswith("equal, by blocks: ")
    assert told["said"] == [
        f"by blocks: the first {kept} of 4 in blocks (1 kind) and both ends; not seen: the other "
        f"{4 - kept} blocks, the last block's output at the head, and what comes of depth"
    ]


class Block(nn.Module):
    """Blocks of one class, alike in their layers, that differ in a word or in what is set."""

    def __init__(self, kind: str = "full", window: int | None = None, place: int = 0) -> None:
        super().__init__()
        self.kind, self.window, self.place = kind, window, place
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("blocks", "kept"),
    [
        ([Block(place=i) for i in range(6)], 2),
        ([Block("slides" if i % 4 else "full") for i in range(8)], 2),
        ([Block(window=None if i == 3 else 8) for i in range(9)], 4),
        ([Block(), *(Block("full", 8) for _ in range(2))], 2),
    ],
    ids=["alike", "words", "the fourth is another", "one left out"],
)
def test_one_of_each_kind_stays(blocks: list[nn.Module], kept: int) -> None:
    model = nn.ModuleDict({"ends": nn.Linear(2, 2), "blocks": nn.ModuleList(blocks)})
    (cut,) = cut_blocks(model, 2)
    assert (cut.name, cut.kept, cut.of) == ("blocks", kept, len(blocks))
    assert list(model["blocks"]) == blocks[:kept]


def test_layers_one_after_another_are_no_blocks() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh())
    unlike = nn.Sequential(Block("a"), Block("b"), Block("c"))
    assert cut_blocks(nn.ModuleList([layers, unlike]), 1) == []
    assert (len(layers), len(unlike)) == (4, 3)
    assert cuts_text([]) == "by blocks: the model has no repeated blocks, so it is the whole"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_shelf_gives_back_the_bits(tmp_path, monkeypatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(tensor_spill, "IN_MEMORY_BYTES", 20)
    kept = tensor_spill.TensorSpill(tmp_path)
    given = {
        "first": torch.arange(2).to(dtype), "turned": torch.arange(12).view(3, 4).t().to(dtype),
        "one": torch.tensor(3).to(dtype), "none": torch.zeros(0, 2).to(dtype),
    }  # fmt: skip
    found = kept.keep(given.items())
    later = kept.keep([("later", torch.ones(5))])
    for tensor in given.values():
        tensor.zero_()  # what was put stays as it was
    assert torch.equal(found["turned"], torch.arange(12).view(3, 4).t().to(dtype))
    assert torch.equal(later["later"], torch.ones(5))
    assert (found["one"], found["none"].shape) == (3, (0, 2))
    assert found["first"].tolist() == [0, 1]
    assert list(tmp_path.iterdir()) == [], "its file has no name"


def test_room_is_foreseen(tmp_path, monkeypatch) -> None:
    """For ddp every process holds all of it, under tp2 each a half, one process comes before."""
    free = SimpleNamespace(available=16 * 100)
    monkeypatch.setattr(reference_limits.psutil, "virtual_memory", lambda: free)
    sizes = [50] * 2
    for layout, most in (("ddp", 2), ({"tp": 2}, 1), ({"dp_shard": 2, "zero": 3}, 1)):
        room = reference_limits.ProofResources(
            2, reference_limits.ranks_sharing(layout, 2), 5, tmp_path
        )
        needed = most * reference_limits.STATES * 100 + reference_limits.GATHERED * 50
        free.available = needed
        assert room.find_shortage(sizes) == ""
        free.available = needed - 1
        assert room.find_shortage(sizes).startswith(
            "memory: one process, and after it 2 of the layout"
        )
    free.available = 2**60
    disk = SimpleNamespace(free=7 * 2**30 - 1)
    monkeypatch.setattr(reference_limits.shutil, "disk_usage", lambda folder: disk)
    assert room.find_shortage([2**30]).startswith(
        "disk: what one process computes in 5 steps takes 7"
    )
    disk.free += 1
    assert room.find_shortage([2**30]) == ""
