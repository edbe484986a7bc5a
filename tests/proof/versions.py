"""The claimed versions, run: fresh environments in which the wheel is installed and used.

    oldest   torch 2.11.0 × Python 3.12        newest   torch 2.13.0 × Python 3.13
    (`make test` itself runs torch 2.13.0 × Python 3.11)

In each: the wheel installs by pip from its declared dependencies; away from the checkout, the
demo (a short `shoal train` on two processes) ends with 0 and can be exported; a sample of
`make test` passes against the installed package. `make test-versions` runs it and keeps what it saw
in proof/results/versions.json, row by row, each with a hash of what ran. A Python that is not on this
machine is a row that says so, and makes the exit status 1: it was not seen. `--only 3.13` runs one row
and keeps the others of the same source. Downloads a few GB where no CPU build is at hand.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "proof" / "results" / "versions.json"
CLAIMED = (("3.12", "2.11.0"), ("3.13", "2.13.0"))
SAMPLE = [
    "tests/optim/test_optimizer_probe.py",
    "tests/parallel/spmd/test_apply.py",
    "tests/parallel/pipeline/test_runtime.py",
    "tests/parallel/test_recompute.py",
    "tests/checkpoint/test_checkpoint_damage.py",
    "tests/launch/test_fork_server.py",
    "tests/worlds/layouts/test_equality.py",
    "tests/worlds/layouts/test_any_module.py",
]
LIGHT = "not 4 and not 8 and not hf"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--only", choices=[python for python, _ in CLAIMED], default="")
    asked = parser.parse_args()
    source = hash_of_what_ran()
    known = json.loads(TARGET.read_text())["rows"] if asked.only and TARGET.exists() else []
    rows = {row["python"]: row for row in known if row.get("source") == source}
    for python, torch in CLAIMED:
        if asked.only in ("", python):
            row = {"python": python, "torch": torch, "source": source}
            rows[python] = row = {**row, **one(python, torch, asked.at)}
            write([rows[name] for name, _ in CLAIMED if name in rows])
            print(
                f"Python {python}, torch {torch}: {row['state']} ({row['seconds']} s)", flush=True
            )
    print(f"written: {TARGET.relative_to(ROOT)}")
    return 0 if [row["state"] for row in rows.values()] == ["passed"] * len(CLAIMED) else 1


def hash_of_what_ran() -> str:
    """Of what ran: the package and the sample of its tests."""
    total = hashlib.sha256()
    files = [ROOT / test.split("::")[0] for test in SAMPLE]
    for path in sorted({*(ROOT / "src").rglob("*.py"), *files}):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def one(python: str, torch: str, at: Path) -> dict[str, Any]:
    """One pair of versions; the first step that fails ends it."""
    began_s = time.monotonic()
    done: list[str] = []
    told: dict[str, Any] = {"steps": done, "output": []}
    found = interpreter(python)
    state = f"no Python {python} on this machine"
    if found:
        folder = at / f"python-{python}-torch-{torch}"
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory() as away:
            state = "passed"
            for name, command in steps(found, torch, folder):
                code, output = call(command, Path(away))
                if code:
                    state, told["output"] = f"{name} failed", output.splitlines()[-40:]
                    break
                done.append(f"{name}: {last_line(output)}")
                print(f"  {done[-1]}", flush=True)
    return {"state": state, "seconds": round(time.monotonic() - began_s), **told}


def steps(found: str, torch: str, folder: Path) -> list[tuple[str, list[str]]]:
    """(what, command): each runs in a folder where nothing of the checkout is."""
    python = str(folder / "bin" / "python")
    wheel = max((ROOT / "build" / "dist").glob("shoal-*.whl"), key=lambda p: p.stat().st_mtime)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    version = (
        f"import torch; assert torch.__version__.split('+')[0] == '{torch}', torch.__version__"
    )
    shoal = str(folder / "bin" / "shoal")
    tests = [python, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", "-k", LIGHT]
    return [
        ("environment", [found, "-m", "venv", str(folder)]),
        (
            "the wheel installs",
            [*pip, f"torch=={torch}", "--find-links", str(wheel.parent), str(wheel)],
        ),
        ("versions", [python, "-c", version]),
        ("it is the wheel", [python, "-c", IS_WHEEL, str(folder)]),
        ("help", [shoal, "--help"]),
        ("demo", [shoal, "train", *DEMO]),
        ("export", [shoal, "checkpoint", "export", "runs/demo", "model.safetensors"]),
        ("test tools", [*pip, "pytest>=8", "scikit-learn>=1.4"]),
        ("sample of tests", [*tests, "--rootdir", str(ROOT), *(str(ROOT / t) for t in SAMPLE)]),
    ]


DEMO = ["train.steps=10", "launch.processes=2", "model.dim=64", "model.layers=2", "run.name=demo"]
IS_WHEEL = (
    "import pathlib, sys, shoal; home = pathlib.Path(shoal.__file__).parent; "
    "assert home.is_relative_to(sys.argv[1]), home; assert (home / 'py.typed').exists()"
)


def interpreter(version: str) -> str:
    """The Python of that version: on PATH, or one that pyenv built; "" for none."""
    named = shutil.which(f"python{version}")
    built = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for path in [*([named] if named else []), *map(str, reversed(built))]:
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:  # no empty shim
            return path
    return ""


def call(command: list[str], away: Path) -> tuple[int, str]:
    """(exit code, output), with nothing of this checkout to import but what was installed."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ |= {"SHOAL_CACHE": str(away / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=away, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def last_line(output: str) -> str:
    told = [line for line in output.strip().splitlines() if not line.startswith("WARNING")]
    return (told or ["ok"])[-1][:160]


def write(rows: list[dict[str, Any]]) -> None:
    result = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "rows": rows,
    }
    TARGET.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
