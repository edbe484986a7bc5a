"""10,000 hostile requests to `shoal serve`: no traceback, no file outside, and the metrics are there after it.

    python tests/proof/serve_requests.py [--requests 10000] [--seed 44] [--out proof/results/serve.json]

The server is the real command in a process of its own, over folders with hostile names and contents. Eight
clients send at the same time; one request in fifty is legal, and its page goes through Prometheus' own parser.
An audit hook in the server lists the paths that it opens while it serves: each lies below the folder of runs, or
is /proc/locks. A file beside the folder has a word that no answer may have.

    wrong         what failed, [] if nothing did
    statuses      answers by status; 0: the connection closed without one (torn, or over 8 KiB)
    cpu_s         of the server, for all requests
    grown         threads, open files and MiB that it has at the end and had not after its first page
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "view"), str(HERE.parents[1] / "benchmarks"), str(HERE)]

from hostile_requests import check, draw, send  # noqa: E402
from processes import machine  # noqa: E402
from source import source_hash  # noqa: E402
from test_metrics_server import hostile_runs, make_run, of_run, read_page  # noqa: E402

CLIENTS = 8
LEGAL = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
SECRET = b"secret-5f1e"
SERVER = """
import os, sys, threading
names = open(sys.argv.pop(1), "ab", 0)

def audit(event, words):
    by_server = threading.current_thread() is not threading.main_thread()
    if event in ("open", "os.listdir", "os.scandir") and by_server and isinstance(words[0], (str, bytes, os.PathLike)):
        names.write(os.fsencode(words[0]).replace(b"\\n", b" ") + b"\\n")

sys.addaudithook(audit)
from shoal.cli.main import main
main()
"""


def state(pid: int) -> dict[str, float]:
    """Threads, open files, memory and processor seconds of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {
        "threads": int(re.search(r"Threads:\s+(\d+)", status)[1]),  # type: ignore[index]
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "memory_mib": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024,  # type: ignore[index]
        "cpu_s": (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK"),
    }


def attack(port: int, seed: int, count: int, found: Counter[int], wrong: list[str]) -> None:
    """One client's requests; what is not as it should be goes to `wrong`."""
    rng = random.Random(seed)
    for _ in range(count):
        legal = rng.random() < 0.02
        request = LEGAL if legal else draw(rng)
        try:
            answer = send(port, request, hang_up=not legal and rng.random() < 0.05)
            status = check(request, answer, SECRET)
            found[status] += 1
            if legal and status != 503:
                page = read_page(answer.partition(b"\r\n\r\n")[2].decode())
                assert of_run(page, "plain")["shoal_run_loss"] == 2.0
        except Exception as failure:  # anything is a finding
            wrong.append(f"{type(failure).__name__}: {failure}: {request[:80]!r}")


def serve(folder: Path, requests: int, seed: int) -> dict[str, Any]:
    """Start the server in a folder, send the requests, and return the row of results."""
    (folder / "secret").write_bytes(SECRET)
    hostile_runs(folder / "runs")
    make_run(folder / "runs/plain")
    words = [
        sys.executable,
        "-uc",
        SERVER,
        str(folder / "opened"),
        "serve",
        str(folder / "runs"),
        "--port",
        "0",
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition("127.0.0.1:")[2].split("/")[0])
        send(port, LEGAL)
        (folder / "opened").write_bytes(b"")  # what the first page imports
        before, found, wrong = state(process.pid), Counter[int](), list[str]()
        clients = [
            threading.Thread(
                target=attack, args=(port, seed + k, requests // CLIENTS, found, wrong)
            )
            for k in range(CLIENTS)
        ]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        last = check(LEGAL, send(port, LEGAL), SECRET)
        after = state(process.pid)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    opened = {os.fsdecode(line) for line in (folder / "opened").read_bytes().splitlines()}
    outside = sorted(
        path
        for path in opened
        if not path.startswith(str(folder / "runs")) and path != "/proc/locks"
    )
    if outside or not opened:
        wrong.append(f"opened outside of the folder: {outside[:5]}, of {len(opened)}")
    if (last, process.returncode, out, err) != (200, 0, "ended\n", ""):
        wrong.append(f"at the end: {last} {process.returncode} {out!r} {err[-300:]!r}")
    return {
        "wrong": wrong,
        "requests": sum(found.values()) + len(wrong),
        "statuses": {str(status): found[status] for status in sorted(found)},
        "paths_opened": len(opened),
        "cpu_s": round(after["cpu_s"] - before["cpu_s"], 2),
        "grown": {
            name: round(after[name] - before[name], 1)
            for name in ("threads", "files", "memory_mib")
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=44)
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "proof/results/serve.json")
    asked = parser.parse_args()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a background job of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        result = serve(Path(folder), asked.requests, asked.seed)
    result |= {"seed": asked.seed, "source": source_hash(), "machine": machine()}
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps(
            {name: result[name] for name in ("wrong", "requests", "statuses", "cpu_s", "grown")}
        )
    )
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
