"""`--force` is offered where it goes on, and nowhere else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import ShoalError
from shoal.cli import start
from shoal.fabric import start_world
from shoal.proof.start_proof import prove_run
from shoal.trainer import main_job
from shoal.trainer.run_folder import resume_checks

FOLDERS = Path(__file__).parent.parent / "fixtures" / "run_folders"
MINE = """
import torch
def loss(outputs, targets): return outputs.whole().square().sum(), targets.numel()
def collate(samples): return torch.utils.data.default_collate(samples)
"""

GOES_ON = (
    "data.source=tokens:moved", "optimizer.lr=0.5",
    "data.collate=mine:collate", "data.tokenizer=bpe:300", "data.dtype=uint16",
    "model.dropout=0.2", "model.rope_theta=500", "optimizer.momentum=0.5", "optimizer.clip=0.5",
    "optimizer.schedule=linear", "optimizer.average=0.9", "train.batch=4", "train.micro_batch=4",
    "train.seed=5", "precision.compute=bf16", "precision.compute=fp16", "precision.reduce=fp32",
    "layout.compress=int8", "islands.method=diloco",
)  # fmt: skip
STOPS = {
    "data.source=mix:0.5*tokens:tokens+0.5*tokens:moved": "has 134 samples, the checkpoint was made",
    "model.dim=8": "[32, 4] float32 in the checkpoint, [32, 8] float32 in this model",
    "data.sequence=9": "has 59 samples, the checkpoint was made with 67",
    "data.validation=0.2": "has 59 samples, the checkpoint was made with 67",
    "data.validation=tokens:moved": "has 74 samples, the checkpoint was made with 67",
    "data.source=synthetic": "[32, 4] float32 in the checkpoint, [2048, 4]",
    "model.layers=2": "only in this model",
    "model.heads=1": "in the checkpoint",
    "model.name=gpt": "only in the checkpoint",
    "model.tied=false": "only in this model",
    "optimizer.name=sgd": "the checkpoint was written by AdamW, this run has SGD; changed since",
    "optimizer.name=lion": "the checkpoint was written by AdamW, this run has Lion",
    "precision.compute=fp64": "[32, 4] float32 in the checkpoint, [32, 4] float64",
}
SHORT = ("data.source=tokens:moved", "optimizer.lr=0.5",
         "data.source=mix:0.5*tokens:tokens+0.5*tokens:moved", "model.dim=8")  # fmt: skip


@pytest.fixture
def resume(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Resumes a run of 3070ad02 as the command and its worker do; gives what stopped it, or ""."""
    for name in ("tokens", "moved"):
        shutil.copytree(FOLDERS / "tokens", tmp_path / name)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_CACHE", str(cache))
    monkeypatch.setattr(main_job, "measure_machine", lambda *_: None)

    def one(override: str, *, force: bool) -> str:
        folder = Path("runs/single")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(FOLDERS / "runs" / "single", folder)
        monkeypatch.setenv(resume_checks.STRICT, "" if force else "strict")
        try:
            start.write_run_folder(start.prepare_run([override], folder, 1, force=force))
            assert main_job.train(folder, prove_run, world=start_world({})) == 0
        except ShoalError as stop:
            return f"{stop}" if stop.exit_code == 2 else f"exit status {stop.exit_code}"
        return ""

    return one


def marked(overrides: Any) -> list[Any]:
    long = [pytest.mark.proof("faults")]
    return [pytest.param(one, marks=[] if one in SHORT else long) for one in overrides]


@pytest.mark.parametrize("override", marked(GOES_ON))
def test_where_it_is_offered_it_goes_on(resume: Any, override: str) -> None:
    key = override.partition("=")[0]
    stop = resume(override, force=False)
    assert stop.startswith("--resume runs/single: not what step 2 was trained with (then → now): ")
    assert f"{key}: " in stop
    assert stop.endswith("; put that back, or say --force to go on with what is now")
    assert resume(override, force=True) == ""


@pytest.mark.parametrize("override", marked(STOPS))
def test_where_it_cannot_go_on_it_is_not_offered(resume: Any, override: str) -> None:
    """Both ways say what does not fit, and which key has changed."""
    key, _, value = override.partition("=")
    for force in (False, True):
        stop = resume(override, force=force)
        assert STOPS[override] in stop
        assert f"; changed since step 2: {key}: " in stop
        assert (
            f" → {value.title() if value == 'false' else value}; try: put that back, or start"
            in stop
        )
        assert "--force" not in stop
        assert stop.count("try: ") == 1
