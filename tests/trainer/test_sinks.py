"""Sinks: what they write can be read back by the libraries they write for."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.base.errors import ConfigError
from shoal.sinks import TensorBoard, WandB, scalars

SCRIPT = """
import sys
import torch
import shoal
from shoal.sinks import TensorBoard, WandB

kind, folder, steps = TensorBoard if sys.argv[1] == "tensorboard" else WandB, sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
run = shoal.parallelize(
    model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.CrossEntropyLoss(reduction="none"),
    batch=8, metrics={"right": lambda outputs, targets: outputs.argmax(1) == targets}, folder=folder,
)
run.hear(kind(folder + "/sink"))
run.restore()
for batch in run.loader(data):
    run.step(batch)
    if run.step_count == 2:
        run.save()
    if run.step_count == steps:
        break
run.evaluate(data)
run.close()
"""


def trained(folder: Path, sink: str, steps: int) -> None:
    """A run in a process of its own: what a sink holds back it writes at the end."""
    subprocess.run(
        [sys.executable, "-c", SCRIPT, sink, str(folder / "run"), str(steps)],
        env={**os.environ, "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"},
        check=True,
        timeout=300,
    )


def written(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_numbers_of_a_record() -> None:
    row = {"event": "step", "rank": 0, "step": 3, "loss": 0.5, "mfu": None, "grad_norm": float("nan"),
           "metrics": {"right": 1}}  # fmt: skip
    assert scalars(row) == {"train/loss": 0.5, "train/right": 1.0}
    assert scalars({**row, "rank": 1}) == {}
    found = {"event": "validated", "rank": 0, "step": 3, "loss": 2.0, "metrics": {"right": 0.25}}
    assert scalars(found) == {"validation/loss": 2.0, "validation/right": 0.25}
    assert scalars({"event": "notice", "rank": 0, "text": "loss"}) == {}


@pytest.mark.parametrize(
    ("sink", "needs", "hidden"),
    [(TensorBoard, "tensorboard", "torch.utils.tensorboard"), (WandB, "wandb", "wandb")],
)
def test_a_library_that_is_missing_is_one_line(
    sink: type, needs: str, hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(ConfigError) as caught:
        sink(tmp_path)
    assert str(caught.value) == (
        f"shoal.sinks.{sink.__name__}: needs {needs}, which is not installed; try: "
        f"pip install 'shoal[sinks]'"
    )


@pytest.mark.proof
def test_tensorboard_reads_every_step_once_after_a_resume(tmp_path: Path) -> None:
    """Steps 3 and 4 are run twice: those of the second time are what is there."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(tmp_path, "tensorboard", 4)
    trained(tmp_path, "tensorboard", 4)
    read = EventAccumulator(str(tmp_path / "run/sink")).Reload()
    rows = written(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for tag, key in (("train/loss", "loss"), ("train/grad_norm", "grad_norm")):
        seen = read.Scalars(tag)
        assert [one.step for one in seen] == [1, 2, 3, 4]
        assert [one.value for one in seen] == pytest.approx([row[key] for row in rows], rel=1e-6)
    assert len(read.Scalars("train/right")) == 4
    assert [one.step for one in read.Scalars("validation/right")] == [4]


def records(file: bytes) -> list[bytes]:
    """Those of wandb's log: LevelDB's format (blocks of 32 KiB, parts of crc, length, kind) after 7 bytes."""
    found, parts, place = [], [], 7
    while place < len(file):
        if 2**15 - place % 2**15 < 7:  # too little is left of a block for a part's head
            place += 2**15 - place % 2**15
            continue
        size, kind = struct.unpack_from("<HB", file, place + 4)
        parts.append(file[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(b"".join(parts))
            parts = []
    return found


@pytest.mark.proof
def test_wandb_keeps_every_step_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    trained(tmp_path, "wandb", 4)
    (path,) = (tmp_path / "run/sink/wandb").glob("offline-run-*/run-*.wandb")
    found = []
    for data in records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append(
                {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items}
            )
    rows = written(tmp_path)
    train = [one for one in found if "train/loss" in one]
    assert [one["step"] for one in train] == [1, 2, 3, 4]
    assert [one["train/loss"] for one in train] == [row["loss"] for row in rows]
    assert [one["step"] for one in found if "validation/right" in one] == [4]
