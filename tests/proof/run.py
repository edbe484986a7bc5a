"""Run the long matrices, all or by name: `make proof`, `make proof PART=faults`, `PART="kills flips"`.

    a part   a name → its commands, in order; a part stops at its first command that fails
    python   `.venv`'s, with the development tools · heavy  `.venv-proof`'s, with all extras
    flower   `.venv-flower`'s, which has Flower and its own dependencies

Each program resumes where it stopped and writes its own results; see its docstring. The exit status
is 1 if a part failed; the others run all the same.
"""

from __future__ import annotations

import difflib
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIGHT, HEAVY = ".venv/bin/python", ".venv-proof/bin/python"
FLOWER = ".venv-flower/bin/python"
PROOFS = "proof/results"

PARTS: dict[str, tuple[str, ...]] = {
    "kills": ("python tests/proof/kills.py",),
    "flips": ("python tests/proof/flips.py",),
    "guards": ("python tests/proof/guards.py --off",),
    "endings": tuple(
        f"python tests/proof/endings.py {what} --out {PROOFS}/endings.json"
        for what in ("worlds", "nodes", "sharded", "differ", "closed")
    ),
    "manifests": (
        f"python tests/proof/manifest_mutations.py --write {PROOFS}/manifest_mutations.json",
    ),
    "hangs": (
        "python tests/proof/hangs.py",
        "python tests/proof/hangs.py --simulated",
        "python tests/proof/hangs_nodes.py",
        "python tests/proof/loop_hangs.py",
    ),
    "slow": ("python tests/proof/slow_ranks.py",),
    "verdicts": (
        f"python tests/report/made_verdicts.py --trials 1600 --out {PROOFS}/made-verdicts.json",
        "python tests/proof/verdicts.py",
        "python tests/proof/proof_pages.py verdict",
    ),
    "serve": ("python tests/proof/serve_requests.py",),
    "servers": ("python tests/proof/servers.py",),
    "report": (
        "python tests/proof/report_pages.py",
        "python tests/proof/comparison_pages.py",
        "python tests/proof/proof_pages.py report",
    ),
    "traceml": (
        "python tests/proof/beside_traceml.py",
        "python tests/proof/proof_pages.py verdict",
    ),
    "watch": ("python tests/proof/watch_cost.py", "python tests/proof/watch_layouts.py"),
    "owners": ("python tests/proof/owners.py", "python tests/proof/proof_pages.py owners"),
    "flower": ("make .venv-flower/.installed", "flower tests/proof/flower_quickstart.py"),
    "learn": (
        "python -m pytest tests/test_learn_pages.py -m proof",
        "python tests/proof/learn_site.py --build",
    ),
    "sinks": ("heavy -m pytest tests/trainer/test_sinks.py -m proof --part sinks",),
    "share": ("python -m pytest tests -m proof --part share",),
    "doors": ("heavy tests/proof/door_scripts.py",),
    "scripts": (
        "python tests/proof/script_proofs.py",
        "python -m pytest tests -m proof --part scripts",
    ),
    "quick-proof": ("python tests/proof/quick_proof_cost.py",),
    "branches": ("python tests/proof/branches.py", "python tests/proof/step_counts.py"),
    "old-folders": ("python tests/proof/old_folders.py",),
    "replays": ("python tests/proof/replays.py", "python tests/proof/replay_page.py"),
    "protocol": ("python tests/proof/protocol.py",),
    "members": ("python tests/proof/members.py",),
    "statistics": (
        "python tests/proof/statistics_rows.py",
        "python tests/proof/replay_page.py",
    ),
    "traces": ("python tests/proof/traces.py", "python tests/proof/replay_page.py"),
    "faults": ("python tests/proof/faults.py", "python -m pytest tests -m proof --part faults"),
    "diagnosed": ("python tests/proof/diagnosed.py --seed 35",),
    "poison": (f"python tests/proof/poison.py --out {PROOFS}/poison.json",),
    "equality": ("python tests/proof/equality.py", "python tests/proof/formats.py"),
    "residual": ("python tests/proof/residual.py",),
    "modules": (
        "python tests/proof/any_module.py",
        "python tests/proof/compositions.py",
        "python tests/proof/families.py",
        "heavy tests/proof/architectures.py",
    ),
    "memory": (
        "heavy tests/proof/bytes_read.py",
        "python tests/proof/exported.py",
        "python tests/proof/long_context.py",
        "python tests/proof/size.py",
    ),
    "pipelines": ("python tests/worlds/pipe_makespan.py",),
    "devices": (
        f"python tests/simgpu/device_lines.py --out {PROOFS}/device-lines.json",
        f"python tests/simgpu/mutants.py --out {PROOFS}/mutants.json",
        f"python tests/simgpu/seeds.py --out {PROOFS}/seeds.json",
    ),
    "deadlines": ("python benchmarks/deadlines.py",),
    "tests": ("heavy -m pytest -m proof",),
    "counts": ("python tests/proof/hf_counts.py",),
    "habits": (
        "python tests/proof/habit_matrix.py",
        "python tests/proof/proven_habits.py",
        "python -m pytest tests/worlds/habits -m proof",
    ),
    "versions": ("make test-versions", "heavy tests/proof/public_names.py"),
    "touch": ("python tests/touch/touch_map.py",),
    "rooms": ("python tests/proof/quick_rooms.py",),
    "mends": ("python tests/proof/mends.py",),
}
"""Name of a part → its commands. `faults`: also the siblings of each silent fault that was mended."""


def chosen(names: list[str]) -> list[str]:
    """Return the parts to run, all of them for no name.

    Raises:
        SystemExit: a name that is no part, with the one that is spelt like it.
    """
    for name in names:
        if name not in PARTS:
            close = difflib.get_close_matches(name, PARTS, 1)
            raise SystemExit(f"PART={name}: no such part; try: {(close or [', '.join(PARTS)])[0]}")
    return names or list(PARTS)


def run(command: str) -> int:
    """Run one command in the repository's root and return its exit status."""
    word, *rest = shlex.split(command)
    if word == "heavy":
        subprocess.run(["make", "proof-env"], cwd=ROOT, check=True)
    program = {"python": LIGHT, "heavy": HEAVY, "flower": FLOWER}.get(word, word)
    sys.stderr.write(f"{program} {' '.join(rest)}\n")
    return subprocess.run([program, *rest], cwd=ROOT, check=False).returncode


def main() -> int:
    """Run the parts named on the command line; 1 if one of them failed."""
    failed = []
    for part in chosen(sys.argv[1:]):
        began = time.monotonic()
        if any(run(command) for command in PARTS[part]):
            failed.append(part)
        sys.stderr.write(f"{part}: {time.monotonic() - began:.0f} s\n")
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
