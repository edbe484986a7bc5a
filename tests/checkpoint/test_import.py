"""Import: weights of other tools, bit for bit, with nothing of their files executed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_cases import save_step
from hostile_pickles import hostile

from forks import Forks
from shoal.base.errors import CheckpointError, ConfigError
from shoal.checkpoint.foreign.import_weights import ImportResult, import_weights

DCP = Path(__file__).parent / "dcp_folder.py"


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), raw


def check(done: ImportResult, expected: dict[str, torch.Tensor]) -> dict[str, str]:
    """That a file holds these tensors to the bit. Gives its metadata."""
    with safetensors.safe_open(done.file, "pt") as file:
        assert {*file.keys()} == {*expected}
        for name, tensor in expected.items():
            assert bits(file.get_tensor(name)) == bits(tensor), name
        return file.metadata()


def weights() -> dict[str, torch.Tensor]:
    """Formats and strides of all kinds; a fused weight whose parts are saved as views."""
    torch.manual_seed(1)
    fused = torch.randn(6, 4)
    return {
        "embed.weight": torch.randn(5, 4).bfloat16(),
        "q.weight": fused[:2], "k.weight": fused[2:4], "columns": fused[:, 1],
        "turned": torch.randn(3, 5).T, "picture": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(0.1, dtype=torch.float64), "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]), "ids": torch.arange(7)[::2],
        "wave": torch.randn(2, dtype=torch.complex64), "small": torch.randn(3).to(torch.float8_e4m3fn),
        "wide": torch.tensor([1, 65_535], dtype=torch.uint16),
        "position_ids": torch.arange(6).expand(1, -1),
    }  # fmt: skip


def test_one_file_of_torch_save(tmp_path: Path) -> None:
    state = weights()
    state["trained"] = torch.nn.Parameter(torch.randn(2, 2))
    torch.save(state, tmp_path / "w.pt")
    assert check(import_weights(tmp_path / "w.pt", tmp_path / "out"), state) == {"format": "pt"}


def tied() -> dict[str, torch.Tensor]:
    embed = torch.randn(4, 3)
    return {"embed.weight": embed, "head.weight": embed, "bias": torch.randn(4)}


SAVED: dict[str, tuple[Callable[[dict[str, Any]], Any], str, list[str]]] = {
    "alone": (lambda w: w, "", []),
    "a Trainer's": (
        lambda w: {"model_state_dict": w, "optimizer": {"state": {0: {"m": torch.ones(2)}}}, "epoch": 3},
        "", ["left out: 1 tensor of optimizer"],
    ),
    "Lightning's, compiled, under ddp": (
        lambda w: {"state_dict": {f"module._orig_mod.{n}": t for n, t in w.items()}, "rng": torch.ones(3)},
        "", [
            "left out: 1 tensor of rng", "names: without module., which all of them began with",
            "names: without _orig_mod., which all of them began with",
        ],
    ),
    "an application's": (lambda w: {"app": {"net": w, "optim": {"m": torch.ones(1)}}}, "",
                         ["left out: 1 tensor of app"]),
    "two models": (lambda w: {"student": w, "teacher": tied()}, "student",
                   ["left out: 3 tensors of teacher"]),
    "beside extra state": (lambda w: {**w, "extra": {"x": torch.ones(1)}}, "",
                           ["left out: 1 tensor of extra"]),
}  # fmt: skip


@pytest.mark.parametrize("how", SAVED)
def test_the_model_among_other_things(how: str, tmp_path: Path) -> None:
    """Tied weights once; what is not the model is named."""
    make, key, said = SAVED[how]
    state = tied()
    torch.save(make(state), tmp_path / "w.ckpt")
    done = import_weights(tmp_path / "w.ckpt", tmp_path / "out", key)
    assert done.said == said
    del state["head.weight"]
    assert check(done, state) == {"format": "pt", "head.weight": "embed.weight"}


def test_what_could_be_two_models_is_asked(tmp_path: Path) -> None:
    torch.save({"gan": {"generator": tied(), "critic": tied()}}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"each be the model; try: --key gan.generator"):
        import_weights(tmp_path / "w.pt", tmp_path / "out")
    with pytest.raises(CheckpointError, match="nothing is under gan.judge; what it holds: gan"):
        import_weights(tmp_path / "w.pt", tmp_path / "out", "gan.judge")
    assert not (tmp_path / "out").exists()
    assert import_weights(tmp_path / "w.pt", tmp_path / "out", "gan.critic").tensors == 2


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_of_transformers(kind: str, shards: int, tmp_path: Path) -> None:
    """One file or several; configuration and tokenizer come along, code does not."""
    source = tmp_path / "hub"
    source.mkdir()
    state = {name: tensor.contiguous() for name, tensor in weights().items()}
    name = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    stem, _, end = name.rpartition(".")
    files = [name] if shards == 1 else [f"{stem}-{k}-of-{shards}.{end}" for k in range(shards)]
    parts = [dict(list(state.items())[k::shards]) for k in range(shards)]
    for file, part in zip(files, parts, strict=True):
        write = safetensors.torch.save_file if kind == "safetensors" else torch.save
        write({n: t.clone() for n, t in part.items()}, source / file)
    if shards > 1:
        where = {n: file for file, part in zip(files, parts, strict=True) for n in part}
        (source / f"{name}.index.json").write_text(json.dumps({"weight_map": where}))
    for beside in ("config.json", "tokenizer.json", "modeling_mine.py", "training_args.bin"):
        (source / beside).write_text("{}")
    done = import_weights(source, tmp_path / "out")
    check(done, state)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.safetensors", "config.json", "tokenizer.json",
    }  # fmt: skip
    if kind == "bin":  # into the folder itself: its own reader finds safetensors from now on
        check(import_weights(source, source), state)
        with pytest.raises(ConfigError, match="has model.safetensors already"):
            import_weights(source, source)
    if shards > 1:
        (source / files[1]).unlink()
        shutil.rmtree(tmp_path / "out")
        (source / "model.safetensors").unlink(missing_ok=True)
        with pytest.raises(CheckpointError, match=f"{files[1]}: is missing"):
            import_weights(source, tmp_path / "out")


def test_two_ranks_of_dcp(tmp_path: Path, programs: Forks) -> None:
    """fsdp2's own shards of 7 and 3 rows over 2 ranks, columns, copies; then every way to break."""
    done = programs.run(str(DCP), str(tmp_path), timeout=300)
    assert done.returncode == 0, done.stderr
    source, whole = tmp_path / "dcp", safetensors.torch.load_file(tmp_path / "whole.safetensors")
    assert len([*source.glob("*.distcp")]) == 4
    done = import_weights(source, tmp_path / "out")
    check(done, whole)
    assert done.said == ["left out: 15 tensors of optim"]
    states = import_weights(source, tmp_path / "states", "optim.state")
    assert states.tensors == 15
    broken = tmp_path / "broken"
    for change, reason in (
        (lambda file: file.unlink(), "__1_0.distcp: is missing"),
        (lambda file: os.truncate(file, 200), "ends at byte|cut short"),
        (lambda file: flip(file), "does not match its CRC-32"),
        (lambda file: replace(file.with_name(".metadata"), b"__1_0.distcp", b"../0/.distcp"),
         "where a file beside it should be"),
        (lambda file: replace(file.with_name(".metadata"), b"TensorStorage", b"ForeignStorage"[:13]),
         "holds no tensors by name"),
        (lambda file: os.truncate(file.with_name(".metadata"), 900), "is no whole pickle"),
    ):  # fmt: skip
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(source, broken)
        change(broken / "__1_0.distcp")
        with pytest.raises(CheckpointError, match=reason) as refused:
            import_weights(broken, tmp_path / "none")
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "none" / "model.safetensors").exists()


