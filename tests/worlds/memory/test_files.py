"""States in mapped files: a model whose states are three times the memory trains, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from memory_cgroup import Cgroup, memory_cgroup

CASE = Path(__file__).parents[1] / "files_case.py"
MODEL = {"dim": 1024, "layers": 6, "steps": 2, "folder": "", "restore": False, "limit_bytes": 0}
IN_FILES = {"offload": "parameters", "to": "files"}
IN_MEMORY = {"offload": "none", "to": "host"}
STATES_BYTES = 1_130_577_920
LIMIT_BYTES = STATES_BYTES // 3
"""Half of it is Python, torch and its threads."""

Told = dict[str, Any]


def train(**asked: Any) -> Told:
    done = subprocess.run(
        [sys.executable, str(CASE), json.dumps({**MODEL, **asked})],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told: Told = json.loads(done.stdout)
    return told


@pytest.fixture(scope="module")
def plain() -> Told:
    told = train(**IN_MEMORY)
    assert told["states_bytes"] == STATES_BYTES
    return told


@pytest.mark.proof  # that all of them lie in files: the last test
def test_states_of_three_times_the_private_memory_train(plain: Told) -> None:
    """What cannot be written to a file counts: RLIMIT_DATA, over the whole life of the process."""
    assert train(**IN_FILES, limit_bytes=LIMIT_BYTES) == plain


@pytest.mark.proof
def test_in_memory_they_do_not_fit() -> None:
    asked = json.dumps({**MODEL, **IN_MEMORY, "limit_bytes": LIMIT_BYTES})
    done = subprocess.run(
        [sys.executable, str(CASE), asked], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode != 0
    assert "alloc" in done.stderr


@pytest.mark.proof
def test_states_of_three_times_a_memory_cgroups_limit_train_and_resume(
    plain: Told, tmp_path: Path
) -> None:
    """Where every page counts, those of files too: they are written out as room is needed."""
    told: Told = {}
    for steps, restore in ((1, False), (1, True)):
        asked = {**MODEL, **IN_FILES, "steps": steps, "folder": str(tmp_path), "restore": restore}
        with memory_cgroup(LIMIT_BYTES) as group:
            if not isinstance(group, Cgroup):
                warnings.warn(f"RLIMIT_DATA in the place of a memory cgroup: {group}", stacklevel=1)
                told = train(**{**asked, "limit_bytes": LIMIT_BYTES})
                continue
            done = group.run([str(CASE), json.dumps(asked)], deadline_s=240)
            assert done.returncode == 0, done.stderr[-3000:]
            assert group.peak_bytes <= LIMIT_BYTES
            told = json.loads(done.stdout)
    assert told["losses"] == plain["losses"][1:]
    assert {**told, "losses": 0} == {**plain, "losses": 0}


@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(n, marks=pytest.mark.proof) for n in ("ddp", "zero1", "zero2")), "fsdp"],
)
def test_every_layout_keeps_its_bits_in_files(worlds, layout: str) -> None:
    """What lies in files, a rank's own parts of weights and moments, are the numbers without."""
    policies = [
        {},
        {"offload": "optimizer", "offload_to": "files"},
        {"offload": "parameters", "offload_to": "files"},
    ]
    for plain, moments, all_ in worlds(2).call(
        "elsewhere_case:trained", layout=layout, words=policies, deadline_s=200
    ):
        assert plain["files"] == 0
        assert 0 < moments["files"] < all_["files"] == all_["large"]
        for told in (moments, all_):
            assert told["losses"] == plain["losses"]
            assert told["states"] == plain["states"]
