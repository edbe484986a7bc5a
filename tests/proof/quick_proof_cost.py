"""What the quick proof of own loops costs: starts of the examples on two processes.

`make proof PART=quick-proof` runs it, some five minutes on 2 cores. Each example starts in a new folder:
without a proof (SHOAL_PROVE=off), with one that this machine has not made, and with a known one. It
ends once each of its runs has taken a step. A row has the CPU seconds of these starts, paired, and those
that the ranks' main threads spend inside of the proof's own code, its imports among them. First starts may take the
larger of 4 CPU seconds and 60 % more, second starts 60 CPU milliseconds more, all ranks together. Rows
go to proof/results/quick-proof.json.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import resource
import runpy
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGET = ROOT / "proof" / "results" / "quick-proof.json"
sys.path[:0] = [str(HERE), str(ROOT / "tests")]

EXAMPLES: dict[str, tuple[str, ...]] = {
    "own_loop": ("a",),
    "digits_cnn": (),
    "distillation": ("a",),
    "gan": ("a", "--short"),
    "gradient_penalty": ("a",),
    "ppo": ("a", "--short"),
    "digits_best": ("a", "--short"),
    "sft": ("a", "--short"),
}
ROUNDS = 3
MORE_S, SHARE, SECOND_S = 4.0, 0.6, 0.06
DEFINITION = "cheap: within the larger of 4 CPU s and 60 %, and 60 CPU ms for a known proof"


def main() -> int:
    from kept_rows import parser_of, rows_before, verdicts, write_rows
    from source import source_hash

    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", help="examples")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    source = source_hash()
    rows = rows_before(options, TARGET, source)
    for name, words in EXAMPLES.items():
        if name in rows or (name == "sft" and importlib.util.find_spec("transformers") is None):
            continue
        if options.only and name not in options.only:
            continue
        load = os.getloadavg()[0]
        rows[name] = {"source": source, "load": load, **measure(name, words, options.rounds)}
        print(name, rows[name], flush=True)
        write_rows(TARGET, DEFINITION, rows)
    bad = [name for name, row in rows.items() if row["verdict"] != "cheap"]
    print(verdicts(rows), *bad, sep="\n")
    return bool(bad)


def measure(name: str, words: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Rounds of three starts, each in a folder and with a cache of its own."""
    found: dict[str, list[dict[str, Any]]] = {"off": [], "first": [], "second": []}
    with tempfile.TemporaryDirectory() as home:
        for number in range(rounds):
            cache = Path(home) / f"cache-{number}"
            for kind, prove in (("off", "off"), ("first", "auto"), ("second", "auto")):
                folder = Path(home) / f"{kind}-{number}"
                found[kind].append(start(name, words, folder, cache, prove))
    whole = {kind: [one["cpu_s"] for one in starts] for kind, starts in found.items()}
    more = statistics.median(b - a for a, b in zip(whole["off"], whole["first"], strict=True))
    inside = {kind: [sum(one["inside_s"]) for one in found[kind]] for kind in ("first", "second")}
    second = statistics.median(inside["second"])
    base = statistics.median(whole["off"])
    is_cheap = more <= max(MORE_S, SHARE * base) and second <= SECOND_S
    return {
        "verdict": "cheap" if is_cheap else "dear",
        "line": found["first"][0]["line"],
        "off_cpu_s": base,
        "first_more_cpu_s": more,
        "first_ratio": 1 + more / base,
        "second_more_cpu_s": second,
        "starts_cpu_s": whole,
        "inside_cpu_s": inside,
    }


def start(
    name: str, words: tuple[str, ...], folder: Path, cache: Path, prove: str
) -> dict[str, Any]:
    """Run an example on two processes; return its CPU seconds, and those inside of the proof."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--inside", str(ROOT / "examples" / f"{name}.py"), *words],
            cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={
                **os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank),
                "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1", "SHOAL_CACHE": str(cache), "SHOAL_PROVE": prove,
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=600)[0] for process in running]
    assert not any(process.returncode for process in running), "\n".join(told)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    files = sorted(folder.glob("inside-*.json"))
    return {
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "inside_s": [json.loads(path.read_text()) for path in files],
        "line": next((line for line in told[0].splitlines() if "proof: " in line), ""),
    }


def run_inside(script: str, words: list[str]) -> None:
    """Run a script, and write what this rank spends in the proof's code into its folder."""
    sys.path[0] = str(Path(script).parent)
    import shoal.trainer.parallelize  # noqa: F401  # what a start without a proof imports, too

    spent_s = 0.0
    if os.environ["SHOAL_PROVE"] != "off":
        began_s = time.thread_time()
        from shoal.trainer import first_batch_proof

        spent_s += time.thread_time() - began_s
        right, once = first_batch_proof.parallelize_proven, first_batch_proof.FirstBatchProof

        def proven(parallelize: Callable[..., Any], **arguments: Any) -> Any:
            nonlocal spent_s
            began_s, inner_s = time.thread_time(), 0.0

            def timed(**inner: Any) -> Any:
                nonlocal inner_s
                at_s = time.thread_time()
                run = parallelize(**inner)
                inner_s += time.thread_time() - at_s
                return run

            run = right(timed, **arguments)
            spent_s += time.thread_time() - began_s - inner_s
            return run

        def prove_once(proof: Any, *values: Any, method: Any = once._prove_once) -> None:
            nonlocal spent_s
            began_s = time.thread_time()
            method(proof, *values)
            spent_s += time.thread_time() - began_s

        first_batch_proof.parallelize_proven = proven
        once._prove_once = prove_once  # type: ignore[method-assign]
    from first_steps import end_after_first_steps

    end_after_first_steps()
    path = Path.cwd() / f"inside-{os.environ['RANK']}.json"
    atexit.register(lambda: path.write_text(json.dumps(spent_s)))
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        run_inside(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
