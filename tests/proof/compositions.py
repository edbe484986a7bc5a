"""Compositions by the dice: layout × model × every policy, started cold, warm, killed and resumed.

`make proof` runs it. Each row is one `shoal train` command that is drawn by the seed and its
number. It is started with nothing kept (cold); once more with what the first start kept (warm), and
then one of its ranks kills itself with SIGKILL after the second step, once the checkpoint of the
first is complete, so that the supervisor starts it a third time. What holds then:

    refused   in one line, before SOON_S are over, for a reason of compositions_reasons.py that is
              true of these words. Seconds are CPU seconds, since a busy machine's are others':
              of the command, of one of its workers, and of the imports that are saved here
    equal     the third start went on from the checkpoint, and the warm, killed and resumed run is
              the cold one bit for bit: losses, norms, weights, validations; in float64 the cold one
              is one process's within design §6; in a narrower format it is so too when the format
              is replaced, and in its own it stays within `bounds_of`
    else      a defect: crashed, accused (refused after it ran, or of doing wrong), different, lost
              (went on from no checkpoint), late, hung, untrue or unread (a refusal that is not
              true, or whose reason is none of the list)

With layout.compress what one step leaves out is not saved (it is said at the start): such a run is
the cold one up to the checkpoint, and near it afterwards.
What is done stays in proof/results/compositions.json, so it can be stopped and started again, also
twice at a time for two seeds; rows of another source are made anew.

    python tests/proof/compositions.py --seeds 41 97 --rows 200
    python tests/proof/compositions.py --seeds 41 --only 17      one row, and what it printed
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import math
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a fork copies no threads
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("worlds", "proof", "")]
TARGET = ROOT / "proof" / "results" / "compositions.json"
SOON_S, DEADLINE_S = 5.0, 240.0
NEAR = 0.05
RIGHT = ("equal", "refused")
KILLED_AT = 2

from compositions_drawn import BASE, Words, alone, draw, furnish  # noqa: E402
from compositions_reasons import reason_of  # noqa: E402
from kept_rows import Row, done_already  # noqa: E402
from source import source_hash  # noqa: E402
from warm_start import COLD, FORESEES, Ended, apart, train, warm  # noqa: E402

from cli_run import final_hashes, lines, trajectory  # noqa: E402

ACCUSED = re.compile(
    r"saved other tensors in its second run|no parameter got a gradient|computes something else"
    r"|changes its input in place|differ"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[41, 97])
    parser.add_argument("--rows", type=int, default=200, help="of each seed")
    parser.add_argument("--only", type=int, default=-1, help="this row, without keeping it")
    parser.add_argument("--into", type=Path, default=TARGET)
    parser.add_argument("--keep", action="store_true", help="keep rows of earlier sources too")
    parser.add_argument("--light", action="store_true", help="rows that the command refuses, only")
    parser.add_argument("--for-s", type=float, default=math.inf, help="begin no row after this")
    options = parser.parse_args()
    source = source_hash()
    if not options.light:
        warm()
    with tempfile.TemporaryDirectory(prefix="compositions-") as folder:
        furnish(Path(folder))
        if options.only >= 0:
            row = one_row(options.seeds[0], options.only, Path(folder))
            print(json.dumps(row, indent=1))
            return 0 if row["outcome"] in RIGHT else 1
        rows = fill(options, Path(folder), source)
    wrong = [key for key, row in rows.items() if row["outcome"] not in RIGHT]
    print(f"{len(rows)} rows, {len(wrong)} defects: {wrong}")
    return 1 if wrong else 0


def fill(options: argparse.Namespace, folder: Path, source: str) -> dict[str, Row]:
    """Make the rows that are missing, and give all."""
    until_s = time.monotonic() + options.for_s
    kept = "" if options.keep else source
    rows = done_already(options.into, kept)
    for number, seed in itertools.product(range(options.rows), options.seeds):
        key = f"{seed}.{number}"
        if key in rows or time.monotonic() > until_s:
            continue
        row = {**one_row(seed, number, folder), "source": source}
        if row["outcome"] == "postponed":
            continue
        rows = add(options.into, key, row, kept)
        print(f"{key} {row['cpu_s']:.0f} s {row['outcome']}: {row['layout']} · "
              f"{' '.join(row['words'])} · {row['why'][:300]}", flush=True)  # fmt: skip
    return rows


def one_row(seed: int, number: int, folder: Path) -> Row:
    """Draw a composition and find out how it fares."""
    layout, words = draw(random.Random(f"{seed}.{number}"))
    began_s = time.monotonic()
    fate = Fate(words, folder, random.Random(f"kill {seed}.{number}"))
    try:
        found = fate.find()
    except Defect as defect:
        found = {"outcome": defect.outcome, "why": str(defect)}
    told = [f"{key}={value}" for key, value in words.items() if BASE.get(key) != value]
    times = {"seconds": round(time.monotonic() - began_s, 1), "cpu_s": round(fate.cpu_s, 1)}
    return {"layout": layout, "words": told, **times, **found, **fate.seen}


class Defect(Exception):
    """A composition that is neither equal nor rightly refused."""

    def __init__(self, outcome: str, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


class Fate:
    """One composition's starts, in a folder that was furnished."""

    def __init__(self, words: Words, folder: Path, dice: random.Random) -> None:
        self.words, self.folder, self.dice = words, folder, dice
        self.cache = folder / "cache"
        self.runs = folder / "runs"
        self.seen: dict[str, Any] = {}
        self.cpu_s = 0.0
        shutil.rmtree(self.runs, ignore_errors=True)
        # The data and the machine's rates are no part of a start.
        (self.cache / "proofs.json").unlink(missing_ok=True)

    def find(self) -> Row:
        """Outcome and why. Errors: Defect."""
        cold = self.start("cold", self.words)
        if cold.code == COLD:
            return {"outcome": "postponed", "why": ""}
        if cold.code == 2:
            return {"outcome": "refused", "why": self.refusal(cold)}
        self.must_end("cold", cold)
        self.again()
        self.as_alone("", self.words)
        precision = self.words["precision.compute"]
        if precision != "fp64" and "layout.compress" not in self.words:
            wide = {**self.words, "precision.compute": "fp64"}
            for narrow in ("precision.reduce", "precision.residual"):
                wide.pop(narrow, None)
            wide |= {"train.prove": "off", "train.steps": "2"}
            self.must_end("in float64", self.start("cold-wide", wide))
            self.as_alone("-wide", wide)
        return {"outcome": "equal", "why": ""}

    def start(self, name: str, words: Words, kill: list[int] | None = None) -> Ended:
        """`shoal train` under a name."""
        words = {**words, "run.name": name, "train.on": '["kill_hook:at"]'}
        environ = {
            **{
                key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
            },
            "SHOAL_CACHE": str(self.cache),
            "COMPOSITION_KILL": json.dumps(kill),
            FORESEES: str(int(name == "cold" or "train.validate_every" in words)),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled"),
        }
        told = [f"{key}={value}" for key, value in words.items()]
        patience = 4 if words.get("train.compile") == "blocks" else 1
        ended = train(told, self.folder, environ, patience * DEADLINE_S)
        self.cpu_s += ended.cpu_s
        return ended

    def refusal(self, ended: Ended) -> str:
        """The reason. Errors: Defect where it is no refusal as it should be."""
        self.seen["refused_after_s"] = round(ended.alone_s, 2)
        said = [line for line in ended.text.splitlines() if line.startswith("shoal: ")]
        if trajectory(self.runs / "cold"):
            raise Defect("accused", f"after it ran: {ended.line}")
        if "Traceback" in ended.text or len(said) != 1:
            raise Defect("crashed", ended.text[-1500:])
        name, is_true = reason_of(ended.line, self.words)
        if not name:
            raise Defect("accused" if ACCUSED.search(ended.line) else "unread", ended.line)
        if not is_true:
            raise Defect("untrue", ended.line)
        if ended.alone_s > SOON_S:
            raise Defect("late", f"refused after {ended.alone_s:.1f} s: {ended.line}")
        self.seen["reason"] = name
        return ended.line

    def must_end(self, when: str, ended: Ended) -> None:
        """Errors: Defect unless it came to its end."""
        if ended.code == 0:
            return
        how = {-9: "hung", 2: "accused", 3: "accused"}.get(ended.code, "crashed")
        logs = "" if how == "accused" else ended.text[-1500:]
        raise Defect(how, f"{when}: exit {ended.code}: {ended.line}\n{logs}")

    def again(self) -> None:
        """Warm, killed and resumed: bit for bit the same."""
        size = int(self.words["launch.processes"])
        rank = self.dice.randrange(size)
        self.must_end("warm", self.start("warm", self.words, [rank, KILLED_AT]))
        events = lines(self.runs / "warm" / "events.jsonl")
        died = [e for e in events if e["event"] == "worker_died"]
        if len(died) != 1 or "SIGKILL" not in died[0]["how"]:
            raise Defect("crashed", f"warm: died {[(e['how'], e['traceback']) for e in died]}")
        (saved,) = [e["saved"] for e in events if e["event"] == "restarting"]
        began = [e["step"] for e in events if e["event"] == "compute_started"]
        self.seen |= {"killed": rank, "saved": saved, "resumed_at": began[-1]}
        if not saved or began != [0, saved]:
            raise Defect("lost", f"saved at step {saved}, began at {began}")
        self.must_repeat(saved if "layout.compress" in self.words else None)

    def must_repeat(self, until: int | None) -> None:
        """Errors: Defect unless the warm run is the cold one; after step `until`, near it."""
        one, other = (self.runs / name for name in ("cold", "warm"))
        before, after = trajectory(one), trajectory(other)
        if until is not None and len(before) == len(after):
            for (_, loss, _, _), (_, again, _, _) in zip(
                before[until:], after[until:], strict=True
            ):
                if not _apart(again, loss) <= NEAR:
                    raise Defect("different", f"killed and resumed: loss {again!r}, was {loss!r}")
            before, after = before[:until], after[:until]
        if before != after:
            raise Defect("different", f"killed and resumed: {_first(before, after)}")
        if until is None and validations(one) != validations(other):
            raise Defect("different", "killed and resumed: other validations")
        if until is None and final_hashes(one) != final_hashes(other):
            raise Defect("different", "killed and resumed: the last checkpoint has other weights")

    def as_alone(self, suffix: str, words: Words) -> None:
        """As one process computes it."""
        one = alone(words)
        self.must_end("one process", self.start(f"alone{suffix}", one))
        bounds = bounds_of(words)
        here = trajectory(self.runs / f"cold{suffix}")
        there = trajectory(self.runs / f"alone{suffix}")
        if [row[3] for row in here] != [row[3] for row in there]:
            raise Defect("different", "other samples than one process")
        for (step, loss, norm, _), (_, own, wanted, _) in zip(here, there, strict=True):
            for what, got, right in (("loss", loss, own), ("gradient norm", norm, wanted)):
                off = _apart(got, right)
                most = bounds[0] if step == 1 else bounds[1]
                if what == "gradient norm":
                    most = bounds[2] if step == 1 else math.inf if bounds[1] > 1e-8 else most
                if not off <= most:
                    raise Defect("different", f"{suffix} step {step}: {what} {got!r}, in one "
                                 f"process {right!r}: {off:.1e} off, at most {most:.1e}")  # fmt: skip
        held_out = [validations(self.runs / f"{n}{suffix}") for n in ("cold", "alone")]
        for (step, got), (_, right) in zip(*held_out, strict=True):
            if not _apart(got, right) <= bounds[1]:
                raise Defect("different", f"{suffix} validation after step {step}: {got!r}, in one "
                             f"process {right!r}")  # fmt: skip
        if bounds[3] < math.inf:
            ends = [str(self.runs / f"{n}{suffix}") for n in ("cold", "alone")]
            off, name = apart(lambda: weights_apart(*ends))
            self.seen["weights"] = off
            if not off <= bounds[3]:
                raise Defect("different", f"{suffix} weights {off:.1e} of their norm off, at most "
                             f"{bounds[3]:.1e}; most in {name}")  # fmt: skip


