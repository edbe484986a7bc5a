"""What `shoal launch ssh` writes, run over a real sshd of the test's own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_run import lines

pytestmark = pytest.mark.proof
SSHD = "/usr/sbin/sshd"
HOST = "127.0.0.1"
WORDS = [
    "data.source=synthetic", "model.dim=32", "model.layers=2", "model.heads=2", "train.batch=8",
    "train.micro_batch=2", "train.steps=400", "precision.compute=fp32", "train.prove=off",
    "run.name=run", "train.on=['slowly:Slowly']",
]  # fmt: skip
SLOWLY = """
import time

class Slowly:
    def __init__(self, folder):
        pass

    def __call__(self, event):
        if event.get("event") == "step":
            time.sleep(0.2)
"""


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which `ssh` reaches an sshd of this test; skipped, aloud, without one."""
    if not Path(SSHD).exists() or shutil.which("ssh") is None or os.geteuid():
        warnings.warn("a real sshd NOT TESTED: it is not installed, or needs root", stacklevel=2)
        pytest.skip("no sshd")
    folder = tmp_path / "sshd"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True)
    python = Path(sys.executable).parent
    # sshd gives none of this test's environment to the ranks, so no path to this Python either.
    given = {
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "OMP_NUM_THREADS": "1",
    }
    words = ",".join(f'environment="{name}={value}"' for name, value in given.items() if value)
    (folder / "authorized").write_text(f"{words} {(folder / 'user.pub').read_text()}")
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress {HOST}\nHostKey {folder}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nPermitRootLogin yes\n"
        "PermitUserEnvironment yes\n"
    )
    (folder / "config").write_text(
        f"Host *\n Port {port}\n IdentityFile {folder}/user\n StrictHostKeyChecking no\n"
        f" UserKnownHostsFile {folder}/known\n LogLevel ERROR\n"
    )
    # What `shoal launch ssh` calls is plain `ssh`: the test's own configuration stands before it.
    own = folder / "bin"
    own.mkdir()
    (own / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    (own / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL
    )
    yield {**os.environ, "PATH": f"{own}:{python}:{os.environ['PATH']}"}
    daemon.terminate()
    daemon.wait()


def test_two_hosts_start_and_the_end_of_the_connection_lets_them_save(
    ssh: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "slowly.py").write_text(SLOWLY)
    (tmp_path / "hosts").write_text(f"{HOST} slots=1\nroot@{HOST} slots=1\n")
    command = [str(Path(sys.executable).parent / "shoal"), "launch", "ssh", *WORDS]
    script = subprocess.run(
        [*command, "--hosts", "hosts"],
        cwd=tmp_path, env=ssh, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (tmp_path / "start.sh").write_text(script)
    run = tmp_path / "runs" / "run"
    with (tmp_path / "out").open("wb") as out:
        start = subprocess.Popen(
            ["bash", "start.sh"], cwd=tmp_path, env=ssh, stdout=out, stderr=out
        )

    def told() -> str:
        return (tmp_path / "out").read_text()[-3000:]

    until_s = time.monotonic() + 90
    while not (run / "metrics.jsonl").exists() or len(lines(run / "metrics.jsonl")) < 5:
        assert start.poll() is None, told()
        assert time.monotonic() < until_s, told()
        time.sleep(0.3)
    ranks = [one["pid"] for one in lines(run / "events.jsonl") if one["event"] == "worker_started"]
    assert len(set(ranks)) == 2
    for pid in ranks:  # the token is no word of any command
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        token = Path(f"/proc/{pid}/environ").read_bytes().split(b"SHOAL_TOKEN=")[1].split(b"\0")[0]
        assert len(token) >= 32
        assert token not in words
    start.terminate()  # what its EXIT trap does at Ctrl-C, too: the connections end
    start.wait(30)
    until_s = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < until_s, told()
        time.sleep(0.3)
    steps = [row["step"] for row in lines(run / "metrics.jsonl")]
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [f"step-{steps[-1]}"]
