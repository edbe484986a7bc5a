"""Four gloo processes, started once each: on one disk, and on three that they do not share."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forks import Forks

SCRIPTS = ("checkpoint_world.py", "own_disks_world.py")
CHECKS = [
    (script, check)
    for script in SCRIPTS
    for check in re.findall(
        r"^def (check_\w+)", Path(__file__).with_name(script).read_text(), re.MULTILINE
    )
]


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, programs: Forks
) -> dict[tuple[str, str], dict[str, str]]:
    """(script, check) → {rank: traceback}."""
    found = {}
    for script in SCRIPTS:
        path, folder = Path(__file__).with_name(script), tmp_path_factory.mktemp("world")
        done = programs.run(str(path), str(folder), timeout=300)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert done.returncode == 0, done.stderr
        found |= {(script, line["check"]): line["failures"] for line in lines}
    return found


@pytest.mark.parametrize(("script", "check"), CHECKS)
def test_four_ranks(
    outcomes: dict[tuple[str, str], dict[str, str]], script: str, check: str
) -> None:
    assert (script, check) in outcomes, "the world ended before this check"
    found = outcomes[script, check]
    assert not found, "\n".join(f"rank {r}: {t}" for r, t in found.items())
