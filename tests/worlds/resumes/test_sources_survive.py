"""Rows, packed examples, mixtures, images, shards: every sample once over a kill, a resume and a resize."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cli_run import CommandLine, trajectory
from shoal.config.load import load_config
from shoal.data.loading.loader import Loader
from shoal.data.sources import open_source

SMALL = [
    "data.validation=0.2", "train.batch=8", "train.micro_batch=2", "train.prove=off", "checkpoint.every=4",
]  # fmt: skip
TEXT = [
    "data.sequence=32",
    "data.tokenizer=bpe:300",
    "model.dim=16",
    "model.layers=1",
    "model.heads=2",
]
IMAGES = ["model.name=resnet", "model.classes=3", "model.image_channels=3", "data.image_size=8"]
SOURCES = {
    "text": [*TEXT, "data.source=jsonl:text.jsonl"],
    "packed": [*TEXT, "data.source=jsonl:chat.jsonl", "data.packing=on"],
    "mixture": [*TEXT, "data.source=mix:0.7*jsonl:text.jsonl+0.3*jsonl:more.jsonl"],
    "parquet": [*TEXT, "data.source=parquet:text.parquet"],
    "hf": [*TEXT, "data.source=hf:saved"],
    "images": [*IMAGES, "data.source=images:pictures"],
    "hf images": [*IMAGES, "data.source=hf:drawn"],
    "shards": [*IMAGES, "data.source=wds:shards/*.tar"],
    "tokens": [*TEXT, "data.source=tokens:ids"],
}
NEEDS = {
    "parquet": "pyarrow",
    "hf": "datasets",
    "images": "PIL",
    "hf images": "datasets",
    "shards": "PIL",
}


def write(folder: Path) -> None:
    rows = {
        "text": [{"text": f"line {n} is said {n * n} times"} for n in range(300)],
        "more": [{"text": f"and {n * n * n} more"} for n in range(200)],
        "chat": [{"prompt": f"say {n}: ", "completion": f"{n * n}"} for n in range(300)],
    }
    (folder / "ids").mkdir()
    np.save(folder / "ids" / "train.npy", np.arange(9000, dtype=np.uint16) % 200)
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


def write_formats(folder: Path, source: str) -> None:
    """The same in formats of other libraries; 200 images."""
    rows = [json.loads(line) for line in (folder / "text.jsonl").open()]
    pictures = [np.full((8, 8, 3), n, dtype=np.uint8) for n in range(200)]
    if source == "parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            pa.Table.from_pylist(rows), folder / "text.parquet"
        )
    elif source == "hf":
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(folder / "saved")
    elif source == "hf images":
        datasets, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
        kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
        drawn = {
            "image": [image.fromarray(p) for p in pictures],
            "label": [n % 3 for n in range(200)],
        }
        datasets.Dataset.from_dict(drawn, features=datasets.Features(kinds)).save_to_disk(
            folder / "drawn"
        )
    else:
        image = pytest.importorskip("PIL.Image")
        (folder / "shards").mkdir()
        for n, picture in enumerate(pictures):
            at = folder / "pictures" / "abc"[n % 3] / f"{n:03}.png"
            at.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(picture).save(at)
            with tarfile.open(folder / "shards" / f"{n // 60}.tar", "a") as tar:
                tar.add(at, f"{n:03}.png")
                info = tarfile.TarInfo(f"{n:03}.cls")
                info.size = 1
                tar.addfile(info, io.BytesIO(b"%d" % (n % 3)))


def killed_and_resized(folder: Path, words: list[str]) -> CommandLine:
    """Train on two ranks, of which one is killed and restarted, then resume on four, to step 40."""
    command = CommandLine(folder, *words, "train.steps=12", "launch.processes=2")
    command.wait_for(lambda: command.steps() >= 5, 180)
    command.kill(1)
    code, output = command.finish()
    assert code == 0, output
    assert len(command.events("worker_died")) == 1
    resumed = CommandLine(folder, "--resume", "runs/run", "train.steps=40", "launch.processes=4")
    code, output = resumed.finish()
    assert code == 0, output
    return command


@pytest.mark.proof
@pytest.mark.parametrize("source", SOURCES)
def test_every_sample_once(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    if source in NEEDS:
        pytest.importorskip(NEEDS[source])
        write_formats(tmp_path, source)
    words = [*SMALL, *SOURCES[source]]
    command = killed_and_resized(tmp_path, words)
    spans = [samples for *_, samples in trajectory(command.run)]
    assert len(spans) == 40
    assert spans[0][0] == 0
    assert all(before[1] == after[0] for before, after in zip(spans, spans[1:], strict=False))
    monkeypatch.chdir(tmp_path)
    config = load_config(command.run / "run.toml").config
    data = open_source(config.data, config.train.seed).train
    given = {"batch": 8, "micro_batch": 2, "seed": config.train.seed}
    loader = Loader(data, **given)
    ids = [n for start, stop in spans for n in loader._fetcher.ids(start, stop)]
    if source == "mixture":
        assert sum(n < data.sizes[0] for n in ids) == round(0.7 * len(ids) + 0.01)
        parts = [[n for n in ids if low <= n < low + size]
                 for low, size in zip(data.firsts[:-1], data.sizes, strict=True)]  # fmt: skip
    else:
        parts = [ids]
    for part, size in zip(parts, getattr(data, "sizes", [len(data)]), strict=True):
        rounds = [Counter(part[at : at + size]) for at in range(0, len(part), size)]
        assert all(set(one.values()) == {1} for one in rounds)
        assert all(len(one) == size for one in rounds[:-1])


STREAMED = """
import glob, os, torch
from torch import nn

