"""Verdicts on drawn records of runs: kinds of costs by the hundred, where the truth is computed.

    python tests/report/made_verdicts.py [--trials 600] [--seed 1] [--out FILE]

Each trial draws ranks, noise and a cost, writes the records that a run with it leaves, and asks for
the verdict. The same run without the cost is made as well: its mean step is the truth. A trial counts
as well when the verdict has the kind, the rank or stage, and a step within 15 % of the truth; a run
without a cost must have "nothing to gain". Real runs with planted sleeps: verdicts.py.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from test_verdict import OWN_S, Extra, make_run, mean_s

from shoal.base.runlog.rank_records import PARTS, RankStep, encode_header
from shoal.planning.pipeline_schedules import make_schedule
from shoal.report.schedule_times import time_schedule
from shoal.report.verdict import find_verdict

STEP_S = sum(OWN_S.values())
WITHIN, STEPS = 0.15, 100
NAMES = {
    "data": "data", "passes": "forward pass", "backward": "backward pass",
    "update": "optimizer update", "hooks": "callbacks",
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """One drawn run.

    Attributes:
        kinds: verdicts that are right.
        words: what the cause must hold.
        make: (folder, with the cost) → mean seconds of a step.
        facts: what was drawn.
    """

    kinds: tuple[str, ...]
    words: str
    make: Callable[[Path, bool], float]
    facts: dict[str, Any] = field(default_factory=dict)


def draw(name: str, drawn: random.Random) -> Drawn:
    """Return a drawn run with one kind of cost."""
    ranks = drawn.choice([2, 2, 3, 4, 8])
    noise, bursts = drawn.choice([0.0, 0.05, 0.15]), drawn.choice([0.0, 0.0, 0.08])
    share = drawn.uniform(0.15, 0.6)
    every, seed = drawn.choice([1, 1, 2, 5, 10]), drawn.randrange(10**6)
    size_s = share * STEP_S * every
    rank, part = drawn.randrange(ranks), drawn.choice(list(NAMES))
    facts = {
        "ranks": ranks,
        "noise": noise,
        "bursts": bursts,
        "share": round(share, 3),
        "every": every,
        "part": part,
    }
    by_turns = [_pick(drawn, ranks) for _ in range(STEPS + 1)]
    period = drawn.choice([1, 3, 6])
    offsets = [drawn.randrange(every) for _ in range(ranks)]

    def run(extra: Extra, **more: Any) -> Callable[[Path, bool], float]:
        def make(folder: Path, planted: bool) -> float:
            shaken = random.Random(seed)

            def seconds(step: int, at: int, where: str) -> float:
                noisy_s = noise * OWN_S[where] * shaken.random()
                noisy_s += 0.5 * OWN_S[where] * (shaken.random() < bursts)
                return noisy_s + (extra(step, at, where) if planted else 0.0)

            rest = more if planted else {}
            return mean_s(make_run(folder, seconds, ranks=ranks, steps=STEPS, seed=seed, **rest))

        return make

    if name == "nothing":
        return Drawn(("nothing",), "", run(lambda *_: 0.0), facts)
    if name == "slow rank":
        late: Extra = lambda step, r, p: size_s * ((r, p) == (rank, part)) * (step % every == 0)  # noqa: E731
        return Drawn(("slow_rank",), f"rank {rank}'s {NAMES[part]}", run(late), facts)
    if name == "all ranks":
        where, kind = drawn.choice([("data", "input"), ("hooks", "callbacks")])
        alike: Extra = lambda step, r, p: size_s * (p == where) * (step % every == 0)  # noqa: E731
        return Drawn((kind,), "", run(alike), {**facts, "part": where})
    if name == "all ranks at other steps":
        where, kind = drawn.choice([("data", "input"), ("hooks", "callbacks")])
        apart: Extra = lambda step, r, p: size_s * (p == where) * ((step + offsets[r]) % every == 0)  # noqa: E731
        return Drawn((kind,), "", run(apart), {**facts, "part": where, "offsets": offsets})
    if name == "lateness by turns":
        where = drawn.choice(["passes", "backward"])
        late_s = share * STEP_S
        turns: Extra = lambda step, r, p: late_s * (p == where and r == by_turns[step // period])  # noqa: E731
        facts = {**facts, "part": where, "every": 1, "period": period}
        return Drawn(("slow_rank",), "the machine is busy", run(turns), facts)
    if name == "data by turns":
        late_s = share * STEP_S
        loaded: Extra = lambda step, r, p: late_s * (p == "data" and r == by_turns[step // period])  # noqa: E731
        return Drawn(("input",), "", run(loaded), {**facts, "every": 1, "period": period})
    if name == "communication":
        sent = {"sum_s": share * STEP_S}
        return Drawn(("communication",), "", run(lambda *_: 0.0, **sent), facts)
    return _late_stage(drawn, noise, share, seed)


def _pick(drawn: random.Random, ranks: int) -> int:
    return drawn.randrange(ranks)


def _late_stage(drawn: random.Random, noise: float, share: float, seed: int) -> Drawn:
    """Return a pipeline one of whose stages has slow passes, timed by its schedule."""
    stages, count = drawn.choice([2, 2, 4]), drawn.choice([2, 4, 8])
    stage, kind = drawn.randrange(stages), drawn.choice("FB")
    name = drawn.choice(["1f1b", "gpipe"])
    schedule = make_schedule(name, stages, count)
    facts = {"stages": stages, "micro_batches": count, "stage": stage, "pass": kind, "by": name}
    cost_s = share * STEP_S / count

    def make(folder: Path, planted: bool) -> float:
        shaken = random.Random(seed)
        rows, whole_s, now_s = [], [], 1000.0
        for step in range(1, STEPS + 1):
            spent = [dict.fromkeys(PARTS, 0.0) for _ in range(stages)]

            def seconds(rank: int, action: str, spent: Any = spent) -> float:
                part = "passes" if action == "F" else "backward"
                each_s = OWN_S[part] / count * (1 + noise * shaken.random())
                each_s += cost_s * (planted and (rank, action) == (stage, kind))
                spent[rank][part] += each_s
                return each_s

            long_s = max(one.end_s for one in time_schedule(schedule, seconds))
            for rank in range(stages):
                spent[rank]["update"] = OWN_S["update"]
                busy_s = spent[rank]["passes"] + spent[rank]["backward"]
                spent[rank]["waiting"] = long_s - busy_s
                parts = tuple(spent[rank][part] for part in PARTS)
                whole = sum(parts)
                rows.append(RankStep(step, rank, 1, now_s + whole, 1 << 28, parts))
            now_s += long_s + OWN_S["update"]
            whole_s.append(long_s + OWN_S["update"])
        folder.mkdir(parents=True)
        placements = [
            {"name": f"b.{at}.weight", "shape": [8, 8], "stages": [at]} for at in range(stages)
        ]
        plan = {
            "layout": {"pp": stages, "schedule": name},
            "accumulate": count,
            "placements": placements,
        }
        (folder / "run.toml").write_text("")
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "events.jsonl").write_text('{"event": "run_started", "time_s": 999.0}\n')
        (folder / "rank_steps").mkdir()
        raw = encode_header(0) + b"".join(one.encode() for one in rows)
        (folder / "rank_steps" / "node-0.bin").write_bytes(raw)
        lines = [{"step": at + 1, "loss": 1.0, "step_s": one} for at, one in enumerate(whole_s)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        return mean_s(whole_s)

    return Drawn(("late_stage",), f"stage {stage}'s", make, facts)


KINDS = [
    "nothing", "slow rank", "all ranks", "all ranks at other steps", "lateness by turns",
    "data by turns", "communication", "late stage",
]  # fmt: skip


def list_trials(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each drawn run; `wrong` is empty for those that are well."""
    for number in range(count):
        name = KINDS[number % len(KINDS)]
        one = draw(name, random.Random(f"{seed} {number}"))
        with tempfile.TemporaryDirectory(prefix="made-") as place:
            with_s = one.make(Path(place) / "with", True)
            without_s = one.make(Path(place) / "without", False)
            verdict = find_verdict(Path(place) / "with")
            busy = "the machine is busy" in verdict.cause and one.facts.get("bursts")
        wrong = ""
        gain = 1 - without_s / with_s
        if verdict.kind not in one.kinds or one.words not in verdict.cause:
            wrong = f"{verdict.kind}: {verdict.line()}"
            if gain < 0.12 and verdict.kind == "nothing":
                wrong = ""  # too small to speak of
            elif busy and gain < 1.5 * (verdict.share or 0.0):
                wrong = ""  # the bursts are drawn too, and cost about as much
        elif verdict.without_s is not None:
            error = verdict.without_s / without_s - 1
            # The run without the cost has the bursts still: the verdict takes them out with it.
            if abs(error) > WITHIN and verdict.kind != "nothing" and not busy:
                wrong = f"foretold {error:+.0%} of the truth: {verdict.line()}"
        yield {"kind": name, **one.facts, "gain": round(gain, 3), "wrong": wrong}


def main() -> int:
    """Judge the drawn runs; print those that are wrong, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    done = list(list_trials(asked.trials, asked.seed))
    wrong = [one for one in done if one["wrong"]]
    for one in wrong:
        print(json.dumps(one))
    total, bad = Counter(one["kind"] for one in done), Counter(one["kind"] for one in wrong)
    table = {name: {"trials": total[name], "wrong": bad[name]} for name in KINDS}
    print(json.dumps(table))
    if asked.out:
        record = {"seed": asked.seed, "kinds": table, "wrong": wrong}
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
