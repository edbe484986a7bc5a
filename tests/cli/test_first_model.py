"""The new user's page: every command of docs/start/first-model.md, in its order, as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "start" / "first-model.md"
LIMIT_S = 900


def commands() -> list[str]:
    """The page's commands; a heredoc is one."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for block in blocks:
        found += [block] if "<<" in block else block.splitlines()
    return found


def test_they_are_at_most_ten() -> None:
    assert 5 < len(commands()) <= 10
    assert commands()[0].startswith("pip install 'shoal[")


@pytest.mark.proof
def test_they_run(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    place = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    place["SHOAL_CACHE"] = str(tmp_path / "cache")
    said = []
    for command in commands()[1:]:
        done = subprocess.run(
            command, shell=True, executable="/bin/bash", cwd=tmp_path, env=place,
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        said.append(done.stdout)
    assert said[1].startswith("def read")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 8
    assert (tmp_path / "tuned-model" / "config.json").is_file()
    assert not list((tmp_path / "tuned-model").glob("adapter*")), "merged"
    assert "random.choice: " in said[-1]
