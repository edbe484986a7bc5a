"""Export: one file with the model's own names, merged, verified, opened by the stock reader."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from checkpoint_cases import Heard, alone, assert_same, pieces, save_step, state

from shoal.base.errors import CheckpointError
from shoal.base.shards import Shard
from shoal.checkpoint import write
from shoal.checkpoint.export import export


def test_the_model_alone_under_its_own_names(tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    path = save_step(tmp_path, 5).path
    assert export(path, out) == out.stat().st_size
    expected = {n.removeprefix("model."): t for n, t in state(5).items() if n.startswith("model.")}
    assert_same(safetensors.torch.load_file(out), expected)


def test_slices_are_merged_and_ties_are_listed(tmp_path: Path) -> None:
    full = torch.randn(6, 4)
    boxes = (((0, 6), (0, 1)), ((0, 2), (1, 4)), ((2, 6), (1, 4)))
    flat = torch.cat([full[a:b, c:d].reshape(-1) for (a, b), (c, d) in boxes])
    shard = Shard("model.embed.weight", (6, 4), "float32", boxes)
    ties = {"model.head.weight": "model.embed.weight"}
    path = write.save(
        tmp_path, 1, [write.Piece(shard, flat)], {}, alone(), Heard(), keep=1, aliases=ties
    ).path
    out = tmp_path / "model.safetensors"
    out.write_text("an older export, replaced whole")
    export(path, out)
    with safetensors.safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        assert list(file.keys()) == ["embed.weight"]
        assert torch.equal(file.get_tensor("embed.weight"), full)

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    safetensors.torch.load_model(model, out)
    assert torch.equal(model.head.weight, full)


def test_damage_stops_an_export_and_leaves_the_old_file(tmp_path: Path) -> None:
    path, out = save_step(tmp_path, 5).path, tmp_path / "model.safetensors"
    export(path, out)
    before, file = out.read_bytes(), path / "rank-0.safetensors"
    raw = file.read_bytes().replace(state(5)["model.mask"].numpy().tobytes(), b"\2" * 9)
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"model.mask \[:\] does not match its hash"):
        export(path, out)
    assert out.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_prefix_that_nothing_has(tmp_path: Path) -> None:
    path = write.save(
        tmp_path, 1, pieces({"net.w": torch.ones(1)}), {}, alone(), Heard(), keep=1
    ).path
    with pytest.raises(CheckpointError, match=r"no tensor's name starts with 'model.'; .* net\."):
        export(path, tmp_path / "out.safetensors")
    assert export(path, tmp_path / "out.safetensors", prefix="") > 0
