"""Takes each wait, record and event of `src` away in turn: does the simulated device notice?

    python tests/simgpu/mutants.py [--out FILE] [--only WORD]     about 40 CPU-seconds a line

A mutant is one line changed in a copy of the source; the rows of `own_loop.py` that reach the line run
on 2 simulated devices, seed 0; for states on the host `offload_case.py` on one. Red: a report, an error,
or numbers that differ from those of the unchanged source. A line that nothing here reaches counts as
alive. `--out` is written after every line, and lines that it has are not run again.

Not of a device, and left out: waits for threads, processes and clocks of the host; `synchronize`
around a measurement (machine/), whose absence makes a number of seconds wrong and nothing else.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ranks import on_cpu, world
from simulated.build import library

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src"

ORDERS = re.compile(
    r"\.wait\(\)|\.wait_event\(|\.wait_stream\(|\.record_event\(|\.record_stream\(|\.synchronize\("
    r"|\bevent\.record\(\)|lane\.(wait|finish)\("
)
# Rooms whose waits are for threads, processes and clocks of the host.
NOT_OF_A_DEVICE = (
    "cli/",
    "islands/",
    "launch/",
    "trainer/",
    "machine/",
    "checkpoint/save/background_save.py",
)
HOST = "host: "
"""Rows of `offload_case.py`: what waits on the host."""
ROWS: dict[str, tuple[str, ...]] = {
    "fabric/compressed/compressed_sums.py": ("compress", "topk", "int8 zero", "one-bit fsdp"),
    "fabric/compressed/powersgd.py": ("powersgd",),
    "fabric/exchanges/ring_exchange.py": ("cp", "ring"),
    "fabric/exchanges/point_to_point.py": ("pp", "cp"),
    "fabric/collectives/uneven_collectives.py": ("zero2",),
    "parallel/data_parallel/zero.py": ("zero1", "bf16 weights"),
    "parallel/data_parallel/buckets.py": ("ddp", "zero1"),
    "parallel/data_parallel/compress.py": ("compress", "powersgd"),
    "parallel/pipeline/stage_messages.py": ("pp",),
    "parallel/offload/offloaded_activations.py": ("offload activations", "parked"),
    "parallel/offload/copy_stream.py": (
        "offload activations",
        "lane",
        "host: optimizer",
        "host: parameters",
    ),
    "parallel/offload/optimizer_state.py": ("host: optimizer", "host: parameters"),
    "parallel/offload/parameters.py": ("host: parameters", "host: half a backward pass"),
    "checkpoint/save/host_copy.py": ("saved",),
    "fabric/device.py": ("saved", "synchronised"),
}
NOT_SEEN = {
    ("parallel/pipeline/stage_messages.py", "Messages._received"): (
        "what was sent is never written again, and a handle that is dropped keeps its memory until "
        "the message is over: the wait is gloo's, and for naming a rank that is gone"
    ),
    ("parallel/offload/parameters.py", "HostWeights.release"): (
        "in the row that gets here the memory goes to the same unit again, filled on the same stream"
    ),
}
"""Lines whose absence is no fault on a device, each with its reason."""
ROUNDED = {"bf16 weights"}
ASKED: dict[str, dict[str, Any]] = {
    "host: optimizer": {"offload": "optimizer"},
    "host: parameters": {"offload": "parameters"},
    "host: half a backward pass": {"offload": "parameters", "model": None},
}
ON_HOST = {
    "precision": "fp64", "micro_batch": 1, "rows": 3, "model": {"dim": 256, "layers": 3},
    "mode": "drawn", "seed": 0, "limit_bytes": 2**28,
}  # fmt: skip
EVERYTHING = ("ddp", "zero1", "zero2", "fsdp", "tp", "pp", "cp", "ep", "compress", "saved")


def without(line: str) -> str:
    """The line with its wait, record or event gone, and otherwise as alive as can be."""
    indent = line[: len(line) - len(line.lstrip())]
    text = line.strip()
    if ".record_event(" in text:
        return re.sub(r"[\w.]+\.record_event\([^)]*\)", "torch.cuda.Event()", line)
    if re.fullmatch(
        r"[\w.()]+\.(wait|wait_event|wait_stream|record_stream|synchronize|record|finish)\(.*\)",
        text,
    ):
        return f"{indent}pass"
    return re.sub(r"([\w.]+(?:\([^()]*(?:\([^()]*\)[^()]*)*\))?)\.wait\(\)", r"\1.tensor", line)


def orders() -> list[dict[str, Any]]:
    """Everything that orders work of a device: file, line, text, the function around, its turn in it."""
    found: list[dict[str, Any]] = []
    for path in sorted((SOURCE / "shoal").rglob("*.py")):
        name = str(path.relative_to(SOURCE / "shoal"))
        if name.startswith(NOT_OF_A_DEVICE) or "heartbeat" in name:
            continue
        text = path.read_text()
        scopes = [
            (node.lineno, node.end_lineno, node.name)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]
        for number, line in enumerate(text.splitlines(), 1):
            if (
                not ORDERS.search(line)
                or "``" in line
                or line.strip().startswith(("#", '"', "def "))
            ):
                continue
            inside = ".".join(s for begin, end, s in sorted(scopes) if begin <= number <= end)
            alike = [o for o in found if (o["file"], o["inside"]) == (name, inside)]
            one = {"file": name, "line": number, "inside": inside, "was": line.strip()}
            found.append({**one, "turn": sum(o["was"] == one["was"] for o in alike)})
    return found


def differs(ours: Any, expected: list[float]) -> str:
    """Why a row is red; empty: it is not."""
    if isinstance(ours, str):
        return ours
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours, expected, strict=True))
    return f"numbers differ by {apart:.1e}" if not apart <= 1e-12 else ""


class Rows:
    """Runs rows on simulated devices with the source of one folder, and compares their numbers."""

    def __init__(self, rows: tuple[str, ...]) -> None:
        self.environ = {**os.environ, "SIM_LIBRARY": str(library()), "SIM_SEED": "0"}
        loops = tuple(row for row in rows if not row.startswith(HOST))
        self.expected = world("own_loop.py", 2, loops, on_cpu())["rows"] if loops else {}
        for row in rows:
            if row.startswith(HOST):
                self.expected[row] = self._hosts(SOURCE, row)
                if not self.expected[row].startswith(row):
                    raise SystemExit(f"{row}, unchanged: {self.expected[row]}")

    def verdict(self, source: Path, rows: tuple[str, ...]) -> str:
        """What was red with this source; empty: nothing."""
        loops = tuple(row for row in rows if not row.startswith(HOST))
        said = self._loops(source, loops) if loops else ""
        for row in rows:
            if row.startswith(HOST) and not said:
                said = self._hosts(source, row)
                said = "" if said == self.expected[row] else said
        return said

    def _loops(self, source: Path, rows: tuple[str, ...]) -> str:
        try:
            told = world("own_loop.py", 2, rows, self._environ(source, 4))
        except AssertionError as failure:
            return reported(str(failure)) or f"a rank ended: {str(failure)[-200:]}"
        except subprocess.TimeoutExpired:
            return "no answer in time"
        # Autocast of a GPU and of the CPU know other lists: reports count, numbers do not.
        numbers = [
            f"{row}: {why}"
            for row in rows
            if isinstance(told["rows"][row], str) or row not in ROUNDED
            if (why := differs(told["rows"][row], self.expected[row]))
        ]
        return next(iter([*filter(None, [reported(told["said"])]), *numbers]), "")

    def _hosts(self, source: Path, row: str) -> str:
        """Numbers of training with states on the host; or what was red."""
        asked = [{**ON_HOST, **ASKED[row]}]
        environ = self._environ(source, 1)
        try:
            done = subprocess.run(
                [sys.executable, str(HERE / "offload_case.py"), json.dumps(asked)],
                env=environ, capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "no answer in time"
        if done.returncode:
            return reported(done.stderr) or f"ended: {done.stderr[-200:]}"
        told = json.loads(done.stdout.splitlines()[-1])[0]
        return f"{row}: other numbers {told['losses']} {told['norms']} {told['weights']}"

    def _environ(self, source: Path, devices: int) -> dict[str, str]:
        paths = os.pathsep.join((str(HERE / "site"), str(source)))
        return {**self.environ, "PYTHONPATH": paths, "SIM_DEVICES": str(devices)}


def reported(text: str) -> str:
    """The first report of the device in an output."""
    found = re.findall(r"simulated device: no order.*|simulated device: .*", text)
    return next((one for one in found if "no order" in one), next(iter(found), ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="files with this in their name")
    asked = parser.parse_args()
    known = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {}
    lines = orders()
    present = [told for told in known.get("mutants", ()) if told_of(told) in map(told_of, lines)]
    missing = [
        one
        for one in lines
        if asked.only in one["file"] and told_of(one) not in map(told_of, present)
    ]
    needed = tuple(dict.fromkeys(r for one in missing for r in ROWS.get(one["file"], EVERYTHING)))
    clean = known.get("unchanged", "")
    if missing:
        rows = Rows(needed)
        clean = rows.verdict(SOURCE, needed)
        print("unchanged:", clean or "green", flush=True)
    results = {told_of(told): told for told in present}
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "src"
        shutil.copytree(SOURCE, copied)
        for one in missing:
            said = rows.verdict(changed(copied, one), ROWS.get(one["file"], EVERYTHING))
            shutil.copy(SOURCE / "shoal" / one["file"], copied / "shoal" / one["file"])
            why = "" if said else NOT_SEEN.get((one["file"], one["inside"]), "")
            results[told_of(one)] = {**one, "said": short(said), **({"why": why} if why else {})}
            print(
                "red  " if said else "ALIVE",
                one["file"],
                one["line"],
                one["was"],
                "|",
                said[:160],
                flush=True,
            )
            write(asked.out, clean, [results[told_of(o)] for o in lines if told_of(o) in results])
    red = sum(bool(told["said"]) for told in results.values())
    named = sum(told["said"].startswith("simulated device: no order") for told in results.values())
    print(f"{red} of {len(results)} red, {named} by a report that names both places")
    return int(bool(clean) or red < 0.9 * len(results))


def changed(source: Path, one: dict[str, Any]) -> Path:
    """The source without a line's wait."""
    path = source / "shoal" / one["file"]
    text = path.read_text().splitlines()
    text[one["line"] - 1] = without(text[one["line"] - 1])
    path.write_text("\n".join(text) + "\n")
    return source


def told_of(one: dict[str, Any]) -> tuple[Any, ...]:
    """What names a line whose number may change."""
    return one["file"], one["inside"], one["was"], one["turn"]


def short(said: str) -> str:
    """A report without the folders of this machine."""
    return re.sub(r"/\S*?/(?=shoal/|simgpu/)", "", said)


def write(out: Path | None, clean: str, results: list[dict[str, Any]]) -> None:
    """Tell what is known so far."""
    if out is None:
        return
    red = [told for told in results if told["said"]]
    named = [told for told in red if told["said"].startswith("simulated device: no order")]
    told = {
        "lines": len(orders()),
        "run": len(results),
        "red": len(red),
        "named": len(named),
        "unchanged": clean,
        "mutants": results,
    }
    out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
