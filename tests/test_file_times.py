"""Twelve files of an older commit run with that commit's source, in every process they start."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from file_times import BASE_TABLE, ROOT, TWELVE, cpu_s, make_environment

IN_A_CHILD = """
import subprocess, sys
import msgspec, shoal
print(shoal.__file__, flush=True)
here = "import shoal; print(shoal.__file__)"
for words in (["-c", here], ["-I", "-c", here], ["-m", "shoal"]):
    subprocess.run([sys.executable, *words], env={}, cwd="/", check=True)
"""


def test_all_processes_of_the_environment_import_its_source(tmp_path: Path) -> None:
    package = tmp_path / "src" / "shoal"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("print(__file__)")
    python = make_environment(tmp_path / "environment", tmp_path / "src")
    done = subprocess.run([python, "-c", IN_A_CHILD], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = [Path(line) for line in done.stdout.splitlines()]
    assert len(found) == 4
    assert {path.parent for path in found} == {package}


def test_the_twelve_files_are_a_tenth_of_the_committed_table() -> None:
    table = json.loads(BASE_TABLE.read_text())
    twelve = [file for files in TWELVE for file in files]
    assert len(set(twelve)) == 12
    assert set(twelve) == set(table["twelve"]["files"])
    share = cpu_s({file: table["files"][file] for file in twelve}) / cpu_s(table["files"])
    assert share >= 0.10
