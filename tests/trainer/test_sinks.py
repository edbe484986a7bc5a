"""Sinks: what they write can be read back by the libraries they write for."""

from __future__ import annotations

import csv
import json
import os
import re
import struct
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import ConfigError
from shoal.base.runlog.rank_records import RankStep, encode_header
from shoal.sinks import CSV, MLflow, TensorBoard, Trackio, WandB, scalar_columns, scalars
from shoal.sinks.scalar_columns import HOST_S

SCRIPT = """
import sys
import torch
import shoal
from shoal import sinks

names, folder, steps = sys.argv[1].split(","), sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
run = shoal.parallelize(
    model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.CrossEntropyLoss(reduction="none"),
    batch=8, metrics={"right": lambda outputs, targets: outputs.argmax(1) == targets}, folder=folder,
)
for name in names:
    run.add_callback(getattr(sinks, name)(folder + "/sink"))
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


def trained(folder: Path, sinks: str, steps: int) -> str:
    """A run in a process of its own: what a sink holds back it writes at the end."""
    own = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, sinks, str(folder / "run"), str(steps)],
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout


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
    [
        (TensorBoard, "tensorboard", "torch.utils.tensorboard"),
        (WandB, "wandb", "wandb"),
        (Trackio, "trackio", "trackio"),
        (MLflow, "mlflow", "mlflow"),
    ],
)
def test_a_library_that_is_missing_is_one_line(
    sink: type, needs: str, hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(ConfigError) as caught:
        sink(tmp_path)
    assert str(caught.value) == (
        f"shoal.sinks.{sink.__name__}: needs {needs}, which is not installed; try: "
        f"pip install 'shoal[{'mlflow' if needs == 'mlflow' else 'sinks'}]'"
    )


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"event": "step", "rank": 0, "step": step, "loss": step + 0.5, **more}


def validated(step: int) -> dict[str, Any]:
    return {"event": "validated", "rank": 0, "step": step, "loss": 2.0}


def write_csv(folder: Path, *written: dict[str, Any]) -> list[dict[str, str]]:
    """A CSV sink of a new process gets records; the rows without the host's columns."""
    sink = CSV(folder)
    sink._read_s = time.monotonic() + HOST_S  # no host yet
    for one in written:
        sink(one)
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_each_step_once_after_a_resume_and_a_rewind(tmp_path: Path) -> None:
    found = write_csv(
        tmp_path,
        row(1),
        row(2),
        validated(2),
        row(3),
        {"event": "notice", "rank": 0},
        row(4, rank=1),
    )
    assert [(one["step"], one["train/loss"], one["validation/loss"]) for one in found] == [
        ("1", "1.5", ""), ("2", "2.5", ""), ("2", "", "2.0"), ("3", "3.5", ""),
    ]  # fmt: skip
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,2.5\n2,2.5,2.0,1.0\nx,2.5,\n2,\0,\n2,2.5,2.")  # torn, as kills leave them
    found = write_csv(tmp_path, row(3, loss=7.0), row(4))
    assert [one["step"] for one in found] == ["1", "2", "2", "3", "4"]
    found = write_csv(tmp_path, row(5), row(2, loss=8.0), row(3))
    assert [(one["step"], one["train/loss"]) for one in found] == [
        ("1", "1.5"),
        ("2", "8.0"),
        ("3", "3.5"),
    ]
    found = write_csv(tmp_path, validated(3), validated(3))
    assert [one["step"] for one in found] == ["1", "2", "3", "3", "3"]
    found = write_csv(tmp_path, validated(3))
    assert [(one["step"], one["validation/loss"]) for one in found][2:] == [("3", ""), ("3", "2.0")]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_csv_grows_columns(tmp_path: Path) -> None:
    found = write_csv(
        tmp_path, row(1), row(2, metrics={'a,"b"\n': 3}, lr=0.1), row(3, loss=float("nan"), lr=0.1)
    )
    assert list(found[0]) == ["step", "train/loss", "train/lr", 'train/a,"b"\n']
    assert [one['train/a,"b"\n'] for one in found] == ["", "3.0", ""]
    assert (found[2]["train/loss"], found[2]["train/lr"]) == ("", "0.1")
    found = write_csv(tmp_path, row(4, lr=0.2), row(5, mfu=0.5))
    assert [one["step"] for one in found] == ["1", "2", "3", "4", "5"]
    assert list(found[0])[-1] == "train/mfu"


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"time,loss\n1,2\n", b"step\n", b'step,"a\n1,2', b"step,a\n\x00,\n"],
)
def test_csv_replaces_a_file_that_is_none_of_its_own(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    found = write_csv(tmp_path, row(1), row(2))
    assert [(one["step"], one["train/loss"]) for one in found] == [("1", "1.5"), ("2", "2.5")]


def test_a_full_disk_stops_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    sink = CSV(tmp_path / "file")
    for step in (1, 2, 3):
        sink(row(step))
    assert [one.getMessage() for one in caplog.records] == [
        f"shoal: {tmp_path}/file/metrics.csv: rows are lost: File exists"
    ]


def test_every_sink_gets_host_ranks_and_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the run's folder, also for a sink in a folder of its own there; at most every 10 s."""
    (tmp_path / "rank_steps").mkdir()
    steps = [
        RankStep(k, rank, 1, 0.0, 5, (0.0,) * 7 + (0.25 * (1 - rank),))
        for k in (1, 2, 3)
        for rank in (0, 1)
    ]
    (tmp_path / "rank_steps/node-0.bin").write_bytes(
        encode_header(0) + b"".join(one.encode() for one in steps)
    )
    devices = [{"utilisation": 0.5, "power_w": None}, {"utilisation": 0.75, "temperature_c": 50}]
    line = json.dumps({"time_s": 1.0, "host": "a", "devices": devices})
    (tmp_path / "devices.jsonl").write_text(f"{line}\n")
    now_s = [100.0]
    monkeypatch.setattr(scalar_columns, "time", types.SimpleNamespace(monotonic=lambda: now_s[0]))
    for folder in (tmp_path, tmp_path / "sink"):
        sink = CSV(folder)
        for step in (1, 2, 3):
            sink(row(step, comm_exposed_s=0.5, data_wait_s=0.125))
            now_s[0] += 6.0
        with (folder / "metrics.csv").open(newline="") as file:
            found = list(csv.DictReader(file))
        expected = {
            "train/comm_exposed_s": "0.5", "train/data_wait_s": "0.125", "ranks/wait_s_min": "0.0",
            "ranks/wait_s_max": "0.25", "ranks/worst_rank": "1.0", "ranks/lateness_s": "0.25",
            "devices/utilisation_min": "0.5", "devices/utilisation_max": "0.75", "devices/temperature_c_max": "50.0",
        }  # fmt: skip
        assert {name: found[0][name] for name in expected} == expected
        assert "devices/power_w_min" not in found[0]
        assert float(found[0]["host/memory_used_bytes"]) > 1e6
        assert float(found[0]["host/process_memory_bytes"]) > 1e6
        assert [bool(one["host/cpu_utilisation"]) for one in found] == [True, False, True]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that made steps 3 and 4 twice, with all sinks but W&B."""
    for package in ("tensorboard", "mlflow", "trackio", "pandas"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("sinks")
    for _ in range(2):
        printed = trained(folder, "TensorBoard,CSV,MLflow,Trackio", 4)
        assert not re.search("(?i)trackio|mlflow|alembic|tensorboard", printed), (
            "no banner amid the steps"
        )
    assert [one["step"] for one in written(folder)] == [1, 2, 3, 4]
    return folder


@pytest.mark.proof("sinks")
def test_tensorboard_reads_every_step_once_after_a_resume(resumed: Path) -> None:
    """Steps 3 and 4 are run twice: those of the second time are what is there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read, rows = EventAccumulator(str(resumed / "run/sink")).Reload(), written(resumed)
    for tag, key in (("train/loss", "loss"), ("train/grad_norm", "grad_norm")):
        seen = read.Scalars(tag)
        assert [one.step for one in seen] == [1, 2, 3, 4]
        assert [one.value for one in seen] == pytest.approx([row[key] for row in rows], rel=1e-6)
    assert len(read.Scalars("train/right")) == 4
    assert [one.step for one in read.Scalars("validation/right")] == [4]
    assert read.Scalars("host/memory_used_bytes")[-1].value > 1e6


@pytest.mark.proof("sinks")
def test_pandas_reads_the_csv(resumed: Path) -> None:
    import pandas

    table, rows = (
        pandas.read_csv(resumed / "run/sink/metrics.csv", index_col="step"),
        written(resumed),
    )
    train = table[table["train/loss"].notna()]
    assert list(train.index) == [1, 2, 3, 4]
    for key in ("loss", "grad_norm", "step_s", "data_wait_s", "comm_exposed_s"):
        assert list(train[f"train/{key}"]) == [row[key] for row in rows]
    assert list(table[table["validation/right"].notna()].index) == [4]
    assert train["host/process_memory_bytes"].max() > 1e6


@pytest.mark.proof("sinks")
def test_mlflow_resumes_its_run(resumed: Path) -> None:
    """A database only grows: of steps 3 and 4 the later entries are those of metrics.jsonl."""
    from mlflow.tracking import MlflowClient

    sink, rows = resumed / "run/sink", written(resumed)
    uri = f"sqlite:///{sink / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    found = client.search_runs([client.get_experiment_by_name("shoal").experiment_id])
    assert [(one.info.run_name, one.info.status) for one in found] == [("sink", "FINISHED")]
    for key in ("loss", "comm_exposed_s"):
        history = client.get_metric_history(found[0].info.run_id, f"train/{key}")
        assert sorted(one.step for one in history) == [1, 2, 3, 3, 4, 4]
        latest = {one.step: one.value for one in sorted(history, key=lambda one: one.timestamp)}
        assert latest == {row["step"]: row[key] for row in rows}
    assert found[0].data.metrics["host/memory_used_bytes"] > 1e6


@pytest.mark.proof("sinks")
def test_trackio_resumes_its_run(resumed: Path) -> None:
    read = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
[run] = trackio.Api().runs("shoal")
logs = SQLiteStorage.get_logs("shoal", run.name, run_id=run.id)
print(json.dumps([run.name, [[one["step"], one.get("train/loss"), one.get("host/memory_used_bytes")] for one in logs]]))
"""
    own = {"TRACKIO_DIR": str(resumed / "run/sink/trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", read],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=True,
    )
    name, logs = json.loads(done.stdout)
    assert name == "sink"
    assert [step for step, loss, _ in logs if loss is not None] == [1, 2, 3, 4, 3, 4]
    assert {step: loss for step, loss, _ in logs if loss is not None} == {
        row["step"]: row["loss"] for row in written(resumed)
    }
    assert max(used or 0 for _, _, used in logs) > 1e6


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


@pytest.mark.proof("sinks")
def test_wandb_keeps_every_step_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    trained(tmp_path, "WandB", 4)
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
    assert any(one.get("host/memory_used_bytes", 0) > 1e6 for one in train)
    assert [one["step"] for one in found if "validation/right" in one] == [4]
