"""Checks Shoal on GPUs, part by part; each part is a process with a time limit of its own.

    make test-cuda     one GPU, without network: what one device can hold
    make test-gpus     2 to 8 GPUs of one machine, NCCL among them: one command, one JSON

The result is written after every part, and every few seconds within one, so that a machine that is
taken away leaves what was done: the whole in OUT, and each part in a file of its own in a folder of
that name.
SHOAL_TEST_DEVICE=cpu runs every part small on the CPU. Only the standard library is used here: what
the machine lacks is found by the first part, not by a traceback. Wheels that the machine has no
network for are unpacked from `.cuda-kit` (`make cuda-kit`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KIT = ROOT / ".cuda-kit"
ONE, SEVERAL = "one", "several"
KEEP_EVERY_S = 5.0
TOTAL_S = {ONE: 530.0, SEVERAL: 590.0}


@dataclass(frozen=True)
class Part:
    """One process: a function of a module beside this file, and where it has something to say."""

    name: str
    work: str
    limit_s: float
    on: tuple[str, ...] = (ONE, SEVERAL)
    on_gpu: tuple[tuple[str, str], ...] = ()


# By value, since time may run out: the first four take 300 s at most, the first compile among them.
PARTS = (
    Part("speed", "speed:one_gpu", 145, (ONE,)),
    Part("speed", "speed:several_gpus", 145, (SEVERAL,)),
    Part("where the time goes", "where_time_goes:profiles", 60, (ONE,)),
    Part("memory", "plans:memory", 45),
    Part("losses", "speed:learning", 50, (ONE,)),
    Part("1B parameters", "speed:one_billion", 70, (ONE,)),
    Part("compiled layouts", "compiled_layouts:two_ranks", 100),
    Part("races", "races:races", 60, (ONE,), (("TORCH_CUDA_SANITIZER", "1"),)),
    Part("four ranks", "layouts:four_ranks", 120),
    # Seen on one GPU; the rest of the time is theirs, or a run of their own: --parts.
    Part("machine", "one:machine", 60),
    Part("correctness", "one:correctness", 60, (ONE,)),
    Part("kernels", "kernel_checks:kernels", 45, (ONE,)),
    Part("timeline", "timeline:timeline", 45, (ONE,)),
    Part("verdicts", "gpu_verdicts:causes", 200, (ONE,)),
    Part("compile", "kernel_checks:compiled", 120, (ONE,)),
    Part("formats", "kernel_checks:formats", 45, (ONE,)),
    Part("recompute and offload", "host_memory:parked", 60, (ONE,)),
    Part("two ranks", "layouts:two_ranks", 150),
    Part("eight ranks", "layouts:eight_ranks", 120, (SEVERAL,)),
    Part("larger than its share", "short_of_memory:one_device", 100, (ONE,)),
    Part("shards larger than their share", "short_of_memory:sharded", 100, (ONE,)),
    Part("command", "command:command", 120),
)
FIRST, FIRST_S = ("speed", "where the time goes", "memory", "losses"), 300.0
"""Parts that fit into the first five minutes of a GPU, and these minutes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", choices=(ONE, SEVERAL), default=ONE)
    parser.add_argument("--parts", default="", help="names, separated by commas; default: all")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--patience", type=float, default=1.0, help="times every limit, for a busy machine"
    )
    asked = parser.parse_args()
    names = [name.strip() for name in asked.parts.split(",") if name.strip()]
    known = [part.name for part in PARTS if asked.on in part.on]
    if wrong := [name for name in names if name not in known]:
        parser.error(f"--parts {wrong[0]}: no such part; there are: {', '.join(known)}")
    out = asked.out or ROOT / "build" / f"{'cuda' if asked.on == ONE else 'gpus'}.json"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part under way ends too
    return run(asked.on, names or known, out, asked.patience)


def run(on: str, names: list[str], out: Path, patience: float) -> int:
    """Run the named parts and keep the result in `out`; gives the exit status."""
    began_s = time.monotonic()
    result: dict[str, Any] = {
        "command": f"tests/cuda/run.py --on {on}",
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "source": source_hash(),
        "device": os.environ.get("SHOAL_TEST_DEVICE", "cuda"),
        "small": os.environ.get("SHOAL_TEST_SMALL", "") == "1",
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "versions": {"python": platform.python_version(), **versions()},
        "parts": {},
    }
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        environ = environment(folder) | {"SHOAL_TEST_PATIENCE": str(patience)}
        for part in PARTS:
            if on in part.on and part.name in names:
                left_s = patience * TOTAL_S[on] - (time.monotonic() - began_s)
                part = replace(part, limit_s=patience * part.limit_s)
                print(f"{part.name}:", flush=True)

                def keep(told: dict[str, Any], name: str = part.name) -> None:
                    result["parts"][name] = told
                    result["seconds"] = round(time.monotonic() - began_s, 1)
                    write(out, result)
                    write(own_result(out, name), {**result, "parts": {name: told}})

                try:
                    told = one_part(part, folder, environ, left_s, keep)
                except Exception:  # of this program, not of the part: the next one has its turn
                    output = traceback.format_exc().splitlines()
                    told = {"state": "failed", "seconds": 0.0, "rows": [], "output": output}
                keep(told)
                print(f"{part.name}: {told['state']}, {told['seconds']} s", flush=True)
    states = [part["state"] for part in result["parts"].values()]
    rows = [row["ok"] for part in result["parts"].values() for row in part["rows"]]
    print(
        f"{states.count('passed')} of {len(states)} parts passed, {sum(rows)} of {len(rows)} rows, "
        f"{result['seconds']} s; result: {out}"
    )
    return 0 if set(states) == {"passed"} else 1


