"""Every program that measures or proves can be started: what it imports is found from where it lies.

Most of them are run by hand, once in many sessions; a module that moves breaks them unseen.
"""

from __future__ import annotations

from pathlib import Path

from forks import Forks

ROOT = Path(__file__).resolve().parents[1]
WHERE = ("tests/proof", "tests/simgpu", "benchmarks", "benchmarks/planner")
PROGRAMS = sorted(
    path
    for folder in WHERE
    for path in (ROOT / folder).glob("*.py")
    if "__main__" in (text := path.read_text()) and "argparse" in text
)
ELSEWHERE = ("transformers", "peft", "accelerate", "deepspeed", "datasets", "ray")
"""Of the second environment, in which some of them run."""
LOADED = """
import runpy, sys
from pathlib import Path
root, before = Path(sys.argv[1]), set(sys.modules)
paths = [path for path in sys.path if path and Path(path) != root / "tests"]
for program in sys.argv[2:]:
    sys.path[:] = [str(Path(program).parent), *paths]
    sys.argv[:] = [program]
    try:
        runpy.run_path(program, run_name="loaded")
    except ImportError as error:
        print(f"{Path(program).relative_to(root)}: {error}")
    for name in set(sys.modules) - before:
        where = getattr(sys.modules[name], "__file__", None) or ""
        if where.startswith((str(root / "tests"), str(root / "benchmarks"))):
            del sys.modules[name]
"""


def test_every_program_finds_what_it_imports(programs: Forks) -> None:
    assert len(PROGRAMS) > 30
    told = programs.run("-c", LOADED, str(ROOT), *map(str, PROGRAMS), timeout=300)
    lines = [
        line for line in told.stdout.splitlines() if not line.endswith(tuple(map(repr, ELSEWHERE)))
    ]
    assert (lines, told.returncode) == ([], 0), told.stderr[-2000:]
