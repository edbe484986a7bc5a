"""Four gloo processes, started once: dealt writing, resharding, and shared failures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forks import Forks

SCRIPT = Path(__file__).with_name("checkpoint_world.py")
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, programs: Forks
) -> dict[str, dict[str, str]]:
    """check → {rank: traceback}."""
    done = programs.run(str(SCRIPT), str(tmp_path_factory.mktemp("world")), timeout=120)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr
    return {line["check"]: line["failures"] for line in lines}


@pytest.mark.parametrize("check", CHECKS)
def test_four_ranks(outcomes: dict[str, dict[str, str]], check: str) -> None:
    assert check in outcomes, "the world ended before this check"
    assert not outcomes[check], "\n".join(f"rank {r}: {t}" for r, t in outcomes[check].items())
