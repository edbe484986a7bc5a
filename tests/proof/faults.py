"""Faults of the real command by kind, rank and layout: is the right rank told, and does the run go on?

    python tests/proof/faults.py [--seconds 3000] [--out proof/results/faults.json] [--only tp,pp]

Kinds × first, middle and last rank × layouts (`worlds/faulty.py` does them), each in a run of its
own on this machine. A trial counts as well when the run ended as that kind must, `shoal diagnose`
names rank and cause from the folder alone and blames no other island, every step was taken with the
samples and the losses of the same layout's unbroken run, and no process is left. Islands do equally
many steps each here: shared out by how fast each of them was, the samples would be another run's.
Where a disk refused rounds they are done again, and an island that fell before it had saved one goes
on with another's optimizer (`took`): then the samples are the unbroken run's, and losses are not. `saved`: from which step on each restart took them
again. A layout's unbroken run is a trial too: nothing may be wrong with it. It can be stopped and
started again (`kept_trials.py`).
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]
sys.path[:0] = [str(HERE.parent / "worlds"), str(HERE.parent)]

from kept_trials import run_trials  # noqa: E402

from cli_run import CommandLine, lines, trajectory  # noqa: E402
from fault_runs import ARGUMENTS, command  # noqa: E402
from forks import shared  # noqa: E402
from shoal.checkpoint.format.listing import list_checkpoints  # noqa: E402
from shoal.view.diagnose import diagnose  # noqa: E402

TARGET = HERE.parents[1] / "proof" / "results" / "faults.json"
STEPS, DEADLINE_S = 24, 240.0
THREE = ["launch.processes=3", "train.batch=12"]
LAYOUTS: dict[str, tuple[tuple[int, int, int], list[str]]] = {
    # first, middle and last rank (island), arguments
    "tp": ((0, 1, 3), ["launch.processes=4", "layout.tp=4"]),
    "pp": ((0, 1, 2), ["launch.processes=3", "layout.pp=3"]),
    "islands": (
        (0, 1, 2),
        [
            "islands.method=diloco",
            "islands.count=3",
            "islands.period=6",
            "islands.pace=equal",
            "launch.processes=1",
        ],
    ),
    "ddp": ((0, 1, 2), ["layout.strategy=ddp", *THREE]),
    "fsdp": ((0, 1, 2), ["layout.strategy=fsdp", *THREE]),
}
WHOLE = ("ddp", "fsdp", "islands")
"""Layouts that run the module's own forward pass."""
KILLED, WATCHED = "nothing is known of the sender", "ended by the watch"
KINDS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    # the finding's kind, its cause, place ("passes": forward where that is the model's own), layouts
    "killed": ("worker_died", KILLED, "passes", ()),
    "raises": ("worker_died", "an exception that nobody caught", "forward", WHOLE),
    "leaves": ("worker_died", "the run was not done", "data", ()),
    "stopped": ("hang", "its process is stopped (SIGSTOP)", "passes", ()),
    "lock": ("hang", "Python does not answer: a call into C keeps its lock", "passes", ()),
    "loop": ("hang", "it is in no collective (hanging.py:", "data", ()),
    "barrier": ("hang", "it is in torch.distributed.barrier (hanging.py:", "data",
                ("tp", "pp", "ddp", "fsdp")),
    "cut": ("hang", "all ranks wait for each other", "data", ("tp", "pp", "ddp", "fsdp")),
    "memory": ("worker_died", "memory: it asked for more than there is", "data", ()),
    "loader": ("loader", "a process that loads data died", "data", ()),
    "fsync": ("checkpoint_failed", "the disk, or the file system, refused", "", ()),
    "damaged": ("checkpoint_damaged", "its bytes on the disk are not those", "", ()),
    "asked": ("", "", "", ()),
    "slow": ("slow_rank", "its samples take longer to read", "", ("tp", "pp", "ddp", "fsdp")),
    "flip": ("drift", "bits changed in memory", "", ("ddp",)),
    "nan": ("step_skipped", "numbers that are not finite", "", ()),
    "wild": ("step_skipped", "samples that are unlike the others", "", ()),
}  # fmt: skip
ONCE = ("nan", "wild")
"""Kinds of samples, which no rank is at fault for: one trial each."""
MORE: dict[str, tuple[str, ...]] = {
    "loader": ("data.workers=1",),
    "wild": ("train.spikes=skip",),
    "flip": ("train.on=faulty:flip", "train.drift=every"),
    "slow": ("train.steps=64",),
}
"""Arguments of a kind."""
FATAL = {"memory": 2, "raises": 2}
"""Exit status of the kinds that end a run: others do 0, or `asked` 143. What raises does so in a
sample's read only: the next start would meet it again."""
UNREADABLE = "the data: this sample cannot be read or joined"