def one_part(
    part: Part,
    folder: Path,
    environ: dict[str, str],
    left_s: float,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run one part in a process of its own; gives its state, rows and the end of its output.

    keep   is told every few seconds what is there so far
    """
    if left_s < min(20.0, part.limit_s):
        return {"state": "not run: no time left", "seconds": 0.0, "rows": []}
    rows, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    limit_s, began_s = min(part.limit_s, left_s), time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "child.py"), part.work, str(rows)],
            env={
                **environ,
                **(dict(part.on_gpu) if on_gpu() else {}),
                "SHOAL_TEST_UNTIL_S": str(began_s + limit_s),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
        code: int | None = None
        try:
            while code is None and time.monotonic() - began_s < limit_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rest_s = limit_s - (time.monotonic() - began_s)
                    code = process.wait(max(0.0, min(KEEP_EVERY_S, rest_s)))
                keep({"state": "cut off while it ran", "seconds": 0.0, "rows": rows_of(rows)})
        finally:
            end_all(process)
    found = rows_of(rows)
    state = f"over its {limit_s:.0f} s" if code is None else "failed" if code else "passed"
    told: dict[str, Any] = {"state": state, "limit_s": part.limit_s, "rows": found}
    told["seconds"] = round(time.monotonic() - began_s, 1)
    text = log.read_text(errors="replace")
    print(text if state != "passed" else "".join(f"  {row['row']}\n" for row in found), end="")
    if state != "passed":
        told["output"] = text[-3000:].splitlines()
    return told


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows that were finished; one that a time limit cut in two is left out."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def end_all(process: subprocess.Popen[bytes]) -> None:
    """The process and whatever it started: all are one session's."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(folder: Path) -> dict[str, str]:
    """What every part inherits: our source first, then wheels that this machine lacks."""
    tests = ROOT / "tests"
    places = [ROOT / "src", HERE, tests / "worlds", ROOT / "benchmarks", kit(folder), tests]
    inherited = os.environ.get("PYTHONPATH", "")
    found = {
        "SHOAL_PROVE": "off",  # parts say themselves what they prove
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, places), *([inherited] if inherited else [])]),
        "PYTHONUNBUFFERED": "1",
        "SHOAL_CACHE": str(folder / "cache"),
        # A compiler that a time limit kills leaves half a file, which every later run would load.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor-kernels"),
        "TRITON_CACHE_DIR": str(folder / "triton-kernels"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if not on_gpu():
        found["CUDA_VISIBLE_DEVICES"] = ""
    if not on_gpu() or "SIM_LIBRARY" in os.environ:  # a simulated device computes on the CPU too
        found.setdefault("OMP_NUM_THREADS", "1")
    return found


def on_gpu() -> bool:
    """Whether this run is meant for GPUs."""
    return os.environ.get("SHOAL_TEST_DEVICE", "cuda") == "cuda"


def kit(folder: Path) -> Path:
    """Packages of the kit that cannot be imported here, unpacked; wheels are zip files."""
    unpacked = folder / "kit"
    unpacked.mkdir()
    for wheel in sorted(KIT.glob("*.whl")):
        name = wheel.name.split("-")[0]
        if name != "shoal" and importlib.util.find_spec(name) is None:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(unpacked)
    return unpacked


def versions() -> dict[str, str]:
    """Of the packages that results depend on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "transformers", "triton", "numpy", "msgspec", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "kit" if list(KIT.glob(f"{name}-*.whl")) else "none"
    return found


def source_hash() -> str:
    """Of src: says what the result was made with."""
    total = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def own_result(out: Path, part: str) -> Path:
    """The file of one part, in a folder beside the result of all.

    >>> str(own_result(Path("build/cuda.json"), "two ranks"))
    'build/cuda/two-ranks.json'
    """
    return out.with_suffix("") / f"{part.replace(' ', '-')}.json"


def write(out: Path, result: dict[str, Any]) -> None:
    """Whole or not at all: the machine may go away at any moment."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_suffix(".fresh")
    fresh.write_text(json.dumps(result, indent=1) + "\n")
    fresh.replace(out)


if __name__ == "__main__":
    sys.exit(main())
