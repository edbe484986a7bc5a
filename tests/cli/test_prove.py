"""`shoal prove` as its users meet it: real processes, exit codes, a report, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forks import Forks
from shoal.view.proof_lines import proof_text, verdict_line

USER = '''
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.1),
                                 nn.Linear(width, 4))
    def forward(self, x):
        return self.net(x)

class Leaning(Net):
    """Looks at its rank: what no layout can make equal."""
    def forward(self, x):
        import torch.distributed as dist
        lean = dist.get_rank() if dist.is_initialized() and self.training else 0
        grown = self.net(x)
        return grown * (1 + lean)

class Single(Net):
    """An operation of its own without a float64 kernel."""
    def forward(self, x):
        if x.dtype == torch.float64:
            raise RuntimeError('"my_kernel" not implemented for \\'Double\\'')
        return self.net(x)

def build(): return Net()
def leaning(): return Leaning()
def single(): return Single()

class Rows:
    def __len__(self): return 200
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.tensor(index % 4)

def data(): return Rows(), Rows()

def stream():
    return iter(Rows())

def mean_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
'''
BASE = ["data.source=user:data", "train.batch=16", "train.micro_batch=4", "launch.processes=2"]


Prove = Callable[..., tuple[int, str, str]]


@pytest.fixture
def prove(tmp_path: Path, programs: Forks) -> Prove:
    """Run the command in `tmp_path`; its status, and what it prints and tells."""
    (tmp_path / "user.py").write_text(USER)

    def run(*arguments: str) -> tuple[int, str, str]:
        words = ("-m", "shoal", "prove", *BASE, *arguments)
        done = programs.run(*words, cwd=tmp_path, timeout=300)
        return done.returncode, done.stdout, done.stderr

    return run


def test_equal_is_exit_0_and_leaves_nothing(tmp_path: Path, prove: Prove) -> None:
    code, out, err = prove("model.build=user:build")
    assert code == 0, out + err
    first, verdict = [line for line in out.splitlines() if not line.startswith("phase=")][:2]
    assert "proving ddp (dp_replicate = 2) on 2 processes against one, in float64" in first
    assert verdict.startswith("equal: ddp (dp_replicate = 2) on 2 processes computes what one")
    assert "sgd: equal; losses" in out
    assert "adamw: equal; losses" in out
    assert "net.0.weight" in out
    assert not (tmp_path / "runs").exists()


HANGS = """
import os, signal
import user