def replace(path: Path, old: bytes, new: bytes) -> None:
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new))


def flip(path: Path) -> None:
    """One bit of every storage in a file of archives."""
    raw = bytearray(path.read_bytes())
    place = 0
    while (place := raw.find(b"/data/0FB", place) + 9) > 8:
        start = place - 9 + len("/data/0") + 2 + int.from_bytes(raw[place : place + 2], "little")
        raw[start + (-start) % 64] ^= 1
    path.write_bytes(raw)


def test_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    """Python's unpickler and torch.load both read on."""
    state = {"w": torch.full((64,), 1.5)}
    torch.save(state, tmp_path / "w.pt")
    replace(
        tmp_path / "w.pt", state["w"].numpy().tobytes(), torch.full((64,), 1.25).numpy().tobytes()
    )
    assert not torch.equal(torch.load(tmp_path / "w.pt")["w"], state["w"])
    with pytest.raises(CheckpointError, match=r"data/0 does not match its CRC-32: the file is dam"):
        import_weights(tmp_path / "w.pt", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    with torch.utils.serialization.config.patch("save.compute_crc32", False):
        torch.save(state, tmp_path / "unsigned.pt")
    check(import_weights(tmp_path / "unsigned.pt", tmp_path / "out"), state)


def test_hostile_files_give_their_tensors_and_run_nothing(tmp_path: Path) -> None:
    """The same harm as in test_pickles, through the files that an import opens."""

    class Harm:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'canary'}",)

    state = {"w": torch.randn(3), "harm": Harm()}
    torch.save(state, tmp_path / "w.pt")
    check(import_weights(tmp_path / "w.pt", tmp_path / "out"), {"w": state["w"]})
    for number, (what, body) in enumerate(hostile(tmp_path / "canary").items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in (".metadata", "pytorch_model.bin"):
            (folder / name).write_bytes(b"\x80\x02" + body + b".")
            with pytest.raises(CheckpointError) as refused:
                import_weights(folder, tmp_path / "none")
            assert "\n" not in str(refused.value), what
            (folder / name).unlink()
    assert not (tmp_path / "canary").exists()


def test_what_is_no_source_or_no_folder_is_one_line(tmp_path: Path) -> None:
    def refusal(source: Path, folder: Path) -> str:
        with pytest.raises((CheckpointError, ConfigError)) as refused:
            import_weights(source, folder)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    out, good, old = tmp_path / "out", tmp_path / "in" / "w.pt", tmp_path / "old.pt"
    good.parent.mkdir()
    torch.save(tied(), good)
    torch.save(tied(), old, _use_new_zipfile_serialization=False)
    assert "no such file or folder" in refusal(tmp_path / "none", out)
    assert f"holds no weights; try: {good}" in refusal(good.parent, out)
    assert f"holds no weights; try: {old}" in refusal(tmp_path, out)
    assert "since torch 1.6; try, where it can be trusted" in refusal(old, out)
    save_step(tmp_path / "run" / "checkpoints", 5)
    assert "try: shoal checkpoint export" in refusal(tmp_path / "run", out)
    torch.save(torch.ones(3), tmp_path / "one.pt")
    assert "holds no tensors by name" in refusal(tmp_path / "one.pt", out)
    torch.save({"w": torch.ones(1).expand(1 << 40)}, tmp_path / "vast.pt")
    assert "have 4398046511104 bytes by their shapes" in refusal(tmp_path / "vast.pt", out)
    many = torch.randn(1000)
    torch.save({str(k): many[: 999 - k] for k in range(99)}, tmp_path / "many.pt")
    assert "try: save each tensor once" in refusal(tmp_path / "many.pt", out)
    torch.save({"w": torch.ones(9), "s": torch.ones(4).to_sparse()}, tmp_path / "sparse.pt")
    assert "s is no plain tensor but one of torch._utils._rebuild_sparse_tensor" in refusal(
        tmp_path / "sparse.pt", out
    )
    for shape, reason in (([-1, -4], "a shape that no tensor has"), ([4, 1 << 61], "other bytes")):
        told = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]}}).encode()
        lies = tmp_path / "lies.safetensors"
        lies.write_bytes(len(told).to_bytes(8, "little") + told + b"\0" * 16)
        assert reason in refusal(lies, out)
    assert not out.exists()
    assert "is a file; a folder is written" in refusal(good, old)
    assert "there is no folder" in refusal(good, tmp_path / "a" / "b")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "global_step3").mkdir()
    (tmp_path / "two" / "latest").write_text("global_step3")
    shutil.copy(good, tmp_path / "two" / "pytorch_model.bin")
    assert "holds pytorch_model.bin and global_step3/*_states.pt; try: " in refusal(
        tmp_path / "two", out
    )


