"""Reports in headless Chromium, from a disk and without network: requests, console, sizes, hostile text.

    python tests/proof/report_pages.py          result: proof/results/report.json, pictures: build/report/

Pages: a run of 100,000 steps on 8 ranks, one of 10⁴ steps on 1,024 ranks, one of 10⁶ steps, a run of a
pipeline of an older version, and a folder with 200 hostile strings at every place of a text. Each is opened
at 1280 and 390 pixels, in light and dark, and with JavaScript off. Without Chromium the part says so and
measures sizes, seconds and memory only.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "report"), str(ROOT / "tests" / "proof")]

from chromium import Browser, find_chromium  # noqa: E402
from hostile_folders import hostile_strings, write_hostile_folder  # noqa: E402

from shoal.base.runlog.rank_records import encode_header  # noqa: E402
from shoal.report.verdict.step_seconds import ROW_FIELDS  # noqa: E402

RESULT, PICTURES = ROOT / "proof" / "results" / "report.json", ROOT / "build" / "report"
LIMITS = {"steps-100k-ranks-8": 400_000, "steps-10k-ranks-1024": 1_500_000}
"""Bytes of a page at most."""
CPU_S, MEMORY_MIB = 5.0, 300
HUGE = ("steps-1m-ranks-1", "steps-10k-ranks-1024")
MEASURE = """
import json, resource, sys, time
from pathlib import Path
from shoal.report.report_page import write_report
path = write_report(Path(sys.argv[1]), Path(sys.argv[2]))
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"bytes": path.stat().st_size, "cpu_s": round(time.process_time(), 2),
                  "memory_mib": used.ru_maxrss // 1024}))