class Net(user.Net):
    def forward(self, x):
        if os.environ["RANK"] == "1" and x.device.type != "meta":
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(x)
"""
SOONER = (
    "import sys; from shoal.cli import main, prove; prove.FIRST_S = 8.0; "
    "sys.argv = ['shoal', 'prove', *sys.argv[1:]]; sys.exit(main.main())"
)


def test_a_rank_that_hangs_is_named_with_its_stacks(tmp_path: Path, programs: Forks) -> None:
    """The one that waits for it would be blamed after 600 s."""
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "hangs.py").write_text(HANGS)
    words = ("-c", SOONER, *BASE, "model.build=hangs:Net", "--quick")
    done = programs.run(*words, cwd=tmp_path, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    told = [line for line in lines if line.startswith("shoal: no rank goes on for ")]
    assert told
    assert "rank 1 on " in told[-1]
    assert told[-1].endswith("its process is stopped (SIGSTOP)") or "SIGSTOP); the last" in told[-1]
    assert any(line.startswith("rank 0 (pid ") for line in lines), "where the others are"
    assert "thread MainThread:" in done.stderr
    assert any(line.startswith("shoal: rank 1 (pid ") for line in lines)
    assert not (tmp_path / "runs").exists()


def test_a_model_that_leans_on_its_rank_is_exit_3(tmp_path: Path, prove: Prove) -> None:
    code, out, err = prove("model.build=user:leaning", "--json", "--quick")
    assert code == 3, out + err
    report = json.loads(out)
    assert report["verdict"] == "different"
    assert report["steps"] == 2
    assert report["cause"]["name"] == "forward pass", report["cause"]["text"]
    assert "they look at the rank" in report["cause"]["cause"]
    assert report["cause"]["text"] in proof_text(report)
    assert proof_text(report).endswith(report["cause"]["advice"])
    assert {p["name"] for p in report["trajectories"][0]["parameters"]} == {
        "net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias",
    }  # fmt: skip
    assert not (tmp_path / "runs").exists()


def test_what_cannot_run_in_float64_is_exit_1(tmp_path: Path, prove: Prove) -> None:
    (tmp_path / "runs").mkdir()
    code, out, err = prove("model.build=user:single", "--quick")
    assert code == 1, out + err
    assert (
        "not proven: the model does not run in this precision: RuntimeError: "
        "\"my_kernel\" not implemented for 'Double'" in out
    )
    assert list((tmp_path / "runs").iterdir()) == []


def test_by_blocks_says_what_was_not_seen(prove: Prove) -> None:
    deep = ["model.name=llama", "model.dim=16", "model.heads=2", "model.layers=5", "layout.tp=2"]
    code, out, err = prove(*deep, "data.source=synthetic", "--by-blocks", "--quick")
    assert code == 0, out + err
    assert "\nequal, by blocks: tp " in out
    assert "\n  by blocks: the first 2 of 5 in blocks (1 kind) and both ends; not seen: " in out
    assert "blocks.1.mlp.up.weight" in out or "nearer ones" in out
    assert "blocks.2." not in out


def test_what_the_user_must_mend_is_exit_2(tmp_path: Path, prove: Prove) -> None:
    code, out, err = prove("model.build=user:build", "model.loss=user:mean_loss")
    assert code == 2, out + err
    assert "shoal: loss returned a mean: " in err
    code, _, err = prove("model.build=user:build", "train.batch=17")
    assert code == 2
    assert "try: train.batch=16" in err
    assert not (tmp_path / "runs").exists()


def test_under_another_launcher_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "prove"],
        cwd=tmp_path,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("shoal: prove: starts its own processes on this machine")


def test_help_is_light() -> None:
    probe = (
        "import sys; sys.argv = ['shoal', 'prove', '--help']\n"
        "from shoal.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert "3 different" in done.stdout


REPORT = {
    "verdict": "different", "reason": "", "said": [], "layout": "zero2 (dp_shard = 4)", "processes": 4,
    "precision": "fp64", "steps": 5, "seconds": 3.25,
    "cause": {"text": "head: seen. Likely cause: x. Next: y"},
    "trajectories": [{
        "optimizer": "sgd", "equal": False,
        "bounds": {"first": 1e-12, "later": 1e-12, "weights": 1e-12, "buffers": 1e-12},
        "largest": {"loss": 0.0, "gradient_norm": 0.0, "gradient": None, "weights": 0.5},
        "rows": [{"label": "", "step": 1, "targets": 8.0, "loss": [1.0, 1.0],
                  "grad_norm": [2.0, 1.0]}],
        "parameters": [
            {"name": "body", "shape": [2], "gradient": 1e-16, "step": 1, "weights": 0.0,
             "equal": True},
            {"name": "head", "shape": [2], "gradient": None, "step": 1, "weights": 0.5,
             "equal": False},
        ],
        "first": {"what": "gradient", "name": "head", "size": None, "bound": 1e-12, "row": 0},
        "cause": None,
    }],
}  # fmt: skip


def test_the_table_begins_with_what_differs() -> None:
    lines = proof_text(REPORT).splitlines()
    assert lines[0] == (
        "different: zero2 (dp_shard = 4) on 4 processes: the first difference is the gradient of "
        "head at step 1, 1e-12 is allowed (5 steps of sgd in fp64, 3.2 s)"
    )
    assert lines[5].split() == ["head", "∞", "1", "5.0e-01", "differs"]
    assert lines[6].split() == ["body", "1.0e-16", "1", "0"]
    assert lines[-1] == "head: seen. Likely cause: x. Next: y"
    assert proof_text(REPORT, worst=1).splitlines()[6] == "  … and 1 nearer ones"


@pytest.mark.parametrize("reason", ["memory: 3 GiB are missing", "time: an hour"])
def test_not_proven_has_its_reason(reason: str) -> None:
    told = {**REPORT, "verdict": "not proven", "reason": reason, "trajectories": []}
    assert verdict_line(told) == f"not proven: {reason}"


@pytest.mark.proof
def test_the_layout_that_is_asked_for_is_proven(prove: Prove) -> None:
    """With a policy of the layout's side; one process then computes every activation once."""
    code, out, err = prove(
        "model.build=user:build",
        "layout.strategy=fsdp",
        "memory.recompute=full",
        "--json",
    )
    assert code == 0, out + err
    assert json.loads(out)["layout"] == "fsdp (dp_shard = 2)"