def data():
    import datasets
    files = sorted(glob.glob("parts/*.jsonl"))
    made = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    return made.shuffle(seed=1, buffer_size=64) if os.path.exists("shuffled") else made

def collate(rows):
    ids = torch.tensor([row["id"] for row in rows])
    with open(f"read-{os.getpid()}", "a") as file:
        file.write("".join(f"{n} " for n in ids.tolist()))
    draw = torch.Generator().manual_seed(int(ids[0]))
    return torch.randn(len(rows), 8, generator=draw), ids % 4

def build():
    return nn.Linear(8, 4)
"""


@pytest.mark.proof
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_stream_of_files_over_a_kill_and_a_resize(tmp_path: Path, shuffled: bool) -> None:
    """The steps of an uninterrupted run, loss by loss; and each file is read by one rank."""
    pytest.importorskip("datasets")
    (tmp_path / "parts").mkdir()
    for part in range(8):
        rows = [{"id": 20 * part + n} for n in range(20)]
        (tmp_path / "parts" / f"{part}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    if shuffled:
        (tmp_path / "shuffled").touch()
    (tmp_path / "streamed.py").write_text(STREAMED)
    words = [
        "data.source=streamed:data", "data.collate=streamed:collate", "model.build=streamed:build",
        "data.validation=0", *SMALL[1:], "optimizer.lr=0.01", "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
    ]  # fmt: skip
    alone = [*words, "train.steps=40", "launch.processes=1"]
    whole = CommandLine(tmp_path, *alone, name="whole")
    code, output = whole.finish()
    assert code == 0, output
    read = [int(n) for file in tmp_path.glob("read-*") for n in file.read_text().split()]
    assert sorted(read) == sorted([*range(160)] * 2), "two epochs of 160 samples in 40 steps of 8"
    for file in tmp_path.glob("read-*"):
        file.unlink()

    command = killed_and_resized(tmp_path, words)
    runs = [{n: (loss, samples) for n, loss, *_, samples in trajectory(one.run)}
            for one in (whole, command)]  # fmt: skip
    assert runs[0].keys() == runs[1].keys() == set(range(1, 41))
    for step, (loss, samples) in runs[0].items():
        assert runs[1][step][1] == samples
        assert runs[1][step][0] == pytest.approx(loss, rel=1e-5), step
