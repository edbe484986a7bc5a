"""No other user of the machine reaches what the ranks of a run meet at."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

import stranger
from shoal.launch import supervise
from shoal.launch.processes import PrivateStore

KINDS = [
    pytest.param(True, id="memory", marks=pytest.mark.skipif(
        not hasattr(os, "memfd_create"), reason="this system has no memfd")),
    pytest.param(False, id="folder"),
]  # fmt: skip
TRIES = {
    "reads": lambda path: Path(path).read_bytes().decode(),
    "overwrites": lambda path: Path(path).write_bytes(b""),
    "removes": lambda path: Path(path).unlink(),
    "lists": lambda path: os.listdir(os.path.dirname(path)),
    "makes one beside it": lambda path: Path(f"{path}0").touch(),
}


@pytest.mark.parametrize("in_memory", KINDS)
@pytest.mark.parametrize("tries", TRIES)
def test_another_user_is_refused(
    in_memory: bool, tries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger.needed("the store of one machine")
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    with contextlib.closing(PrivateStore()) as store:
        assert store.path.startswith("/proc/") == in_memory
        Path(store.path).write_text("where the ranks are")
        answer = stranger.as_nobody(lambda: TRIES[tries](store.path))
        assert answer in ("PermissionError", "FileNotFoundError"), answer
        assert Path(store.path).read_text() == "where the ranks are"


def test_another_user_is_let_into_what_is_open_to_all(tmp_path: Path) -> None:
    """The control: the fork that becomes nobody does read what others may read."""
    stranger.needed("the control of another user's tries")
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:2]:
        parent.chmod(0o755)
    (tmp_path / "open").write_text("open")
    assert stranger.as_nobody((tmp_path / "open").read_text) == "open"


@pytest.mark.parametrize("in_memory", KINDS)
def test_nothing_is_left(in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    store = PrivateStore()
    Path(store.path).write_text("something")
    store.close()
    store.close()
    assert not os.path.exists(store.path)
    assert not os.path.exists(os.path.dirname(store.path)) or in_memory


MEMBER = """
import json, os, sys
from pathlib import Path
from shoal.fabric import start_world
world = start_world()
inodes = {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
          if os.path.exists(f"/proc/self/fd/{n}")}
listens = [row.split()[1] for table in ("tcp", "tcp6")
           for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
           if row.split()[3] == "0A" and f"socket:[{row.split()[9]}]" in inodes]
told = world.gather_json([os.environ["SHOAL_STORE"], listens, world.run_once_per_machine(os.getpid)])
if world.is_first:
    Path(os.environ["SHOAL_RUN_FOLDER"], "told").write_text(json.dumps(told))
if os.environ["SHOAL_ATTEMPT"] == "0":
    sys.exit(1)
world.close()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_supervised_ranks_meet_there_and_listen_on_loopback_alone(tmp_path: Path) -> None:
    """Also after a restart; gloo's own port is the only one that a rank opens."""
    (tmp_path / "member_of_store.py").write_text(MEMBER)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    outcome = supervise(
        [sys.executable, "-m", "member_of_store"],
        processes=2,
        folder=tmp_path,
        restarts=1,
        environ=environ,
        imports=("shoal.fabric",),
        emit=lambda *_, **__: None,
    )
    assert (outcome.status, outcome.attempts) == ("finished", 2), outcome.message
    told = json.loads((tmp_path / "told").read_text())
    assert len({store for store, _, _ in told}) == 1
    assert len({first for _, _, first in told}) == 1
    for _, listens, _ in told:
        assert len(listens) == 1, listens
        assert listens[0].startswith("0100007F:")