def test_a_part_under_a_key_keeps_what_it_shares(tmp_path: Path) -> None:
    """An alias in a safetensors file whose tensor has a name in another part."""
    shared = torch.randn(3, 2)
    state = {"encoder.embed": shared, "decoder.up": torch.randn(2)}
    metadata = {"format": "pt", "decoder.embed": "encoder.embed"}
    safetensors.torch.save_file(state, tmp_path / "w.safetensors", metadata)
    done = import_weights(tmp_path / "w.safetensors", tmp_path / "out", "decoder")
    check(done, {"embed": shared, "up": state["decoder.up"]})
    whole = import_weights(tmp_path / "w.safetensors", tmp_path / "whole")
    assert check(whole, state) == metadata


def test_the_command_says_what_it_did_and_how_to_go_on(tmp_path: Path, programs: Forks) -> None:
    def shoal(*words: str) -> tuple[int, str]:
        done = programs.run(
            "-m", "shoal", "checkpoint", "import", *words, cwd=tmp_path, timeout=300
        )
        return done.returncode, done.stdout + done.stderr

    torch.save({"model": tied(), "optimizer": {"m": torch.ones(1)}}, tmp_path / "w.pt")
    code, said = shoal("w.pt", "out")
    assert code == 0
    assert said.splitlines() == [
        "left out: 1 tensor of optimizer",
        f"out/model.safetensors: {(tmp_path / 'out/model.safetensors').stat().st_size} B, 2 tensors "
        "from w.pt (a file of torch.save)",
        'train from it: safetensors.torch.load_model(model, "out/model.safetensors"), then '
        "shoal.parallelize",
    ]
    assert shoal("w.pt", "out") == (
        2, "shoal: out: has model.safetensors already; try: a new folder\n",
    )  # fmt: skip


MEMORY = """
import sys, threading
from pathlib import Path
from shoal.checkpoint.foreign import import_weights as ours
def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon"))
import numpy
before, most, done = anonymous(), 0, threading.Event()
def watch():
    global most
    while not done.wait(0.001):
        most = max(most, anonymous())
threading.Thread(target=watch).start()
ours.import_weights(Path(sys.argv[1]), Path(sys.argv[2]))
done.set()
print((most - before) * 1024, "torch" in sys.modules)
"""


@pytest.mark.parametrize("turned", [False, True])
def test_memory_holds_one_tensor_at_most(turned: bool, tmp_path: Path) -> None:
    """Of 8 tensors of 8 MiB; none where they lie as they are written. torch is not imported."""
    state = {str(k): torch.full((1024, 2048), float(k)) for k in range(8)}
    state = {name: tensor.T if turned else tensor for name, tensor in state.items()}
    torch.save(state, tmp_path / "w.pt")
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "w.pt"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    size_bytes, with_torch = done.stdout.split()
    assert int(size_bytes) < (1.25 if turned else 0.5) * (8 << 20)
    assert with_torch == "False"
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 8 * (8 << 20)