def bounds_of(words: Words) -> tuple[float, float, float, float]:
    """Largest relative differences: loss of step 1, later losses, norm of step 1, weights.

    fp64     step 1 1e-12; SGD's later losses too, other optimizers' 1e-9 (they divide by noise, and
             lion and muon keep only its sign: their weights are not compared); compiled code of
             transformers' models as fp32, as their norms cast to it: it adds in another order there
    others   as `proof/equality_bounds.py` says why: sums in fp32 to 2⁻¹⁹, and 8 × the format's
             epsilon where parts of products are added (tp, cp) or operations are fused (compile);
             later losses to 5 %, which tells what is wrong by far
    what travels rounded (compress, reduce=bf16): the first loss is right, the rest near
    """
    precision, optimizer = words["precision.compute"], words.get("optimizer.name", "adamw")
    near = NEAR
    parts = any(key in words for key in ("layout.tp", "layout.cp")) or words.get(
        "layout.strategy"
    ) in ("tp", "cp")
    fused = words.get("train.compile") == "blocks"
    if fused and words.get("model.name", "").startswith("hf:") and precision == "fp64":
        first, norm, later, weights = 2.0**-19, 2.0**-19, near, math.inf
    elif precision == "fp64":
        first = norm = 1e-12
        later = 1e-12 if optimizer == "sgd" else 1e-9
        weights = {"sgd": 1e-12, "lion": math.inf, "muon": math.inf}.get(optimizer, 1e-10)
    else:
        wide = {"fp32": 2.0**-15, "bf16": 2.0**-5, "fp16": 2.0**-8}[precision]
        first = norm = wide if parts or fused else 2.0**-19
        later, weights = near, math.inf
    if "layout.compress" in words:
        return first, near, math.inf, math.inf
    if words.get("precision.reduce") == "bf16":
        return first, near, 2.0**-7, math.inf
    return first, later, norm, weights


