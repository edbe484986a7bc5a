"""Takes each wait, record and event of `src` away in turn: does the simulated device notice?

    python tests/simgpu/mutants.py [--out FILE] [--only WORD]     about 40 CPU-seconds a line

A mutant is one line changed in a copy of the source; the rows of `own_loop.py` that reach the line run
on 2 simulated devices, seed 0. Red: a report, an error, or numbers that differ from the CPU's. A line
that nothing here reaches counts as alive.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src"

ORDERS = re.compile(
    r"\.wait\(\)|\.wait_event\(|\.wait_stream\(|\.record_event\(|\.record_stream\(|\.synchronize\(\)"
    r"|_queued\.record\(\)"
)
# Rooms whose waits are for threads, processes and clocks of the host.
NOT_OF_A_DEVICE = (
    "cli/",
    "islands/",
    "launch/",
    "trainer/",
    "machine/",
    "checkpoint/background.py",
)
ROWS: dict[str, tuple[str, ...]] = {
    "fabric/coded_sums.py": ("compress", "topk"),
    "fabric/codecs/coded_scatter.py": ("int8 zero",),
    "fabric/low_rank.py": ("powersgd",),
    "fabric/ring.py": ("cp",),
    "fabric/point_to_point.py": ("pp", "cp"),
    "fabric/uneven_collectives.py": ("zero2",),
    "parallel/data_parallel/zero.py": ("zero1", "bf16 weights"),
    "parallel/data_parallel/buckets.py": ("ddp", "zero1"),
    "parallel/data_parallel/compress.py": ("compress", "powersgd"),
    "parallel/pipeline/messages.py": ("pp",),
    "parallel/offload.py": ("offload activations", "offload optimizer"),
    "checkpoint/hostcopy.py": ("saved",),
}
ROUNDED = {
    "bf16 weights"
}  # autocast of a GPU and of the CPU know other lists: reports count, numbers not
EVERYTHING = ("ddp", "zero1", "zero2", "fsdp", "tp", "pp", "cp", "ep", "compress", "saved")


def without(line: str) -> str:
    """The line with its wait, record or event gone, and otherwise as alive as can be."""
    indent = line[: len(line) - len(line.lstrip())]
    text = line.strip()
    if ".record_event(" in text:
        return re.sub(r"[\w.]+\.record_event\([^)]*\)", "torch.cuda.Event()", line)
    if re.fullmatch(
        r"[\w.()]+\.(wait|wait_event|wait_stream|record_stream|synchronize|record)\(.*\)", text
    ):
        return f"{indent}pass"
    return re.sub(r"([\w.]+(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?)\.wait\(\)", r"\1.tensor", line)


def orders() -> list[tuple[str, int]]:
    """(file, line) of everything that orders work of a device."""
    found = []
    for path in sorted((SOURCE / "shoal").rglob("*.py")):
        name = str(path.relative_to(SOURCE / "shoal"))
        if name.startswith(NOT_OF_A_DEVICE) or "heartbeat" in name:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if ORDERS.search(line) and "``" not in line and not line.strip().startswith(("#", '"')):
                found.append((name, number))
    return found


def part(name: str) -> Any:
    """A module beside this one."""
    found = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def differs(ours: Any, expected: list[float]) -> str:
    """Why a row is red; empty: it is not."""
    if isinstance(ours, str):
        return ours
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours, expected, strict=True))
    return f"numbers differ by {apart:.1e}" if not apart <= 1e-12 else ""


def verdict(
    tests: Any, source: Path, rows: tuple[str, ...], environ: dict[str, str], cpu: dict
) -> str:
    """What was red with this source; empty: nothing."""
    paths = os.pathsep.join((str(HERE / "site"), str(source)))
    try:
        told = tests.world(2, rows, {**environ, "PYTHONPATH": paths})
    except AssertionError as failure:
        reports = re.findall(r"simulated device: .*", str(failure))
        return reports[0] if reports else f"a rank ended: {str(failure)[-200:]}"
    except subprocess.TimeoutExpired:
        return "no answer in time"
    reports = re.findall(r"simulated device: no order.*", told["said"])
    numbers = [
        f"{r}: {why}"
        for r in rows
        if (why := differs(told["rows"][r], told["rows"][r] if r in ROUNDED else cpu[r]))
    ]
    return next(iter([*reports, *numbers]), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="files with this in their name")
    asked = parser.parse_args()
    library = part("simulated/build").library()
    environ = {**os.environ, "SIM_LIBRARY": str(library), "SIM_SEED": "0", "SIM_DEVICES": "4"}
    tests = part("test_own_loop")
    lines = [o for o in orders() if asked.only in o[0]]
    needed = tuple(dict.fromkeys(r for name, _ in lines for r in ROWS.get(name, EVERYTHING)))
    cpu = tests.world(2, needed, tests.plain())["rows"]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "src"
        shutil.copytree(SOURCE, copied)
        clean = verdict(tests, copied, needed, environ, cpu)
        print("unchanged:", clean or "green", flush=True)
        for name, number in lines:
            path = copied / "shoal" / name
            kept = path.read_text()
            text = kept.splitlines()
            was, text[number - 1] = text[number - 1].strip(), without(text[number - 1])
            path.write_text("\n".join(text) + "\n")
            said = verdict(tests, copied, ROWS.get(name, EVERYTHING), environ, cpu)
            path.write_text(kept)
            results.append({"file": name, "line": number, "was": was, "said": said})
            print(
                "red  " if said else "ALIVE", f"{name}:{number}", was, "|", said[:160], flush=True
            )
    red = sum(bool(r["said"]) for r in results)
    print(f"{red} of {len(results)} red")
    if asked.out:
        asked.out.write_text(json.dumps({"unchanged": clean, "mutants": results}, indent=1) + "\n")
    return int(bool(clean) or red < 0.9 * len(results))


if __name__ == "__main__":
    raise SystemExit(main())
