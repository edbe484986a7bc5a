"""Compositions by the dice: layout × model × every policy, started cold, warm, killed and resumed.

`make proof` runs it. Each row is one `shoal train` command that is drawn by the seed and its
number. It is started with nothing kept (cold); once more with what the first start kept (warm), and
then one of its ranks kills itself with SIGKILL after a step, so that the supervisor starts it a
third time and it goes on from a checkpoint. What holds then:

    refused   in one line, before 5 s are over, for a reason that is known to be true (REASONS)
    equal     the warm, killed and resumed run is the cold one bit for bit: losses, norms, weights;
              in float64 the cold one is one process's within design §6; in a narrower format it is
              so too when the format is replaced, and in its own it stays within `bounds`
    else      crashed, accused, different, unsaved, hung: a defect

What is done stays in docs/proof/compositions.json, so it can be stopped and started again; rows of
another source are made anew.

    python tests/proof/compositions.py --seed 3 --rows 400
    python tests/proof/compositions.py --seed 3 --only 17      one row, and what it printed
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a fork copies no threads
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "worlds"), str(ROOT / "tests" / "proof")]
TARGET = ROOT / "docs" / "proof" / "compositions.json"
SOON_S, DEADLINE_S = 5.0, 240.0
KILLED_AT = 4

from compositions_drawn import Words, alone, draw, furnish  # noqa: E402
from equality import source_hash  # noqa: E402
from warm_start import Ended, apart, train  # noqa: E402

from cli_run import final_hashes, lines, trajectory  # noqa: E402

REASONS = {
    "a CPU has no other memory": r"memory\.offload = \w+: this run computes on the CPU",
    "only fsdp's parameters can be away": r"memory\.offload = parameters: .* needs whole parameters",
    "not built yet": r"layout\.cp = \d: does not go with layout\.(tp|pp) = \d in this version",
    "says how, but not that": r"(layout\.context|sequence_parallel) = \w+: .*, which is 1;",
    "a word for pipelines": r"is about the stages of a pipeline, and layout\.pp is 1",
    "a backward in two halves": r"runs a backward in two halves",
    "more stages than blocks": r"more stages than the \d+ blocks",
    "too few micro-batches": r"layout\.schedule = \w+: needs .* per data-parallel rank",
    "batches do not divide": r"train\.batch = \d+: not divisible by",
    "one copy of gradients only": r"layout\.compress = .*: (fsdp|hsdp|zero\d|.* sums over all data)",
    "rounding on rounding": r"layout\.compress = .*: (fp16's loss scale|precision\.reduce = bf16)",
    "no gradients to compress": r"layout\.compress = ",
    "operations that code no longer has": r"recompute = selective looks at single operations",
    "draws that may differ": r"draws random numbers .* cannot be traced",
    "sequences do not divide": r"tokens, which do not divide into \d equal parts",
    "no experts": r"layout\.ep = \d: the model has no part",
    "an optimizer of whole matrices": r"optimizer\.name = .*|layout.*: (Muon|Adafactor)",
    "dualpipe": r"layout\.schedule = dualpipe",
    "defer_sync": r"train\.defer_sync",
}
"""What a refusal is about → its text: each was read, and is true."""

ACCUSED = re.compile(
    r"saved other tensors in its second run|no parameter got a gradient|computes something else"
    r"|changes its input in place|differ"
)
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--only", type=int, default=-1, help="this row, without keeping it")
    parser.add_argument("--into", type=Path, default=TARGET)
    parser.add_argument("--keep", action="store_true", help="keep rows of earlier sources too")
    options = parser.parse_args()
    source = source_hash()
    with tempfile.TemporaryDirectory(prefix="compositions-") as folder:
        furnish(Path(folder))
        if options.only >= 0:
            row = one_row(options.seed, options.only, Path(folder))
            print(json.dumps(row, indent=1))
            return 0 if row["outcome"] in ("equal", "refused") else 1
        kept = done_already(options.into, "" if options.keep else source)
        fill(kept, options, Path(folder), source)
    wrong = [key for key, row in kept.items() if row["outcome"] not in ("equal", "refused")]
    print(f"{len(kept)} rows, {len(wrong)} defects: {wrong}")
    return 1 if wrong else 0


def fill(rows: dict[str, Row], options: argparse.Namespace, folder: Path, source: str) -> None:
    """Make the rows that are missing."""
    for number in range(options.rows):
        key = f"{options.seed}.{number}"
        if key in rows:
            continue
        row = rows[key] = one_row(options.seed, number, folder)
        row["source"] = source
        print(f"{key} {row['seconds']:.0f} s {row['outcome']}: {row['layout']} · "
              f"{' '.join(row['words'])} · {row['why'][:300]}", flush=True)  # fmt: skip
        write(options.into, rows, source)


def one_row(seed: int, number: int, folder: Path) -> Row:
    """Draw a composition and find out how it fares."""
    layout, words = draw(random.Random(f"{seed}.{number}"))
    began_s = time.monotonic()
    try:
        found = Fate(words, folder, random.Random(f"kill {seed}.{number}")).find()
    except Defect as defect:
        found = {"outcome": defect.outcome, "why": str(defect)}
    told = [f"{key}={value}" for key, value in words.items() if not key.startswith("data.s")]
    return {"layout": layout, "words": told, "seconds": time.monotonic() - began_s, **found}


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
        shutil.rmtree(self.runs, ignore_errors=True)
        # The data and the machine's rates are no part of a start.
        (self.cache / "proofs.json").unlink(missing_ok=True)

    def find(self) -> Row:
        """Outcome and why. Errors: Defect."""
        cold = self.start("cold", self.words)
        if cold.code == 2:
            return {"outcome": "refused", "why": self.refusal(cold), **self.seen}
        self.must_end("cold", cold)
        self.again()
        self.as_alone("", self.words)
        precision = self.words["precision.compute"]
        if precision != "fp64" and "layout.compress" not in self.words:
            wide = {**self.words, "precision.compute": "fp64"}
            wide.pop("precision.reduce", None)
            wide["train.prove"] = "off"
            self.must_end("in float64", self.start("cold-wide", wide))
            self.as_alone("-wide", wide)
        return {"outcome": "equal", "why": "", **self.seen}

    def start(self, name: str, words: Words, kill: list[int] | None = None) -> Ended:
        """`shoal train` under a name."""
        words = {**words, "run.name": name, "train.on": '["kill_hook:at"]'}
        environ = {
            **{
                key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
            },
            "SHOAL_CACHE": str(self.cache),
            "COMPOSITION_KILL": json.dumps(kill),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled"),
        }
        told = [f"{key}={value}" for key, value in words.items()]
        patience = 4 if words.get("train.compile") == "blocks" else 1
        return train(told, self.folder, environ, patience * DEADLINE_S)

    def refusal(self, ended: Ended) -> str:
        """The reason. Errors: Defect where it is no refusal as it should be."""
        self.seen["refused_s"] = round(ended.wall_s, 2)
        said = [line for line in ended.text.splitlines() if line.startswith("shoal: ")]
        if "Traceback" in ended.text or len(said) != 1:
            raise Defect("crashed", ended.text[-1500:])
        if ACCUSED.search(ended.line):
            raise Defect("accused", ended.line)
        # On a busy machine a second is what a process computes in it.
        took_s = min(ended.wall_s, ended.cpu_s / int(self.words["launch.processes"]))
        if took_s > SOON_S:
            raise Defect("late", f"refused after {took_s:.1f} s: {ended.line}")
        self.seen["known"] = next(
            (n for n, text in REASONS.items() if re.search(text, ended.line)), ""
        )
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
        resumed = [e["step"] for e in events if e["event"] == "compute_started"]
        self.seen["killed"], self.seen["resumed_at"] = rank, resumed[-1]
        if (before := trajectory(self.runs / "cold")) != (after := trajectory(self.runs / "warm")):
            raise Defect("different", f"killed and resumed: {_first(before, after)}")
        if final_hashes(self.runs / "cold") != final_hashes(self.runs / "warm"):
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
             lion and muon keep only its sign: their weights are not compared)
    others   as `trainer/proof/bounds.py` says why: sums in fp32 to 2⁻¹⁹, and 8 × the format's
             epsilon where parts of products are added (tp, cp) or operations are fused (compile);
             later losses to 5 %, which tells what is wrong by far
    what travels rounded (compress, reduce=bf16): the first loss is right, the rest near
    """
    precision, optimizer = words["precision.compute"], words.get("optimizer.name", "adamw")
    near = 0.05
    parts = any(key in words for key in ("layout.tp", "layout.cp")) or words.get(
        "layout.strategy"
    ) in ("tp", "cp")
    if precision == "fp64":
        first = norm = 1e-12
        later = 1e-12 if optimizer == "sgd" else 1e-9
        weights = {"sgd": 1e-12, "lion": math.inf, "muon": math.inf}.get(optimizer, 1e-10)
    else:
        wide = {"fp32": 2.0**-15, "bf16": 2.0**-5, "fp16": 2.0**-8}[precision]
        fused = words.get("train.compile") == "blocks"
        first = norm = wide if parts or fused else 2.0**-19
        later, weights = near, math.inf
    if "layout.compress" in words:
        return first, near, math.inf, math.inf
    if words.get("precision.reduce") == "bf16":
        return first, near, 2.0**-7, math.inf
    return first, later, norm, weights


def weights_apart(here: str, there: str) -> tuple[float, str]:
    """(distance of all weights, of their norm; the parameter that differs most)."""
    from safetensors.torch import load_file

    from shoal.checkpoint.catalog import find
    from shoal.checkpoint.export import export

    def read(run: str) -> dict[str, Any]:
        target = Path(run) / "weights.safetensors"
        export(find(Path(run) / "checkpoints")[0].path, target)
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


def done_already(path: Path, source: str) -> dict[str, Row]:
    """Rows of this source, or of any."""
    try:
        rows = json.loads(path.read_text())["rows"]
    except (OSError, ValueError, KeyError):
        return {}
    return {key: row for key, row in rows.items() if source in ("", row["source"])}


def write(path: Path, rows: dict[str, Row], source: str) -> None:
    """The record."""
    import torch

    refusals = Counter(
        re.sub(r"\d+", "N", row["why"]) for row in rows.values() if row["outcome"] == "refused"
    )
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    told = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit,
        "source": source,
        "seeds": sorted({key.partition(".")[0] for key in rows}),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "counts": dict(Counter(row["outcome"] for row in rows.values())),
        "refusals": dict(refusals.most_common()),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
