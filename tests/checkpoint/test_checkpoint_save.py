"""Saving and loading in one process: what comes back, what stays on disk, what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import safetensors.torch
import torch
from checkpoint_cases import (
    RECORD,
    Heard,
    alone,
    assert_same,
    pieces,
    save_step,
    state,
    wanted_all,
    whole,
)

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.agreement import assign_slices as deals
from shoal.checkpoint.format import safetensors_file
from shoal.checkpoint.format.boxes import explain_untiled
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest, verify
from shoal.checkpoint.format.manifest import Manifest, StoredTensor, encode
from shoal.checkpoint.load import read
from shoal.checkpoint.save import write


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    heard = Heard()
    saved = save_step(tmp_path, 5, heard)
    assert saved.path == tmp_path / "step-5"
    assert not saved.existed
    assert verify(saved.path) == []
    manifest = read_manifest(saved.path)
    assert manifest.record == RECORD
    assert manifest.step == 5
    assert_same(read.load(saved.path, wanted_all(manifest)), state(5))
    (event,) = heard.named("checkpoint_saved")
    on_disk = sum(f.stat().st_size for f in saved.path.glob("*.safetensors"))
    assert event["bytes"] == saved.size_bytes == on_disk
    assert event["folder"] == str(saved.path)
    assert event["seconds"] > 0
    assert event["step"] == 5


def test_the_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    save_step(tmp_path, 5)
    theirs = safetensors.torch.load_file(tmp_path / "step-5" / "rank-0.safetensors")
    assert_same(theirs, state(5))


def test_every_byte_is_covered_by_a_size_or_a_hash(tmp_path: Path) -> None:
    path = save_step(tmp_path, 5).path
    manifest, file = read_manifest(path), path / "rank-0.safetensors"
    raw = file.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    assert hashlib.sha256(raw[:length]).hexdigest() == manifest.files[file.name].header_sha256
    header = json.loads(raw[8:length])
    covered = 0
    for tensor in manifest.tensors.values():
        for piece in tensor.slices:
            begin, end = header[piece.key]["data_offsets"]
            data = raw[length + begin : length + end]
            assert hashlib.sha256(data).hexdigest() == piece.sha256
            covered += end - begin
    assert covered + length == len(raw) == manifest.files[file.name].size_bytes


def test_several_boxes_and_views_and_resharding(tmp_path: Path) -> None:
    full = torch.arange(48, dtype=torch.float32).view(6, 8)
    boxes = (((0, 2), (0, 8)), ((2, 6), (4, 8)), ((2, 6), (0, 4)))
    flat = torch.cat([full[a:b, c:d].reshape(-1) for (a, b), (c, d) in boxes])
    turned = torch.arange(12.0).view(3, 4).t()  # not contiguous
    offered = [
        write.Piece(Shard("w", (6, 8), "float32", boxes), flat),
        write.Piece(whole("t", turned), turned),
        write.Piece(Shard("none", (4,), "float32", (((0, 4),), ((4, 4),))), torch.ones(4)),
    ]
    path = write.save(tmp_path, 1, offered, {}, alone(), Heard(), keep=1).path
    for box in [
        ((0, 6), (0, 8)),
        ((1, 3), (3, 5)),
        ((5, 6), (7, 8)),
        ((2, 6), (4, 8)),
        ((3, 3), (0, 8)),
    ]:
        got = read.load(path, [Shard("w", (6, 8), "float32", (box,))])["w"]
        (a, b), (c, d) = box
        assert got.shape == (b - a, d - c)
        assert torch.equal(got, full[a:b, c:d])
    two = Shard("w", (6, 8), "float32", (((5, 6), (0, 8)), ((0, 1), (2, 4))))
    assert torch.equal(read.load(path, [two])["w"], torch.cat([full[5], full[0, 2:4]]))
    assert torch.equal(read.load(path, [whole("t", turned)])["t"], turned)


def test_only_needed_slices_are_read(tmp_path: Path) -> None:
    full = torch.arange(8.0)
    halves = Shard("w", (8,), "float32", (((0, 4),), ((4, 8),)))
    path = write.save(tmp_path, 1, [write.Piece(halves, full)], {}, alone(), Heard(), keep=1).path
    file = path / "rank-0.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1  # in [4:8]
    file.write_bytes(raw)
    assert torch.equal(read.load(path, [Shard("w", (8,), "float32", (((1, 3),),))])["w"], full[1:3])
    with pytest.raises(
        CheckpointError, match=r"w \[4:8\] does not match its hash in manifest.json"
    ):
        read.load(path, [Shard("w", (8,), "float32", (((3, 5),),))])


def test_tied_weights_are_stored_once_and_found_by_both_names(tmp_path: Path) -> None:
    embed = torch.randn(4, 2)
    offered = pieces({"embed.weight": embed, "head.weight": embed})
    path = write.save(
        tmp_path, 1, offered, {}, alone(), Heard(), keep=1, aliases={"head.weight": "embed.weight"}
    ).path
    assert list(read_manifest(path).tensors) == ["embed.weight"]
    got = read.load(path, [whole("head.weight", embed), whole("embed.weight", embed)])
    assert torch.equal(got["head.weight"], embed)
    assert torch.equal(got["embed.weight"], embed)


def test_keep_counts_back_from_the_new_step(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_step(tmp_path, step, keep=2)
    assert [f.step for f in list_checkpoints(tmp_path)] == [30, 20]
    # The run went back to 20: step 30 is of another future and must not push out the new 25.
    save_step(tmp_path, 25, keep=1)
    assert [f.step for f in list_checkpoints(tmp_path)] == [30, 25]
    assert sorted(os.listdir(tmp_path)) == ["step-25", "step-30"]


def test_same_step_twice_keeps_the_first_if_it_verifies(tmp_path: Path) -> None:
    first = save_step(tmp_path, 5)
    stamp = (first.path / "manifest.json").stat().st_mtime_ns
    heard = Heard()
    again = save_step(tmp_path, 5, heard)
    assert again.existed
    assert again.size_bytes == first.size_bytes
    assert heard.events == []
    assert (first.path / "manifest.json").stat().st_mtime_ns == stamp


def test_a_damaged_or_incomplete_namesake_is_renamed_and_kept(tmp_path: Path) -> None:
    for expected in ("step-5.damaged", "step-5.damaged-2"):
        file = save_step(tmp_path, 5).path / "rank-0.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        heard = Heard()
        assert not save_step(tmp_path, 5, heard).existed
        (event,) = heard.named("checkpoint_damaged")
        assert event["kept_as"] == str(tmp_path / expected)
        assert (tmp_path / expected / file.name).read_bytes() == raw
    (tmp_path / "step-6").mkdir()
    save_step(tmp_path, 6)
    assert (tmp_path / "step-6.damaged").is_dir()
    assert verify(tmp_path / "step-6") == []


def test_leftovers_of_dead_attempts_go(tmp_path: Path) -> None:
    dead = tmp_path / "step-3.tmp-00ff"
    dead.mkdir()
    (dead / "rank-0.safetensors").write_bytes(b"half")
    save_step(tmp_path, 5)
    assert os.listdir(tmp_path) == ["step-5"]
    dead.mkdir()
    read.open_newest(tmp_path, wanted_all, alone(), Heard())
    assert os.listdir(tmp_path) == ["step-5"]


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (b"", r"rank-0.safetensors: header does not match its hash"),
        (b"{", r"manifest.json: does not match its own digest"),
    ],
)
def test_read_back_finds_what_the_disk_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, text: str
) -> None:
    real = os.write

    def lying(descriptor: int, data: bytes) -> int:
        raw = bytearray(data)
        raw[-3] ^= 1 if raw.startswith(start) else 0
        return real(descriptor, raw)

    heard, root = Heard(), tmp_path / "checkpoints"
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file.os, "write", lying)
        with pytest.raises(CheckpointError, match=f"checkpoints/step-5 was not saved: .*{text}"):
            save_step(root, 5, heard)
    assert [name for name, _ in heard.events] == ["checkpoint_failed"]
    assert os.listdir(root) == []


@pytest.mark.parametrize(
    ("offered", "aliases", "text"),
    [
        (
            [write.Piece(Shard("w", (4,), "float32", (((0, 3),),)), torch.ones(3))],
            {},
            r"step-1 was not saved: w \[4\]: slices hold 3 of 4 elements, over all ranks; older",
        ),
        (
            [write.Piece(Shard("w", (4,), "float32", (((0, 4),),)), torch.ones(3))],
            {},
            "w: the data has 3 elements of float32, its shard 4 of float32",
        ),
        (
            [write.Piece(Shard("w", (4,), "float32", (((0, 4),),)), torch.ones(4).double())],
            {},
            "w: the data has 4 elements of float64, its shard 4 of float32",
        ),
        (
            [write.Piece(Shard.whole("w", (1,), "complex128"), torch.ones(1).to(torch.complex128))],
            {},
            "w: dtype complex128 cannot be saved; a checkpoint holds float64, ",
        ),
        (pieces({"w": torch.ones(1)}) * 2, {}, "w is offered twice by one rank"),
        (pieces({"w": torch.ones(1)}), {"v": "u"}, "v is tied to u: the second must be offered"),
    ],
)
def test_pieces_that_contradict_are_refused(
    tmp_path: Path, offered: list[write.Piece], aliases: dict[str, str], text: str
) -> None:
    heard = Heard()
    with pytest.raises(CheckpointError, match=text):
        write.save(tmp_path, 1, offered, {}, alone(), heard, keep=1, aliases=aliases)
    assert len(heard.named("checkpoint_failed")) == 1


def test_a_record_that_is_not_json_and_keep_0_are_refused(tmp_path: Path) -> None:
    for record in ({"x": float("nan")}, {"x": torch.ones(1)}):
        with pytest.raises(CheckpointError, match=r"the run's record is not plain JSON"):
            write.save(tmp_path, 1, pieces(state(1)), record, alone(), Heard(), keep=1)
    with pytest.raises(ConfigError, match=r"checkpoint.keep = 0: at least 1; try"):
        save_step(tmp_path, 1, keep=0)
    assert list_checkpoints(tmp_path) == []


def test_another_model_is_refused_and_not_skipped(tmp_path: Path) -> None:
    save_step(tmp_path, 4)
    save_step(tmp_path, 5)
    root, heard = tmp_path, Heard()
    path = root / "step-5"
    with pytest.raises(CheckpointError, match=r"no tensor model.up.weigh; try: model.up.weight"):
        read.load(path, [Shard.whole("model.up.weigh", (5, 7), "float32")])
    shards = [Shard.whole("model.up.weight", (5, 8), "float32")]
    with pytest.raises(CheckpointError, match=r"float32 \[5, 7\] there, float32 \[5, 8\] here"):
        read.open_newest(root, lambda manifest: shards, alone(), heard)
    assert heard.events == []

    def refuse(manifest: Manifest) -> list[Shard]:
        raise ConfigError("optimizer.lr = 2: was 1 in the checkpoint")

    with pytest.raises(ConfigError, match=r"optimizer.lr = 2"):
        read.open_newest(root, refuse, alone(), heard)


def test_nothing_saved_yet_is_none(tmp_path: Path) -> None:
    assert read.open_newest(tmp_path / "none", wanted_all, alone(), Heard()) is None
    assert list_checkpoints(tmp_path / "none") == []


def test_a_newer_format_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.checkpoint.format.manifest.VERSION", 2)
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-9" / "manifest.json").write_bytes(encode(Manifest(9, {}, {})))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"format version 2, this Shoal reads 1"):
        read.open_newest(tmp_path, wanted_all, alone(), Heard())


def test_the_deal_is_balanced_and_the_same_for_everyone() -> None:
    sizes = [100, 90, 50, 40, 30, 20, 10, 7, 3]
    offers = [(f"w{i}", (n,), "float32", ((0, n),)) for i, n in enumerate(sizes)]
    own = ("own", (60,), "float32", ((0, 60),))
    dealt = deals.assign_writers([offers, [*offers, own], offers, list(reversed(offers))])
    count = {f"w{i}": n for i, n in enumerate(sizes)} | {"own": 60}
    loads = [sum(count[name] for name, _ in share) for share in dealt.shares]
    assert sorted(n for share in dealt.shares for n, _ in share) == sorted(count)
    assert "own" in {name for name, _ in dealt.shares[1]}
    assert max(loads) - min(loads) <= 10
    assert dealt.total_bytes == 4 * sum(count.values())
    with pytest.raises(CheckpointError, match=r"w: rank 1 has float64 \[2\], a lower rank float32"):
        deals.assign_writers(
            [[("w", (2,), "float32", ((0, 2),))], [("w", (2,), "float64", ((0, 2),))]]
        )


def test_tilings() -> None:
    quarters = [((a, a + 2), (b, b + 3)) for a in (0, 2) for b in (0, 3)]
    assert explain_untiled((4, 6), quarters) is None
    assert explain_untiled((), [()]) is None
    assert explain_untiled((0, 3), [((0, 0), (0, 3))]) is None
    assert explain_untiled((4, 6), quarters[:3]) == "slices hold 18 of 24 elements"
    assert "overlap" in (explain_untiled((4, 6), [*quarters[:3], ((1, 4), (3, 6))]) or "")
    assert "outside" in (explain_untiled((4,), [((0, 5),)]) or "")
    assert "outside" in (explain_untiled((4,), [()]) or "")
    assert explain_untiled((), []) is not None
    assert "scalar has 2" in (explain_untiled((), [(), ()]) or "")


def test_catalog_and_lease_need_no_torch() -> None:
    rooms = "shoal.checkpoint.format.lease, shoal.checkpoint.format.listing"
    code = f"import sys, {rooms}; print('torch' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert out.stdout.strip() == "False"


def test_manifest_refuses_what_cannot_be_true(tmp_path: Path) -> None:
    path = save_step(tmp_path, 5).path
    good = read_manifest(path)
    outside = {"../../rank-0.safetensors": good.files["rank-0.safetensors"]}
    odd = StoredTensor((1,), "object", ())
    for bad, text in (
        (Manifest(5, {}, outside), "names a file '../../rank-0.safetensors'"),
        (Manifest(5, {"w": odd}, good.files), "w has the unknown dtype object"),
        (Manifest(5, good.tensors, {}), "lies in rank-0.safetensors, which is not among its files"),
        (Manifest(5, {"w": StoredTensor((1,), "bool", ())}, {}), "w: slices hold 0 of 1 elements"),
        (Manifest(5, {}, {}, {"a": "b"}), "the alias a → b does not lead"),
        (replace(good, step=cast(int, "5")), "has a field of another type"),
        (Manifest(6, {}, {}), "is of step 6, its folder is called step-5"),
    ):
        (path / "manifest.json").write_bytes(encode(bad))
        assert len(verify(path)) == 1
        assert text in verify(path)[0]
