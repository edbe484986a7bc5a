"""A loop of one's own, unchanged, under Accelerate's and Lightning's own launchers, as under torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli_run import OWN_LOOP, final_hashes, trajectory

pytestmark = pytest.mark.proof
SCRIPT = (
    OWN_LOOP
    + """
for _ in range(2):
    for batch in run.loader(data):
        run.step(batch)
print(f"ranks {run.world.size}")
run.save()
run.close()
"""
)
AROUND = {
    # Both begin the processes and their group; the script finds them there.
    "fabric": """
import runpy
from lightning.fabric import Fabric

Fabric(accelerator="cpu", devices=2, strategy="ddp").launch()
runpy.run_path("own.py", run_name="__main__")
""",
    "accelerator": """
import runpy
from accelerate import Accelerator

Accelerator(cpu=True)
runpy.run_path("own.py", run_name="__main__")
""",
    "notebook": """
import runpy
from accelerate import notebook_launcher

def work():
    runpy.run_path("own.py", run_name="__main__")

if __name__ == "__main__":
    notebook_launcher(work, num_processes=2, use_port="PORT")
""",
}
PYTHON = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# With --cpu it starts one process alone, whatever number it is given; so as on a machine with GPUs.
ACCELERATE = [
    *(str(PYTHON / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    *("--main_process_port", "PORT"),
]
COMMANDS = {
    "accelerate launch": [*ACCELERATE, "own.py"],
    "accelerate launch, a group that exists": [*ACCELERATE, "accelerator.py"],
    "fabric run": [
        *(str(PYTHON / "fabric"), "run", "--accelerator", "cpu", "--devices", "2"),
        *("--strategy", "ddp", "--main-port", "PORT", "own.py"),
    ],
    "Fabric.launch": [sys.executable, "fabric.py"],
    "notebook_launcher": [sys.executable, "notebook.py"],
}


def run_by(command: list[str], folder: Path) -> Path:
    folder.mkdir()
    (folder / "own.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    for name, text in AROUND.items():
        (folder / f"{name}.py").write_text(text.replace("PORT", port))
    home = {"HF_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}  # nobody's own configuration
    done = subprocess.run(
        [word.replace("PORT", port) for word in command],
        cwd=folder,
        env={**os.environ, **home, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ranks 2" in done.stdout
    return folder / "run"


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_by([*TORCHRUN, "own.py"], tmp_path_factory.mktemp("torchrun") / "a")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_script_runs_unchanged(name: str, by_torchrun: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate" if "accel" in name or "note" in name else "lightning")
    run = run_by(COMMANDS[name], tmp_path / "b")
    assert len(trajectory(run)) == 26
    assert trajectory(run) == trajectory(by_torchrun)
    assert final_hashes(run) == final_hashes(by_torchrun)
