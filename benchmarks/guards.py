"""What the guards of a run cost in a step: sums against flipped bits, and the page that is watched.

Two processes with one thread each train one model, and a guard is switched on and off between
blocks of a few steps: one block with it and one without, one right after the other, which comes
first in turns; blocks without, called so, are the A/A. So nothing but the guard differs, neither
the place of anything in memory nor what else the machine does. Three measures of each:

    cpu      processor seconds of both ranks, user and system, all threads: the gate
    wall     of the slowest rank; on a machine that others use too it says little
    direct   seconds that a rank's thread itself spends in the guard's functions, of its processor
             seconds in a step: what the guard does, without what it does to caches

The sums of `train.drift = "auto"` are made at every k-th step. A block of theirs is that step and
the two behind it, which pay for what it did to caches; what it takes longer is shared out over k
steps, so that the k − 3 others, in which a look does nothing, add no noise of theirs (what is done
in them is part of `direct`). Whole rounds of k steps, 300 pairs: guards-20261127-rounds.json. The
page is what a launcher reads; what ranks keep in it of their collectives at every
50th step is timed apart, in steps that keep them all. What the process takes that reads the pages
is told beside, in processor seconds a second, for two ranks.

    python benchmarks/guards.py --quick         does it work?
    python benchmarks/guards.py                 some minutes
    python benchmarks/guards.py --sizes small   of one model; what others are in today's file stays

Gate: the interval's upper end at most 1.01 for each; open where A/A is no narrower than that.
Writes benchmarks/results/guards-DATE.json with every block's seconds and the machine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from processes import machine, run_together
from ratios import RESAMPLES, Ratio

HERE = Path(__file__).resolve().parent
LIMIT, PROCESSES, WARM_UP_STEPS = 1.01, 2, 70
SIZES: dict[str, dict[str, Any]] = {
    "small": {"dim": 64, "layers": 2, "heads": 2, "kv_heads": 2},
    "middle": {"dim": 256, "layers": 4, "heads": 4, "kv_heads": 2},
}
PAIRS = {"small": 600, "middle": 400}
BLOCK_STEPS = {"small": 4, "middle": 2}
LOOK_STEPS = 3
DIRECT_STEPS = {"small": 400, "middle": 100}
PLAIN, AGAIN, DRIFT, WATCHED = "plain", "plain again", "drift", "watched"
VOCABULARY, SEQUENCE, ROWS = 2048, 128, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--quick", action="store_true", help="a few pairs; nothing is written")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        work(json.loads(asked.rank_of))
        return
    target = HERE / "results" / f"guards-{datetime.now(UTC):%Y%m%d}.json"
    cases: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    cases |= {"machine": machine(), "limit": LIMIT, "watch_cpu_share": watching(2.0)}
    print(f"a watch of two ranks: {cases['watch_cpu_share']:.4f} processor seconds a second")
    for size in asked.sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            job = {"size": size, "quick": asked.quick, "out": str(out)}
            run_together([__file__, "--rank-of", json.dumps(job)], PROCESSES, deadline_s=3000)
            cases[size] = judged(json.loads(out.read_text()))
        tell(size, cases[size])
        if not asked.quick:
            target.write_text(json.dumps(cases, indent=1) + "\n")
            print(f"written: {target.relative_to(HERE.parent)}")


def tell(size: str, case: dict[str, Any]) -> None:
    """Print what came out."""
    for name, row in case["ratios"].items():
        for measure in ("cpu", "wall"):
            one = row[measure]
            shown = f"{one['value']:.4f} [{one['low']:.4f}, {one['high']:.4f}]"
            print(f"{size:8}{name:13}{measure:6}{shown}  {one['verdict']}", flush=True)
    for name, share in case["direct"].items():
        print(f"{size:8}{name:13}direct  {share:.5f} of a step", flush=True)
    print(f"{size:8}a look every {case['every']} steps", flush=True)


def judged(measured: dict[str, Any]) -> dict[str, Any]:
    """With the ratio of each to the plain one, and what the gate says of it."""
    ratios: dict[str, Any] = {}
    for name, pairs in measured["pairs"].items():
        ratios[name] = {}
        for place, measure in enumerate(("cpu", "wall")):
            found = paired([one[place] / plain[place] for one, plain in pairs])
            if name == DRIFT:
                found = shared_out(found, LOOK_STEPS / measured["every"])
            row = {"value": found.value, "low": found.low, "high": found.high}
            row["verdict"] = "A/A" if name == AGAIN else found.verdict(LIMIT)
            ratios[name][measure] = row
    return {"ratios": ratios, **measured}


def paired(ratios: list[float]) -> Ratio:
    """The median of the pairs' own ratios, with a bootstrap's 95 % interval."""
    found = np.asarray(ratios)
    draws = np.random.default_rng(0).integers(0, len(found), (RESAMPLES, len(found)))
    low, high = np.percentile(np.median(found[draws], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(found)), float(low), float(high))


def shared_out(found: Ratio, part: float) -> Ratio:
    """The ratio of whole rounds, of which a block with a look is such a part.

    >>> shared_out(Ratio(1.1, 1.0, 1.2), 0.1).high
    1.02
    """
    return Ratio(*(1.0 + part * (one - 1.0) for one in (found.value, found.low, found.high)))


def watching(seconds: float) -> float:
    """Processor seconds a second of a watch whose two ranks take a step in every look."""
    from shoal.launch.watch.hang_watch import HangWatch
    from shoal.wire.watch_page import PAGE_BYTES, PAGE_VARIABLE, WatchPage

    watch = HangWatch(Path(), lambda event, **fields: None, 0.0)
    pages = [WatchPage.open({PAGE_VARIABLE: path}) for path in watch.start_attempt(PROCESSES)]
    assert PAGE_BYTES
    assert all(pages)

    class Rank:
        rank, pid, code = 0, 0, None

    step, spent_s, until_s = 0, 0.0, time.monotonic() + seconds
    while time.monotonic() < until_s:
        step += 1
        for page in pages:
            page.record_step_end(step)
        began_s = time.process_time()
        watch.poll([Rank()] * PROCESSES)
        spent_s += time.process_time() - began_s
        time.sleep(0.1)
    watch.close()
    return spent_s / seconds


def work(job: dict[str, Any]) -> None:
    """One rank: blocks with a guard and without, in turns."""
    import torch
    from shoal.fabric.collectives.collective_log import CollectiveRecorder

    from shoal import parallelize
    from shoal.fabric import start_world
    from shoal.models.catalog import build
    from shoal.models.loss import token_loss
    from shoal.wire import phases
    from shoal.wire.watch_page import PAGE_BYTES, WatchPage

    torch.set_num_threads(1)
    world = start_world()
    page = WatchPage(mmap.mmap(-1, PAGE_BYTES))
    generator = torch.Generator().manual_seed(world.rank)
    batch = torch.randint(0, VOCABULARY, (2, ROWS, SEQUENCE), generator=generator)
    size, quick = job["size"], job["quick"]
    run = parallelize(
        lambda: build("llama", SIZES[size], vocabulary=VOCABULARY, sequence=SEQUENCE),
        lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
        token_loss,
        layout="ddp",
        world=world,
        batch=ROWS * world.size,
        micro_batch=ROWS,
        precision="fp32",
        sample=(batch[0, :1], batch[1, :1]),
        drift="auto",
    )
    drift = run.guards.writes.drift

    def switch(name: str) -> None:
        world.traffic.page = phases.page = page if name == WATCHED else None
        drift.on = name == DRIFT
        drift.discard_checksums()  # the next step's update is followed by a look, if it is on

    def steps(count: int) -> None:
        for _ in range(count):
            run.step((batch[0], batch[1]))

    def block(name: str, count: int) -> tuple[float, float]:
        """(processor seconds of all ranks, seconds of the slowest)."""
        switch(name)
        world.barrier()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        steps(count)
        took = time.process_time() - cpu_s, time.perf_counter() - wall_s
        told = world.gather_json(took)
        return sum(one[0] for one in told), max(one[1] for one in told)

    for name in (PLAIN, DRIFT, WATCHED):  # a look's distance is learnt from its own times
        switch(name)
        steps(WARM_UP_STEPS)
    every = drift.every
    lengths = dict.fromkeys((AGAIN, WATCHED), BLOCK_STEPS[size]) | {DRIFT: LOOK_STEPS}
    taken: dict[str, list[Any]] = {name: [] for name in lengths}
    for number in range(5 if quick else PAIRS[size]):
        for name, pairs in taken.items():
            order = (name, PLAIN) if number % 2 else (PLAIN, name)
            told = {one: block(one, lengths[name]) for one in order}
            pairs.append((told[name], told[PLAIN]))

    count = 20 if quick else DIRECT_STEPS[size]
    direct = {}
    clock = Timed()
    clock.around(drift, ("take", "says", "agree"))
    for name, target, words in (
        (DRIFT, None, ()),
        (WATCHED, page, ("begun", "waits", "waited", "part", "stepped", "hear")),
    ):
        if target is not None:
            clock.around(target, words)
        switch(name)
        direct[name] = clock.share(lambda: steps(count // every * every))
    phases.page = world.traffic.page = page
    kept = CollectiveRecorder(page, run.step_count + 1)
    clock.around(kept, ("_begin", "_stepped", "_keep"))
    steps(1)
    share = clock.share(lambda: steps(8))  # the first ten steps are kept
    direct["collectives of kept steps, of 50"] = (share - direct[WATCHED]) / 50
    told = [row for row in world.gather_json(direct)]
    if world.is_first:
        measured = {
            "parameters": run.plan.parameters,
            "steps": lengths,
            "every": every,
            "direct": {name: mean(row[name] for row in told) for name in direct},
            "pairs": taken,
        }
        Path(job["out"]).write_text(json.dumps(measured))
    run.close()


class Timed:
    """Counts the processor seconds that this thread spends in some methods, the outermost only."""

    def __init__(self) -> None:
        self.spent_s, self._inside = 0.0, False

    def around(self, target: Any, names: tuple[str, ...]) -> None:
        """Have methods of an object counted."""
        for name in names:
            setattr(target, name, self._timed(getattr(target, name)))

    def share(self, act: Callable[[], None]) -> float:
        """The part of this process's processor seconds that went there, with the clock's own."""
        self.spent_s, began_s = 0.0, time.process_time()
        act()
        return self.spent_s / (time.process_time() - began_s)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if self._inside:
                return method(*given, **named)
            self._inside, began_s = True, time.thread_time()
            try:
                return method(*given, **named)
            finally:
                self.spent_s += time.thread_time() - began_s
                self._inside = False

        return call


if __name__ == "__main__":
    main()
