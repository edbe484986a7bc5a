"""The examples with torch RPC run, compute what one process computes, and stay on this machine."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from forks import Forks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "rpc"
UP = [
    one.parent.name for one in Path("/sys/class/net").glob("*/operstate") if "up" in one.read_text()
]
ELSEWHERE = {f"{who}_SOCKET_IFNAME": name for name in UP[:1] for who in ("TP", "GLOO")}
"""A setting that would have them listen on another interface, where there is one."""
SAID = "Not part of Shoal: RPC runs its peers' pickles by design"


def listening(pid: int) -> set[str]:
    """Addresses, in /proc's hexadecimal, on which a process and its children wait."""
    sockets: set[str] = set()
    found, pids = set(), [pid]
    for one in pids:
        folder = Path("/proc", str(one))
        with suppress(OSError):  # it has ended
            pids += [int(child) for child in (folder / f"task/{one}/children").read_text().split()]
            for path in (folder / "fd").iterdir():
                with suppress(OSError):  # it was closed
                    sockets.add(os.readlink(path))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == "0A" and f"socket:[{row[9]}]" in sockets:
                found.add(row[1].partition(":")[0])
    return found


def run(programs: Forks, name: str) -> tuple[float, set[str]]:
    """The loss that an example prints, and where it listened meanwhile."""
    running = programs.start((str(EXAMPLES / name),), ELSEWHERE, cwd=EXAMPLES)
    found: set[str] = set()
    end = time.monotonic() + 180
    while running.poll() is None and time.monotonic() < end:
        found |= listening(running.pid)
        time.sleep(0.02)
    running.kill()
    out, error = running.communicate()
    assert running.returncode == 0, error[-2000:]
    told = re.match(r"loss (\S+) after", out)
    assert told, out
    return float(told[1]), found


def served() -> float:
    """The same as the parameter server's by one process: means of both trainers' gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draws = [torch.Generator().manual_seed(rank) for rank in (1, 2)]
    for _ in range(20):
        losses = []
        for one in draws:
            inputs = torch.randn(16, 8, generator=one)
            targets = inputs.sum(1, keepdim=True).tanh()
            losses.append(nn.functional.mse_loss(model(inputs), targets))
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return sum(one.item() for one in losses) / 2


def piped() -> float:
    """The same as the pipeline's by one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    draws = torch.Generator().manual_seed(0)
    for _ in range(10):
        inputs = torch.randn(32, 8, generator=draws)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).tanh())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and forks")
@pytest.mark.parametrize(
    ("name", "alone"), [("parameter_server.py", served), ("pipeline.py", piped)]
)
def test_it_computes_what_one_process_does_and_listens_on_this_machine_alone(
    programs: Forks, name: str, alone: Callable[[], float]
) -> None:
    for _ in range(3):  # a busy machine may look away while it listens
        loss, where = run(programs, name)
        assert loss == pytest.approx(alone(), rel=1e-5)
        assert where <= {"0100007F"}, "127.0.0.1"
        if where:
            return
    pytest.fail("it was never seen listening")


def test_each_says_that_it_runs_pickles_and_is_not_part_of_shoal() -> None:
    paths = sorted(EXAMPLES.glob("*.py"))
    assert [path.name for path in paths] == ["parameter_server.py", "pipeline.py"]
    for path in paths:
        text = path.read_text()
        assert len(text.splitlines()) <= 60
        assert SAID in text
        assert f"python examples/rpc/{path.name}" in text.split('"""')[1]
        assert "import shoal" not in text


def test_where_no_pickle_is_promised_the_one_exception_stands_in_the_same_sentence() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    promises = [
        (page.name, said)
        for page in pages
        for said in re.split(r"\.\s|;|\|", page.read_text())
        if re.search(r"[Nn]o pickle is (ever )?(read|executed|run)", " ".join(said.split()))
    ]
    assert promises
    for page, said in promises:
        assert "examples/rpc" in said, f"{page}: {said}"


def test_nothing_of_shoal_itself_speaks_rpc() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    assert not [text for text in sources if re.search(r"distributed(\.| import )rpc\b", text)]
