"""Export: one file with the model's own names, merged, verified, opened by the stock reader."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from checkpoint_cases import Heard, alone, assert_same, pieces, save_step, state

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.export import export_folder as folder_export
from shoal.checkpoint.export.export_file import export_file
from shoal.checkpoint.export.export_folder import export_folder
from shoal.checkpoint.save import write


def test_the_model_alone_under_its_own_names(tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    path = save_step(tmp_path, 5).path
    assert export_file(path, out) == out.stat().st_size
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
    export_file(path, out)
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
    export_file(path, out)
    before, file = out.read_bytes(), path / "rank-0.safetensors"
    raw = file.read_bytes().replace(state(5)["model.mask"].numpy().tobytes(), b"\2" * 9)
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"model.mask \[:\] does not match its hash"):
        export_file(path, out)
    assert out.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_prefix_that_nothing_has(tmp_path: Path) -> None:
    path = write.save(
        tmp_path, 1, pieces({"net.w": torch.ones(1)}), {}, alone(), Heard(), keep=1
    ).path
    with pytest.raises(CheckpointError, match=r"no tensor's name starts with 'model.'; .* net\."):
        export_file(path, tmp_path / "out.safetensors")
    assert export_file(path, tmp_path / "out.safetensors", prefix="") > 0


def test_a_folder_of_files_no_larger_than_asked(tmp_path: Path) -> None:
    path = save_step(tmp_path, 5).path
    expected = {n.removeprefix("model."): t for n, t in state(5).items() if n.startswith("model.")}
    sizes = sorted(t.numel() * t.element_size() for t in expected.values())
    written = export_folder(path, tmp_path / "out", shard_bytes=sizes[-1])
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 1
    assert [file.name for file in files] == [
        f"model-{k:05}-of-{count:05}.safetensors" for k in range(1, count + 1)
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(sizes)}
    found: dict[str, torch.Tensor] = {}
    for file in files:
        held = safetensors.torch.load_file(file)
        assert {index["weight_map"][name] for name in held} == {file.name}
        assert sum(t.numel() * t.element_size() for t in held.values()) <= sizes[-1]
        found |= held
    assert_same(found, expected)
    assert written.size_bytes == sum(file.stat().st_size for file in files)
    assert not written.has_config


def test_what_an_export_may_replace(tmp_path: Path) -> None:
    path, out = save_step(tmp_path, 5).path, tmp_path / "out"
    out.mkdir()
    export_folder(path, out, shard_bytes=1)  # an empty folder
    assert len(list(out.glob("*.safetensors"))) > 1
    export_folder(path, out)  # an earlier export: nothing of it is left
    assert sorted(file.name for file in out.iterdir()) == ["model.safetensors"]
    (out / "notes.md").touch()
    with pytest.raises(ConfigError) as caught:
        export_folder(path, out)
    assert str(caught.value) == (
        f"{out}: holds notes.md, which no export wrote, and would be replaced whole; try: a "
        f"folder that is new, empty or an earlier export"
    )
    (out / "notes.md").unlink()
    safetensors.torch.save_file({"w": torch.ones(1)}, out / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds model\.safetensors, which no export wrote"):
        export_folder(path, out)
    (out / "model.safetensors").unlink()
    (out / "config.json").touch()
    with pytest.raises(ConfigError, match=r"holds config\.json, which no export wrote"):
        export_folder(path, out)
    with pytest.raises(ConfigError, match="is a file; try: .*config.json.safetensors"):
        export_folder(path, out / "config.json")


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    path = save_step(tmp_path, 5).path
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for _ in range(2):
        export_folder(path, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "model.safetensors").is_file()


@pytest.mark.parametrize("earlier", [True, False])
def test_a_folder_that_cannot_be_finished_leaves_what_was_there(
    tmp_path: Path, earlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    out = tmp_path / "out"
    record = {"transformers": {}}
    path = write.save(root, 5, pieces(state(5)), record, alone(), Heard(), keep=1).path
    if earlier:
        export_folder(path, out)
    before = {file.name: file.read_bytes() for file in out.iterdir()} if earlier else {}

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "run" / "hub").mkdir()
    (tmp_path / "run" / "hub" / "config.json").write_text("{}")
    monkeypatch.setattr(folder_export.shutil, "copyfile", fail)  # the weights are written by then
    with pytest.raises(OSError, match="No space left"):
        export_folder(path, out)
    assert out.exists() == earlier
    assert before == ({file.name: file.read_bytes() for file in out.iterdir()} if earlier else {})
    assert sorted(p.name for p in tmp_path.iterdir()) == (["out", "run"] if earlier else ["run"])


def test_a_killed_export_leaves_no_folder_of_that_name(tmp_path: Path) -> None:
    """Killed between the weights and their configuration: the name is not there."""
    path = save_step(tmp_path, 5).path
    script = (
        "import os, signal, sys; from pathlib import Path; "
        "from shoal.checkpoint.export import export_folder as it; "
        "it._write_companion_files = lambda *_: os.kill(os.getpid(), signal.SIGKILL); "
        "it.export_folder(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", script, path, out], timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    (half,) = tmp_path.glob("out.tmp-*")
    assert (half / "model.safetensors").exists(), "it was killed where this test wants it"
    export_folder(path, out)
    assert (out / "model.safetensors").exists()


def test_a_configuration_says_the_format_of_the_weights(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    hub = tmp_path / "run" / "hub"
    hub.mkdir()
    told = {"model_type": "x", "torch_dtype": "bfloat16", "text_config": {"model_type": "y"}}
    (hub / "config.json").write_text(json.dumps(told))
    (hub / "tokenizer.json").write_text("{}")
    (hub / "modeling_x.py").write_text("raise SystemExit")
    (hub / "chat_template.jinja").symlink_to("/etc/hostname")
    tensors = {"model.w": torch.ones(2, dtype=torch.float64), "model.b": torch.ones(1)}
    record = {"transformers": {}}
    path = write.save(root, 1, pieces(tensors), record, alone(), Heard(), keep=1).path
    written = export_folder(path, tmp_path / "out")
    assert written.files == ("config.json", "model.safetensors", "tokenizer.json")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "x", "dtype": "float64",
        "text_config": {"model_type": "y", "dtype": "float64"},
    }  # fmt: skip


def test_averages_stand_for_the_weights_that_have_one(tmp_path: Path) -> None:
    weights = {"model.w": torch.ones(2), "model.seen": torch.full((1,), 3.0)}
    averages = {"average.w": torch.full((2,), 0.5)}
    saved = write.save(
        tmp_path, 1, pieces({**weights, **averages}), {}, alone(), Heard(), keep=1
    ).path
    export_file(saved, tmp_path / "model.safetensors", average=True)
    expected = {"w": averages["average.w"], "seen": weights["model.seen"]}
    assert_same(safetensors.torch.load_file(tmp_path / "model.safetensors"), expected)
    export_folder(saved, tmp_path / "out", average=True)
    assert_same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), expected)
    without = write.save(tmp_path, 2, pieces(weights), {}, alone(), Heard(), keep=1).path
    with pytest.raises(CheckpointError) as caught:
        export_folder(without, tmp_path / "none", average=True)
    assert str(caught.value).endswith(
        "step-2: holds no averaged weights, which a run keeps where optimizer.average (average= of "
        "parallelize) is above 0; try: the same without --average"
    )


def test_ties_that_no_configuration_tells_are_written_twice(tmp_path: Path) -> None:
    ties = {"model.head.weight": "model.embed.weight", "model.far.weight": "model.embed.weight"}
    path = write.save(
        tmp_path, 1, pieces({"model.embed.weight": torch.ones(6, 4)}),
        {"transformers": {"untold_ties": ["far.weight"]}}, alone(), Heard(), keep=1, aliases=ties,
    ).path  # fmt: skip
    export_folder(path, tmp_path / "out")
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["embed.weight", "far.weight"]
        assert file.metadata()["head.weight"] == "embed.weight"
        assert torch.equal(file.get_tensor("far.weight"), torch.ones(6, 4))
