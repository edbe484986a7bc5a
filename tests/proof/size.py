"""Proofs at a user's size: `shoal prove` of 126M and 1B parameters in a memory cgroup of 16 GiB.

`make proof` runs it. A row is one command on two processes; its memory is that of all of them
together, rank 0's one process among them. What is done stays in proof/results/size.json, so it can be
stopped and started again; --fresh begins anew.

    python tests/proof/size.py              everything, about 15 minutes on 2 idle cores
    python tests/proof/size.py --rows tp2   some rows
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("worlds", "proof")]
TARGET = ROOT / "proof" / "results" / "size.json"

from kept_rows import Row, parser_of, rows_before, verdicts, write_rows  # noqa: E402
from source import source_hash  # noqa: E402

from memory_cgroup import Cgroup, memory_cgroup  # noqa: E402

LIMIT_BYTES = 16 * 2**30
DEADLINE_S = 3600
COMMON = [
    "model.name=llama", "data.source=synthetic", "data.sequence=16",
    "train.batch=4", "train.micro_batch=1", "launch.processes=2",
]  # fmt: skip
GPT_2_SIZE = ["model.dim=768", "model.layers=19", "model.heads=12", "model.tied=false"]

ROWS = {
    "126M ddp": [*GPT_2_SIZE, "layout.strategy=ddp"],
    "126M tp2": [*GPT_2_SIZE, "layout.tp=2"],
    "1.1B tp2": ["model.dim=2048", "model.layers=20", "model.heads=16", "layout.tp=2"],  # by blocks
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", default="", help="comma-separated words of rows; default: all")
    options = parser.parse_args()
    source = source_hash()
    rows = rows_before(options, TARGET, source)
    words = [word for word in options.rows.split(",") if word]
    for key, arguments in ROWS.items():
        if key in rows or (words and not any(word in key for word in words)):
            continue
        rows[key] = {**proved(arguments), "source": source}
        print(f"{key}: {rows[key]}", flush=True)
        write_rows(TARGET, DEFINITION, rows)
    print(verdicts(rows))
    return 0 if all(row["verdict"] == "equal" for row in rows.values()) else 1


def proved(arguments: list[str]) -> Row:
    """The verdict of one command inside a cgroup, and the memory that it took."""
    began_s = time.monotonic()
    build = ROOT / "build"  # not the system's folder for temporary files: that may be memory
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as folder, memory_cgroup(LIMIT_BYTES) as group:
        if not isinstance(group, Cgroup):
            return {"verdict": "not made", "reason": group}
        with Watch(group) as watch:
            words = ["-m", "shoal", "prove", *COMMON, *arguments, f"run.folder={folder}"]
            done = group.run([*words, "--json"], DEADLINE_S)
    took = {"seconds": round(time.monotonic() - began_s), **watch.told()}
    if done.returncode not in (0, 1, 3):
        return {"verdict": "failed", "reason": done.stderr[-500:], **took}
    report = json.loads(done.stdout)
    return {"verdict": report["verdict"], **told(report), **took}


def told(report: Row) -> Row:
    """What a row keeps of a report."""
    found: Row = {"layout": report["layout"], "said": report["said"]}
    if report["reason"]:
        found["reason"] = report["reason"]
    if report["cause"]:
        found["cause"] = report["cause"]["text"]
    for one in report["trajectories"]:
        shapes = [math.prod(p["shape"]) for p in one["parameters"]]
        found["parameters"] = sum(shapes)
        found[one["optimizer"]] = one["largest"]
    return found


class Watch:
    """Samples what the processes of a cgroup hold of their own, pages of files left out."""

    def __init__(self, group: Cgroup) -> None:
        self.group, self.most_bytes, self.ended = group, 0, threading.Event()
        self.thread = threading.Thread(target=self.look)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.peak_bytes = self.group.peak_bytes

    def look(self) -> None:
        while not self.ended.wait(0.1):
            lines = (self.group.folder / "memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
            held = [stat[k] for k in ("total_rss", "anon", "shmem", "total_shmem") if k in stat]
            self.most_bytes = max(self.most_bytes, sum(map(int, held)))

    def told(self) -> Row:
        return {
            "limit_bytes": LIMIT_BYTES,
            "peak_bytes": self.peak_bytes,
            "peak_without_files_bytes": self.most_bytes,
        }


DEFINITION = (
    "shoal prove, five steps of SGD and five of AdamW in float64, all processes "
    "in one memory cgroup. Peak: with pages of files, which the kernel takes back; without "
    "files: sampled ten times a second"
)


if __name__ == "__main__":
    sys.exit(main())
