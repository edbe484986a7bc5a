"""Models larger than a device, row by row, on simulated devices; results: proof/results/larger.json.

A row is one training over several layouts: each builds the model, goes on from what the layout before
saved, trains, saves and exports, on devices that have 75 % of the model's bytes. It is compared with
the same steps of one process on the CPU. All is in fp32, or with --precision fp64 in that.

With --host the ranks are in a memory cgroup, and what a node's host holds is looked at, devices aside,
of a model of few blocks and of one of many. What the kernel takes to keep pages counts: of a file on
a disk that is 2.5 % more, which only a model of more than 40 units shows. Objects of Python, libraries
and messages are no weights: a model as deep, of hardly any, runs the row too, and what it takes at
most in the same instant does not count. (Where the two peaks are at different times that is more than
was there beside the weights.) A checkpoint is in the page cache before it is read back: pages of files
that are only read the kernel drops when it wants the memory; cold, they would be counted once more. So
each leg but the first goes on a second time, from a checkpoint that is on the disk alone, in a cgroup
that is limited to what the bound leaves it: it lives there, or the kernel kills it.

    python tests/simgpu/larger.py --out proof/results/larger.json [ROW …]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "worlds"))

from simulated.build import library  # noqa: E402

from memory_cgroup import ENTER, Cgroup, memory_cgroup  # noqa: E402

DEADLINE_S, HOST_DEADLINE_S = 580.0, 2400.0
LIMIT = 0.75
"""What a device has, as a part of the model's bytes."""

TOLERANCE = {"fp32": {"sgd": 1e-5, "adamw": 1e-4}, "fp64": {"sgd": 1e-12, "adamw": 1e-10}}
"""Of a loss, relative: it is summed in other orders; Adam divides by small numbers."""

STATES = {"sgd": 1, "adamw": 3}
"""Of an element a checkpoint brings the weight, and with Adam its two moments."""

MODEL = {"dim": 144, "layers": 72, "heads": 4, "kv_heads": 4, "tied": False}
"""69 MiB in blocks of less than 1 MiB: CUDA's segments of 20 MiB would blur so small a device."""

WIDTHS = {"fp32": MODEL["dim"], "fp64": 80}
"""What is gathered at once is less than 1 MiB in either format."""

WIDE, ROOM = {**MODEL, "dim": 432, "layers": 12}, 2**28
"""Where the host is looked at: 105 MiB in blocks of 8.6 MiB, more than four heaps scatter by; the
bytes of a device there. Beside it a narrow one: as many tensors, in hardly any memory."""

MANY, MANY_ROOM = {**WIDE, "layers": 72}, 448 * 2**20
"""The same in 72 blocks, 618 MiB: where a part of the weights is more than one block."""

HSDP = {"dp_replicate": 2, "offload": "parameters"}
"""Half of the weights and half of the gradients are all of a model: plain hsdp trains in 100 %."""

TP, PP = {"tp": 2}, {"pp": 2}

ROWS: dict[str, tuple[int, str, list[Any]]] = {
    "4 sgd": (
        4,
        "sgd",
        ["fsdp", {**TP, "dp_shard": 2}, {**HSDP, "dp_shard": 2}, {**PP, "dp_shard": 2}],
    ),
    "8 adamw": (8, "adamw", ["fsdp", {**TP, **PP, "dp_shard": 2}]),
    "8 adamw, two axes": (
        8,
        "adamw",
        [{**TP, "dp_shard": 4}, {**PP, "dp_shard": 4}, {**HSDP, "dp_shard": 4}],
    ),
}
"""Processes, optimizer, layouts in turn."""

SPAN, PAGE = 4, 4096
"""Addresses of a device, in its memory; in bytes, the kernel's page."""

Told = dict[str, Any]