"""
SEEN = """({
  canvases: document.querySelectorAll("canvas").length,
  lines: document.querySelectorAll("polyline").length,
  tables: document.querySelectorAll("table").length,
  maps: document.querySelectorAll(".plot img").length,
  broken: [...document.images].filter(i => !i.naturalWidth).length,
  verdict: (document.querySelector(".headline") || {}).innerText || "",
  hit: document.documentElement.dataset.hit || "",
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth
})"""


def write_run(folder: Path, steps: int, ranks: int, seed: int = 44) -> Path:
    """Write a made run: a decaying loss with spikes, a slow rank, rare long steps."""
    rng = np.random.default_rng(seed)
    (folder / "rank_steps").mkdir(parents=True)
    loss = 8 * np.exp(-3 * np.arange(steps) / steps) + 2 + rng.normal(0, 0.05, steps)
    spikes = sorted(int(at) for at in rng.integers(steps // 10, steps, 5))
    loss[spikes] += 4
    norms, times_s = rng.gamma(9, 0.1, steps), rng.gamma(50, 0.004, steps)
    with (folder / "metrics.jsonl").open("w") as file:
        for at in range(steps):
            row = {
                "step": at + 1, "loss": loss[at], "grad_norm": norms[at], "lr": 3e-4 * (1 - at / steps),
                "tokens": 524_288, "data_wait_s": 0.0012, "peak_memory_bytes": 8 << 30, "skipped": False,
                "samples": [8 * at, 8 * at + 8], "step_s": times_s[at], "mfu": 0.08 / times_s[at],
                "tokens_per_s": 524_288 / times_s[at], "comm_bytes": 24, "comm_exposed_s": 0.01,
                "comm_bytes_by_kind": {"all_reduce": 24}, "gpu_utilisation": None,
            }  # fmt: skip
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    if ranks > 1:
        write_rank_steps(folder, min(steps, 10_000), steps, ranks, rng)
    events: list[dict[str, Any]] = [{"event": "run_started", "processes": ranks, "layout": "ddp"}]
    for step in range(1_000, steps + 1, max(1_000, steps // 50)):
        by_source = {
            name: {"loss": loss[step - 1] * k, "targets": 9}
            for name, k in (("web", 1), ("code", 0.7))
        }
        events.append(
            {"event": "validated", "step": step, "loss": loss[step - 1], "by_source": by_source}
        )
        events.append({"event": "checkpoint_saved", "step": step, "bytes": 10**9, "seconds": 2.0})
    events += [
        {"event": "spike", "step": at + 1, "reason": "4.1 deviations above"} for at in spikes
    ]
    events.append({"event": "run_finished", "step": steps, "how": "completed"})
    lines = [{"time_s": 1.79e9 + (one.get("step") or 0) * 0.2, **one} for one in events]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    plan = {
        "layout": {"dp_replicate": ranks},
        "steps": steps,
        "unit": "tokens",
        "batch": 8,
        "model": "llama",
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def write_rank_steps(
    folder: Path, kept: int, steps: int, ranks: int, rng: np.random.Generator
) -> None:
    """Write the newest `kept` steps of each rank; rank 3 is slow in data."""
    with (folder / "rank_steps" / "node-0.bin").open("wb") as file:
        file.write(encode_header(0))
        for first in range(steps - kept + 1, steps + 1, 100):
            rows = np.zeros((min(100, steps + 1 - first), ranks), np.dtype(ROW_FIELDS))
            rows["step"] = np.arange(first, first + len(rows))[:, None]
            rows["rank"], rows["steps"] = np.arange(ranks), 1
            seconds = rng.gamma(20, 0.001, (*rows.shape, 8)).astype(np.float32)
            seconds[:, min(3, ranks - 1), 1] += 0.05
            late = rng.random(len(rows)) < 0.01
            seconds[late, rng.integers(ranks, size=len(rows))[late], 2] += (
                rng.random(late.sum()) * 2
            )
            work = seconds[..., :7].sum(-1)
            seconds[..., 7] = work.max(1, keepdims=True) - work
            rows["seconds"] = seconds
            file.write(rows.tobytes())


def look(browser: Browser, page: Path) -> tuple[dict[str, Any], list[str]]:
    """Open a page in all ways; return what was seen and what is wrong."""
    wrong, seen = [], {}
    for width, dark, scripts in (
        (1280, False, True), (1280, True, True), (390, False, True), (390, True, True), (1280, False, False),
    ):  # fmt: skip
        browser.open(page, width=width, dark=dark, scripts=scripts)
        how = f"{width}-{'dark' if dark else 'light'}{'' if scripts else '-noscript'}"
        found = browser.evaluate(SEEN)
        seen[how] = found
        checks = {
            "requests": not browser.requests(),
            "console": not browser.complaints(),
            "no script of the folder ran": not found["hit"],
            "no image is broken": not found["broken"],
            "no sideways scrolling": found["overflow"] <= 0,
            "a verdict": bool(found["verdict"]),
            "tables": found["tables"] > 2,
            "curves": found["canvases"] > 2
            if scripts
            else found["lines"] > 2 and not found["canvases"],
        }
        wrong += [f"{page.name} {how}: {name}" for name, holds in checks.items() if not holds]
        wrong += [f"{page.name} {how}: {line}" for line in browser.complaints()[:3]]
        browser.screenshot(PICTURES / f"{page.stem}-{how}.png")
    return seen, wrong


def main() -> int:
    """Write the pages, open them, write the result; 1 if something is wrong."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    pages: dict[str, dict[str, Any]] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        folders = {
            "steps-100k-ranks-8": write_run(root / "a", 100_000, 8),
            "steps-10k-ranks-1024": write_run(root / "b", 10_000, 1_024),
            "steps-1m-ranks-1": write_run(root / "c", 1_000_000, 1),
            "old-pipeline": ROOT / "tests" / "fixtures" / "run_folders" / "runs" / "pp",
            "hostile": write_hostile_folder(root / "d", hostile_strings(200)),
        }
        for name, folder in folders.items():
            command = [sys.executable, "-c", MEASURE, str(folder), str(PICTURES / f"{name}.html")]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            pages[name] = json.loads(done.stdout)
    for name, most in LIMITS.items():
        if pages[name]["bytes"] > most:
            wrong.append(f"{name}: {pages[name]['bytes']} bytes")
    for name in HUGE:
        if pages[name]["cpu_s"] > CPU_S or pages[name]["memory_mib"] > MEMORY_MIB:
            wrong.append(f"{name}: {pages[name]}")
    if program := find_chromium():
        browser = Browser(program)
        try:
            version = browser.call("Browser.getVersion")["product"]
            for name, row in pages.items():
                row["seen"], found = look(browser, PICTURES / f"{name}.html")
                wrong += found
        finally:
            browser.close()
    else:
        version = ""
        sys.stderr.write("report: no Chromium here: pages were written and not opened\n")
    for name in ("steps-100k-ranks-8", "steps-10k-ranks-1024"):
        for how, found in pages[name].get("seen", {}).items():
            if not found["maps"]:
                wrong.append(f"{name} {how}: no heat map")
    source = hashlib.sha256()
    for file in sorted((ROOT / "src" / "shoal" / "report").rglob("*.*")):
        if file.suffix in (".py", ".js", ".css"):
            source.update(file.read_bytes())
    record = {
        "chromium": version,
        "source": source.hexdigest()[:12],
        "wrong": wrong,
        "pages": pages,
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    sys.stderr.write("".join(f"report: {line}\n" for line in wrong) or "report: all holds\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