def trials() -> list[dict[str, Any]]:
    """Every trial: the unbroken run of each layout first, then every kind on each last rank."""
    found = [{"layout": layout, "kind": "", "rank": 0} for layout in LAYOUTS]
    for number in (2, 1, 0):
        for kind, (_, _, place, layouts) in KINDS.items():
            for layout, (ranks, _) in LAYOUTS.items():
                if (layouts and layout not in layouts) or (kind in ONCE and number):
                    continue
                at = ("forward" if layout in WHOLE else "data") if place == "passes" else place
                rank = ranks[number]
                found.append({"layout": layout, "kind": kind, "rank": rank, "place": at})
    return found


def name_of(trial: dict[str, Any]) -> str:
    return f"{trial['layout']}, {trial['kind'] or 'unbroken'}, {trial['rank']}"


def asked_of(trial: dict[str, Any]) -> dict[str, Any]:
    """What faulty.py is to do."""
    kind, rank = trial["kind"], trial["rank"]
    asked = {"kind": kind, "place": trial.get("place", ""), "rank": rank}
    if trial["layout"] == "islands":
        asked |= {"rank": 0, "island": f"island-{rank}"}
    if kind in ONCE:
        asked |= {"kind": "", kind: [15]}
    if kind == "loader":
        asked |= {"kind": "killed", "after": 20}
    if "after" in trial:
        asked["after"] = trial["after"]
    if kind == "flip":
        asked["after"] = 10
    if kind == "slow":
        asked["extra_s"] = 0.025
    return asked


def one(trial: dict[str, Any], unbroken: dict[str, Any]) -> dict[str, Any]:
    """Do a trial; what came out, `wrong` being empty where all is well.

    unbroken   by layout, the rows of its unbroken run
    """
    layout, kind = trial["layout"], trial["kind"]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        more = (*LAYOUTS[layout][1], *MORE.get(kind, ()))
        if layout == "islands" and kind == "damaged":
            more = (*more, "checkpoint.keep=3")
        run = command(Path(folder), asked_of(trial) if kind else None, *more)
        try:
            code, output = done(run, trial)
        except AssertionError as failure:
            return {"wrong": f"no end: {str(failure)[-600:]}"}
        places = sorted(run.run.glob("island-*")) or [run.run]
        place = places[trial["rank"]] if layout == "islands" else run.run
        rows = {path.name: trajectory(path) for path in places}
        found = [one for one in diagnose(place) if not one.advice or one.kind == "slow_rank"]
        others = {path for path in (run.run, *places) if path != place}
        elsewhere = [one for path in others for one in diagnose(path) if not one.advice]
        died = [one for one in lines(place / "events.jsonl") if one["event"] == "restarting"]
        took = [path.name for path in places if takes_anothers(lines(path / "events.jsonl"))]
        left = [process.pid for process in psutil.process_iter() if in_folder(process, folder)]
        # Those that a sample or a pass starts leave this file behind.
        happened = not trial.get("place") or (Path(folder) / "hung").exists()
    told = [[one.kind, one.rank, one.why[:60], one.over] for one in found]
    out: dict[str, Any] = {"code": code, "told": told}
    out |= {"seconds": round(time.monotonic() - began_s, 1), "saved": [e["saved"] for e in died]}
    out |= {"took": took} if took else {}
    if not kind:
        unbroken[layout] = rows
    blamed = [one for one in elsewhere if not follows(trial, one)]
    wrong = "" if happened else "its fault never happened"
    wrong = (
        wrong or verdict(trial, code, found, left) or (blamed and f"blamed: {blamed[0].what}") or ""
    )
    wrong = wrong or unlike(trial, rows, unbroken.get(layout), losses=not took)
    return {**out, "wrong": wrong} | ({"output": output[-600:]} if wrong else {})