def validations(run: Path) -> list[tuple[int, float]]:
    """(step, held-out loss) of every validation of a run's last attempts, each step once."""
    told = [e for e in lines(run / "events.jsonl") if e["event"] == "validated"]
    return sorted({e["step"]: e["loss"] for e in told}.items())


def weights_apart(here: str, there: str) -> tuple[float, str]:
    """(distance of all weights, of their norm; the parameter that differs most)."""
    from safetensors.torch import load_file

    from shoal.checkpoint.export.export_file import export_file
    from shoal.checkpoint.format.listing import list_checkpoints

    def read(run: str) -> dict[str, Any]:
        target = Path(run) / "weights.safetensors"
        export_file(list_checkpoints(Path(run) / "checkpoints")[0].path, target)
        return load_file(target)

    one, other = read(here), read(there)
    if set(one) != set(other):
        raise ValueError(f"other names: {sorted(set(one) ^ set(other))}")
    norm = math.sqrt(sum(float(t.double().norm()) ** 2 for t in other.values()))
    off = {n: float((one[n].double() - t.double()).norm()) for n, t in other.items()}
    return math.sqrt(sum(o * o for o in off.values())) / norm, max(off, key=lambda n: off[n])


def _apart(got: float | None, right: float | None) -> float:
    """Relative difference; numbers that were not finite stand as None in the record."""
    if got is None or right is None:
        return 0.0 if got is right else math.inf
    return abs(got - right) / abs(right) if right else abs(got)


def _first(before: list[Any], after: list[Any]) -> str:
    if len(before) != len(after):
        return f"{len(before)} and {len(after)} steps"
    return next(f"{b} and {a}" for b, a in zip(before, after, strict=True) if b != a)


def add(path: Path, key: str, row: Row, kept: str) -> dict[str, Row]:
    """Put a row into the record, to which another program may add too; gives all rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = {**done_already(path, kept), key: row}
        ordered = sorted(rows, key=lambda key: [int(n) for n in key.split(".")])
        rows = {key: rows[key] for key in ordered}
        path.write_text(json.dumps(record(rows), indent=1, ensure_ascii=False) + "\n")
    finally:
        os.close(folder)  # and unlocks it
    return rows


def record(rows: dict[str, Row]) -> dict[str, Any]:
    """What is written: the rows, and what they say together."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit,
        "sources": dict(Counter(row["source"] for row in rows.values())),
        "seeds": dict(Counter(key.partition(".")[0] for key in rows)),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "counts": dict(Counter(row["outcome"] for row in rows.values())),
        "reasons": dict(Counter(row["reason"] for row in rows.values() if "reason" in row)),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
