"""How much of the time islands compute on slow links: Shoal, DDP, PowerSGD, torchft side by side.

Three islands of one process in network namespaces, their links shaped to 10, 50, 200 and 1000
Mbit/s (`tc tbf`, see `tests/worlds/netns.py`); 20M parameters, period 50, inner steps that are
planned sleeps of 0.5 s, so that the machine's speed does not count. Utilisation is planned over
measured time; bytes are those of the islands' interfaces, headers included.

    sudo .venv/bin/python benchmarks/islands_utilisation.py --quick     does it all work? 2 minutes
    sudo .venv/bin/python benchmarks/islands_utilisation.py             the claim; above an hour

torchft runs in an environment of its own, given by --torchft; without it its rows are left out:

    python3 -m venv .venv-torchft && .venv-torchft/bin/pip install torch==2.13.0 torchft==0.2.0

Rivals: DDP and PowerSGD (torch's hook, rank 1: fewest bytes) every step; torchft's DiLoCo whole,
and with as many fragments and as long a delay as Shoal's streaming. The row `…_twin` is the same
program once more: the noise. Gates: Shoal's streaming ≥ 95 % at 50 Mbit/s; at every rate ahead of
each rival, or both ≥ 98 % and no further apart than the noise; Shoal's wire bytes ≤ 1.05 × theory.

Writes benchmarks/results/islands-utilisation-DATE.json after every row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from processes import SOURCE, machine

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests" / "worlds"), str(SOURCE)]
from netns import BURST_BYTES, QUEUE_MS, Forbidden, Net  # noqa: E402
from shoal.base.layouts.island_options import IslandsPolicy  # noqa: E402
from shoal.forecast.time.island_costs import IslandsFacts, islands_cost  # noqa: E402

ISLANDS, PARAMETERS, PERIOD, STEP_S = 3, 20_000_000, 50, 0.5
FRAGMENTS, OVERLAP = 5, 5
RATES_MBIT = (10, 50, 200, 1000)
LEAST_AT_50, BOTH_FULL, MOST_BYTES = 0.95, 0.98, 1.05
SAMPLE_S, PEAK_S, ROW_LIMIT_S = 0.1, 1.0, 1800.0
FORBIDDEN = 77

STREAMING = {"method": "streaming-diloco", "fragments": FRAGMENTS, "overlap": OVERLAP}
PROGRAMS: dict[str, dict[str, Any]] = {
    "ddp": {"program": "data_parallel"},
    "powersgd": {"program": "data_parallel", "rank": 1},
    "shoal_diloco": {"program": "shoal_islands", "policy": {"method": "diloco"}},
    "shoal_int8": {
        "program": "shoal_islands",
        "policy": {"method": "diloco", "codec": "int8"},
    },
    "shoal_streaming": {"program": "shoal_islands", "policy": STREAMING},
    "shoal_streaming_twin": {"program": "shoal_islands", "policy": STREAMING},
    "torchft_diloco": {"program": "torchft_diloco", "fragments": 1, "delay": 0},
    "torchft_streaming": {
        "program": "torchft_diloco",
        "fragments": FRAGMENTS,
        "delay": OVERLAP,
    },
}
"""What every row runs; the keys of a job that differ."""
OURS, TWIN = "shoal_streaming", "shoal_streaming_twin"
RIVALS = ("ddp", "powersgd", "torchft_diloco", "torchft_streaming")


def main() -> int:
    options = _options()
    names = [name for name in options.programs.split(",") if _runs(name, options)]
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/islands_utilisation.py", *sys.argv[1:]]),
        "machine": machine(),
        "links": {"burst_bytes": BURST_BYTES, "queue_ms": QUEUE_MS, "shaper": "tc tbf"},
        "islands": ISLANDS,
        "parameters": options.parameters,
        "period": options.period,
        "step_s": options.step_s,
        "rows": [],
    }
    path = Path(options.out or HERE / "results" / f"islands-utilisation-{_now()}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    print(HEAD)
    for rate in [float(text) for text in options.rates.split(",")]:
        for place, name in enumerate(names):
            try:
                row = measure(name, rate, options, port=29_400 + 10 * place)
            except Forbidden as refusal:
                print(f"no network namespaces here: {refusal}")
                return FORBIDDEN
            record["rows"].append(row)
            print(_line(row), flush=True)
            path.write_text(json.dumps(record) + "\n")
    record["verdicts"] = verdicts(record["rows"])
    record["machine"]["load_average_after"] = machine()["load_average"]
    path.write_text(json.dumps(record) + "\n")
    for verdict in record["verdicts"]:
        print(verdict)
    print(f"raw: {path}")
    return 0


def measure(name: str, rate_mbit: float, options: Any, port: int) -> dict[str, Any]:
    """One program at one rate: every island's window, and the fastest second on its interface."""
    job = {
        "count": ISLANDS,
        "parameters": options.parameters,
        "period": options.period,
        "step_s": options.step_s,
        "steps": options.steps,
        "rounds": options.rounds,
        "port": port,
        **PROGRAMS[name],
    }
    python = options.torchft if job["program"].startswith("torchft") else sys.executable
    with tempfile.TemporaryDirectory() as folder, Net(ISLANDS, rate_mbit) as net:
        job["addresses"] = net.addresses
        outs = [Path(folder) / f"{island}.json" for island in range(ISLANDS)]
        members = [
            subprocess.Popen(
                [*net.inside(island), python, str(HERE / "islands_members.py"),
                 json.dumps({**job, "index": island, "out": str(out)})],
            )
            for island, out in enumerate(outs)
        ]  # fmt: skip
        peaks = _watch(members, net, name)
        islands = [json.loads(out.read_text()) for out in outs]
    row: dict[str, Any] = {
        "program": name,
        "rate_mbit": rate_mbit,
        "job": {key: value for key, value in job.items() if key != "addresses"},
        "utilisation": min(island["utilisation"] for island in islands),
        "sent_bytes_per_step": max(one["sent_bytes"] / one["steps"] for one in islands),
        "peak_mbit": max(peaks) * 8e-6,
        "islands": islands,
    }
    if "policy" in job:
        row.update(_foreseen(job, rate_mbit))
        row["bytes_over_theory"] = row["sent_bytes_per_step"] / row["theory_bytes_per_step"]
    return row