def ranks(
    size: int,
    asked: Told,
    environ: dict[str, str],
    group: Cgroup | None,
    deadline_s: float = DEADLINE_S,
) -> list[Told]:
    """What each rank of a world tells."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "larger_case.py"), json.dumps(asked)]
    if group is not None:
        used = "usage_in_bytes" if "limit_in_bytes" in group.limit else "current"
        environ = {**environ, "CGROUP_USED": str(group.folder / f"memory.{used}")}
        environ["CGROUP_PEAK"] = str(group.folder / group.peak)
        environ["CGROUP_LIMIT"] = str(group.folder / group.limit)
        command = [sys.executable, "-c", ENTER, str(group.folder / "cgroup.procs"), *command]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    place |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    errors = [Path(asked["folder"], f"rank-{rank}.txt") for rank in range(size)]
    started = []
    for rank, path in enumerate(errors):
        env = {**environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with path.open("w") as error:
            one = subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=error, text=True
            )
        started.append(one)
    until_s = time.monotonic() + deadline_s
    try:
        while any(one.poll() is None for one in started):
            time.sleep(0.05)
            broken = any(one.poll() not in (None, 0) for one in started)
            if broken or time.monotonic() > until_s:
                time.sleep(2.0 * broken)  # others say why they end, too
                break
    finally:
        for one in started:
            one.kill()
    told = [one.communicate()[0].splitlines() for one in started]
    said = "\n".join(f"rank {r}: {path.read_text()[-2500:]}" for r, path in enumerate(errors))
    assert [one.returncode for one in started] == [0] * size, said
    return [json.loads(lines[-1]) for lines in told]


def trained(
    library: str,
    size: int,
    optimizer: str,
    legs: list[Any],
    *,
    host: bool = False,
    limit_bytes: int | None = None,
    precision: str = "fp32",
    **changed: Any,
) -> Told:
    """A row: its legs as every rank tells them, and the losses of one process.

    limit_bytes   of a device; None: `LIMIT`
    """
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))}
    plain = {**os.environ, **paths}
    steps = 3 * len(legs)
    with tempfile.TemporaryDirectory(prefix="larger-") as folder, memory_cgroup(2**40) as group:
        model = {**MODEL, "dim": WIDTHS[precision]}
        asked = {"model": model, "optimizer": optimizer, "legs": legs, "batch": size}
        asked |= {"folder": folder, "steps": steps, "precision": precision, **changed}
        deadline_s = HOST_DEADLINE_S if host else DEADLINE_S
        alone = {**asked, "plain": True, "legs": ["single"]}
        (single,) = ranks(1, alone, plain, None, deadline_s)
        weights_bytes = single["legs"][0]["weights"]
        limit_bytes = limit_bytes or int(LIMIT * weights_bytes)
        simulated = {
            **plain,
            "SIM_LIBRARY": library,
            "SIM_DEVICES": str(size),
            "SIM_MEMORY_BYTES": str(limit_bytes),
            "PYTHONPATH": f"{HERE / 'site'}{os.pathsep}{plain['PYTHONPATH']}",
            "PYTHONWARNINGS": "ignore",
        }
        inside = group if host and isinstance(group, Cgroup) else None
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as devices:
            if inside:
                # A driver stages what is not pinned in a buffer of its own; the simulated one holds
                # copies of it until its stream has run. Its kernels take memory of the host for a
                # moment, of which glibc would keep some: what is freed is returned at once here.
                simulated["SIM_MODE"] = "eager"
                simulated["MALLOC_MMAP_THRESHOLD_"] = str(4 * PAGE)
                # Pages are counted where they are written first: here, outside of the group.
                os.posix_fallocate(devices.fileno(), 0, SPAN * limit_bytes // PAGE * PAGE * size)
                simulated["DEVICES_FILE"] = devices.name
            looked_at = {**asked, "host": inside is not None}
            told = ranks(size, looked_at, simulated, inside, deadline_s)
    assert single["device"] == "cpu"
    assert all(one["device"].startswith("cuda") for one in told)
    return {
        "ranks": size,
        "optimizer": optimizer,
        "precision": precision,
        "weights": weights_bytes,
        "limit": limit_bytes,
        "losses": single["legs"][0]["losses"],
        "legs": [[one["legs"][n] for one in told] for n in range(len(legs))],
        "host": inside is not None,
    }


def with_host(library: str, name: str, model: Told, room_bytes: int) -> Told:
    """A row whose first rank tells of the host too, and of a narrow model's, its weights aside.

    Its first leg is made twice: in a process's first one the heaps take 40 MiB more.
    """
    size, optimizer, legs = ROWS[name]
    if model is MANY:  # what an offload leaves on the host is more than a part of a model
        legs = [one for one in legs if "offload" not in one]
    given = {"host": True, "limit_bytes": room_bytes}
    legs = [legs[0], *legs]
    narrow = trained(library, size, optimizer, legs, **given, model=model | {"dim": 8})
    assert narrow["host"], "no memory cgroup can be made here"
    taken = [told[0]["held"]["resume"]["host"] - narrow["weights"] for told in narrow["legs"]]
    row = trained(library, size, optimizer, legs, **given, model=model, narrow=taken)
    for ours, theirs in zip(row["legs"], narrow["legs"], strict=True):
        for instant, held in ours[0]["held"].items():
            held["narrow"] = theirs[0]["held"][instant]["host"] - narrow["weights"]
    return row


def short(row: Told) -> Told:
    """A row for the record: per leg the most that any rank held, per instant, in MiB."""
    mib = 2**20
    legs = []
    for n, told in enumerate(row["legs"]):
        held = {
            name: {
                key: round(max(one["held"][name].get(key, 0) for one in told) / mib, 2)
                for key in told[0]["held"][name]
            }
            for name in told[0]["held"]
        }
        expected = row["losses"][3 * n : 3 * n + 3]
        off = max(abs(a / b - 1) for a, b in zip(told[0]["losses"], expected, strict=True))
        if "cold" in told[0]:
            held["resume"]["cold, limited to"] = round(told[0]["cold"] / mib, 2)
        for name in ("build", "resume") if row["host"] else ():
            held[name]["host bound"] = round(_most_on_host(name, told, row) / mib, 2)
        legs.append(
            {
                "layout": told[0]["layout"],
                "share_mib": round(max(one["share"] for one in told) / mib, 2),
                "largest_unit_mib": round(told[0]["unit"] / mib, 2),
                "held_mib": held,
                "losses": told[0]["losses"],
                "furthest_from_one_process": float(f"{off:.1e}"),
            }
        )
    names = {name: row[name] for name in ("ranks", "optimizer", "precision")}
    sizes = {"weights_mib": round(row["weights"] / mib, 2), "limit_mib": round(row["limit"] / mib)}
    return {**names, **sizes, "legs": legs}


def _most_on_host(name: str, told: list[Told], row: Told) -> int:
    """What a node may hold beside its devices while building, or loading.

    A build makes one model, beside what offload leaves there. A rank loads all that it keeps before
    it believes any of it: a model's states once per replica.
    """
    if name == "build":
        most = row["weights"] + sum(one["on host"] for one in told)
    else:
        most = STATES[row["optimizer"]] * sum(one["share"] for one in told)
    return int(most + told[0]["unit"])


def check(row: Told) -> None:
    """What must be true of a row."""
    tolerance = TOLERANCE[row["precision"]][row["optimizer"]]
    for n, told in enumerate(row["legs"]):
        expected = row["losses"][3 * n : 3 * n + 3]
        for one in told:
            where = (one["layout"], one["held"])
            assert one["apart"] == [], where
            assert one["exported apart"] == [], where
            assert one["resumed"] == bool(n), where
            for ours, theirs in zip(one["losses"], expected, strict=True):
                assert abs(ours / theirs - 1) < tolerance, (where, ours, theirs)
            for name, times in (("build", 1), ("resume", STATES[row["optimizer"]])):
                most = times * one["share"] + one["unit"]
                assert one["held"][name]["device"] <= most, (name, most, where)
            assert max(held["reserved"] for held in one["held"].values()) <= row["limit"], where
        for name in ("build", "resume") if row["host"] and n else ():
            held = told[0]["held"][name]
            assert told[0]["cold"] > 0
            most = _most_on_host(name, told, row)
            assert held["host"] - held["narrow"] <= most, (name, most, told[0]["layout"], held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; default all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--precision", choices=[*TOLERANCE], default="fp32")
    parser.add_argument("--host", action="store_true", help="look at the host's memory as well")
    asked = parser.parse_args()
    built = str(library())
    found: Told = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {}
    hosts = {", host": (WIDE, ROOM), ", host, many blocks": (MANY, MANY_ROOM)}
    plain = f", {asked.precision}" * (asked.precision != "fp32")
    for name, more in product(asked.rows or ROWS, hosts if asked.host else [plain]):
        if asked.host:
            row = with_host(built, name, *hosts[more])
        else:
            row = trained(built, *ROWS[name], precision=asked.precision)
        told = {"date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", **short(row)}
        print(json.dumps(told, indent=1), flush=True)
        check(row)
        found[name + more] = told
        if asked.out:
            asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