def done(run: CommandLine, trial: dict[str, Any]) -> tuple[int, str]:
    """Do what is done from outside; (exit status, output) of the command that ended."""
    islands = trial["layout"] == "islands"
    place = run.run / f"island-{trial['rank']}" if islands else run.run
    if trial["kind"] == "asked":
        run.wait_for(lambda: len(lines(place / "metrics.jsonl")) >= 6)
        told = [e for e in lines(place / "events.jsonl") if e["event"] == "worker_started"]
        rank = 0 if islands else trial["rank"]
        psutil.Process({e["rank"]: e["pid"] for e in told}[rank]).send_signal(signal.SIGTERM)
    code, output = run.finish(DEADLINE_S)
    if trial["kind"] == "damaged" and code == 0:
        newest = list_checkpoints(place / "checkpoints")[0].path
        victim = newest / f"rank-{0 if islands else trial['rank']}.safetensors"
        raw = bytearray(victim.read_bytes())
        raw[len(raw) // 2] ^= 4
        victim.write_bytes(raw)
        return CommandLine(run.folder, "--resume", "runs/run").finish(DEADLINE_S)
    return code, output


def ends(trial: dict[str, Any]) -> bool:
    """Whether its fault ends the run."""
    kind = trial["kind"]
    return kind in FATAL and (kind != "raises" or trial["place"] == "data")


def follows(trial: dict[str, Any], one: Any) -> bool:
    """Whether what is told in another island's folder blames nobody, or the one at fault.

    It lost one (the one at fault, or one that had lost that before), says that the disk of that one
    kept a round from counting, or met the same samples, which all islands are dealt in turn.
    """
    if trial["kind"] in ONCE:
        return bool(one.kind == KINDS[trial["kind"]][0]) and "15" in one.what
    if one.kind == "round_discarded":
        return f"island {trial['rank']}" in one.what
    return one.kind == "island_lost" or "no cause of its own" in one.why


def verdict(trial: dict[str, Any], code: int, found: list[Any], left: list[int]) -> str:
    """What is wrong with how it ended and what was found; "" for nothing."""
    kind, fatal = trial["kind"], ends(trial)
    status = 143 if kind == "asked" else FATAL[kind] if fatal else 0
    if code != status:
        return f"status {code}, not {status}"
    if left:
        return f"left: {left}"
    wanted, why = KINDS[kind][:2] if kind else ("", "")
    if kind == "raises" and fatal:
        why = UNREADABLE
    if not wanted:
        return "" if not found else f"found {found[0].what}"
    if trial["layout"] == "islands" and kind == "fsync":  # what came of it is told too
        found = [one for one in found if not follows(trial, one)]
    if {one.kind for one in found} != {wanted}:
        return f"found {[one.what for one in found]}, not {wanted}"
    first = found[0]
    if why not in first.why:
        return f"another cause: {first.why}"
    rank = 0 if trial["layout"] == "islands" else trial["rank"]
    nameless = kind in (*ONCE, "cut", "damaged")
    nameless |= trial["layout"] == "islands" and kind == "loader"  # the one rank of its island
    if first.rank != rank and not nameless:
        return f"another rank: {first.rank}"
    if kind == "damaged" and f"rank-{rank}.safetensors" not in first.what:
        return f"another file: {first.what}"
    if kind in ONCE and "15" not in first.what:
        return f"another sample: {first.what}"
    if first.over != (not fatal and kind != "slow"):
        return f"over: {first.over}"
    return ""


def takes_anothers(events: list[dict[str, Any]]) -> bool:
    """Whether an island was started again before it had saved a round of its own."""
    for event in events:
        if event["event"] == "checkpoint_saved":
            return False
        if event["event"] == "resumed":
            return True
    return False


def unlike(
    trial: dict[str, Any],
    rows: dict[str, Any],
    unbroken: dict[str, Any] | None,
    *,
    losses: bool = True,
) -> str:
    """Whether the steps are not those of the unbroken run; "" where they are, or need not be."""
    kind = trial["kind"]
    if ends(trial) or kind in ("asked", "slow", *ONCE, ""):
        return ""
    if unbroken is None:
        return "no unbroken run of this layout"
    if trial["layout"] == "islands" and kind == "fsync":
        return ""
    for name, wanted in unbroken.items():
        mine = rows[name]
        if [(row[0], row[3]) for row in mine] != [(row[0], row[3]) for row in wanted]:
            return f"{name}: other steps or samples"
        apart = max(abs(a[1] - b[1]) / abs(b[1]) for a, b in zip(mine, wanted, strict=True))
        if losses and apart > 1e-5:
            return f"{name}: losses differ by {apart:.1e}"
    return ""


def in_folder(process: psutil.Process, folder: str) -> bool:
    try:
        return process.cwd().startswith(folder) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def main() -> int:
    shared()  # imports once
    unbroken: dict[str, Any] = {}

    def with_unbroken(trial: dict[str, Any]) -> dict[str, Any]:
        if trial["kind"] and trial["layout"] not in unbroken:  # of a sitting before
            one({"layout": trial["layout"], "kind": "", "rank": 0}, unbroken)
        return one(trial, unbroken)

    def more(done: dict[str, Any]) -> dict[str, Any]:
        return {"arguments": ARGUMENTS, "layouts": {n: a for n, (_, a) in LAYOUTS.items()}}

    return run_trials(__doc__, TARGET, trials(), name_of, with_unbroken, more)


if __name__ == "__main__":
    sys.exit(main())