def _watch(members: list[subprocess.Popen[bytes]], net: Net, name: str) -> list[float]:
    """Wait for all; gives the most bytes/s over PEAK_S that each island sent."""
    samples: list[list[int]] = [[] for _ in members]
    window, until_s = round(PEAK_S / SAMPLE_S), time.monotonic() + ROW_LIMIT_S
    try:
        while any(member.poll() is None for member in members):
            broken = [k for k, one in enumerate(members) if one.poll() not in (None, 0)]
            if broken:
                raise RuntimeError(f"{name}: island {broken[0]} failed")
            if time.monotonic() > until_s:
                raise TimeoutError(f"{name}: no end after {ROW_LIMIT_S:.0f} s")
            for island, seen in enumerate(samples):
                seen.append(net.sent_bytes(island))
            time.sleep(SAMPLE_S)
        if any(member.returncode for member in members):
            raise RuntimeError(f"{name}: {[member.returncode for member in members]}")
    finally:
        for member in members:
            if member.poll() is None:
                member.kill()
            member.wait()
    return [
        max(
            (b - a for a, b in zip(seen, seen[window:], strict=False)),
            default=0,
        )
        / PEAK_S
        for seen in samples
    ]


def _foreseen(job: dict[str, Any], rate_mbit: float) -> dict[str, float]:
    """What `shoal simulate islands` says of this row."""
    policy = IslandsPolicy(count=ISLANDS, period=job["period"], **job["policy"])
    facts = IslandsFacts(job["parameters"], job["step_s"], rate_mbit * 1e6 / 8)
    cost = islands_cost(policy, facts)
    return {
        "predicted_utilisation": cost.utilisation,
        "theory_bytes_per_step": cost.sent_bytes / job["period"],
    }


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Every gate as a line: passed, failed, or open where a row is missing."""
    found = []
    for rate in sorted({row["rate_mbit"] for row in rows}):
        used = {row["program"]: row["utilisation"] for row in rows if row["rate_mbit"] == rate}
        if OURS not in used:
            found.append(f"{rate:g} Mbit/s: open, {OURS} was not run")
            continue
        ours, noise = used[OURS], abs(used[OURS] - used[TWIN]) if TWIN in used else 0.0
        if rate == 50:
            word = "passed" if ours >= LEAST_AT_50 else "FAILED"
            found.append(f"{word}: streaming at 50 Mbit/s {ours:.1%} (≥ {LEAST_AT_50:.0%})")
        for rival in RIVALS:
            if rival not in used:
                found.append(f"open: {rival} at {rate:g} Mbit/s was not run")
                continue
            theirs = used[rival]
            even = min(ours, theirs) >= BOTH_FULL and abs(ours - theirs) <= noise
            word = "passed" if ours > theirs or even else "FAILED"
            found.append(
                f"{word}: {rate:g} Mbit/s, {ours:.2%} against {rival} {theirs:.2%}, "
                f"noise {noise:.2%}"
            )
    over = [row for row in rows if row.get("bytes_over_theory", 0.0) > MOST_BYTES]
    found += [
        f"FAILED: {row['program']} at {row['rate_mbit']:g} Mbit/s sent "
        f"{row['bytes_over_theory']:.3f} × theory"
        for row in over
    ]
    if not over:
        found.append(f"passed: wire bytes of every row of ours ≤ {MOST_BYTES} × theory")
    return found


HEAD = (
    f"{'Mbit/s':>7} {'program':22}{'utilisation':>12}{'foreseen':>10}{'MB/step':>10}"
    f"{'× theory':>10}{'peak Mbit/s':>13}"
)


def _line(row: dict[str, Any]) -> str:
    foreseen, over = row.get("predicted_utilisation"), row.get("bytes_over_theory")
    return (
        f"{row['rate_mbit']:7g} {row['program']:22}{row['utilisation']:12.2%}"
        f"{'' if foreseen is None else f'{foreseen:.2%}':>10}"
        f"{row['sent_bytes_per_step'] / 1e6:10.3f}{'' if over is None else f'{over:.3f}':>10}"
        f"{row['peak_mbit']:13.1f}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rates", default=",".join(map(str, RATES_MBIT)), help="Mbit/s")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of islands")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of DDP")
    parser.add_argument("--torchft", default="", help="a Python that has torchft")
    parser.add_argument("--quick", action="store_true", help="small and short: does it all work?")
    parser.add_argument("--out", help="where the JSON goes")
    options = parser.parse_args()
    options.parameters, options.period, options.step_s = PARAMETERS, PERIOD, STEP_S
    if options.quick:
        options.parameters, options.period, options.step_s = 1_000_000, 40, 0.05
        options.rates, options.rounds = "200", 1
    return options


def _runs(name: str, options: argparse.Namespace) -> bool:
    if name not in PROGRAMS:
        raise SystemExit(f"--programs {name}: not one of {', '.join(PROGRAMS)}")
    if name.startswith("torchft") and not options.torchft:
        print(f"{name}: left out, --torchft names no Python that has it")
        return False
    return True


def _now() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


if __name__ == "__main__":
    sys.exit(main())
