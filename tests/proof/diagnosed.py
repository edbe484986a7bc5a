"""`shoal diagnose`: silent on twenty clean runs, right on faults that a seed draws?

    python tests/proof/diagnosed.py --seed 35 [--seconds 3000] [--out proof/results/diagnosed.json]
                                    [--only clean,drawn]

Clean runs differ in layout, precision, islands, data workers, policies and loop; some are stopped
and resumed on purpose: that is no fault. Right is the line "no fault" and nothing in the JSON
but advice. Five faults are drawn by the seed from kinds × places: kind, layout, rank, place and when;
they are judged as those of faults.py. The seed came after what is tested was written.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]
sys.path[:0] = [str(HERE.parent / "worlds"), str(HERE.parent)]

from kept_trials import run_trials  # noqa: E402

from cli_run import CommandLine  # noqa: E402
from fault_runs import command  # noqa: E402
from faults import DEADLINE_S, KINDS, LAYOUTS, ONCE, WHOLE, one  # noqa: E402
from forks import shared  # noqa: E402

TARGET = HERE.parents[1] / "proof" / "results" / "diagnosed.json"
DRAWN = 5
TWO_ISLANDS = ("islands.count=2", "islands.period=6", "launch.processes=1")
STOP, AGAIN, LOOP = "stopped and resumed", "trained longer", "a loop of its own"
CLEAN: dict[str, tuple[str, ...]] = {
    # arguments; what is done beside them stands first
    "one process": ("launch.processes=1", "layout.strategy=single"),
    "ddp": ("layout.strategy=ddp",),
    "zero1": ("layout.strategy=zero1",),
    "zero2": ("layout.strategy=zero2",),
    "fsdp": ("layout.strategy=fsdp",),
    "hsdp": ("layout.strategy=hsdp", "launch.processes=4"),
    "tp": ("layout.tp=2",),
    "pp": ("layout.pp=2",),
    "tp and ddp": ("layout.tp=2", "layout.dp_replicate=2", "launch.processes=4"),
    "ddp in bf16": ("layout.strategy=ddp", "precision.compute=bf16"),
    "fsdp in bf16": ("layout.strategy=fsdp", "precision.compute=bf16"),
    "pp in bf16": ("layout.pp=2", "precision.compute=bf16"),
    "diloco": ("islands.method=diloco", *TWO_ISLANDS),
    "noloco": ("islands.method=noloco", *TWO_ISLANDS),
    "ddp, stopped and resumed": (STOP, "layout.strategy=ddp"),
    "fsdp, stopped and resumed": (STOP, "layout.strategy=fsdp"),
    "tp, trained longer": (AGAIN, "layout.tp=2"),
    "workers": ("data.workers=2",),
    "drift, rewind and validation": (
        "train.drift=every", "train.spikes=rewind", "train.validate_every=6",
    ),
    "a loop of its own": (LOOP,),
}  # fmt: skip
OWN_LOOP = """
from pathlib import Path

import faulty
import torch

import shoal

model = faulty.build()
loss = shoal.mean_of_samples(torch.nn.functional.cross_entropy)
run = shoal.parallelize(
    model, torch.optim.AdamW(model.parameters()), loss,
    folder=Path("runs/run"), batch=8, micro_batch=2,
)
data = faulty.Samples()
for _, batch in zip(range(60), run.loader(data)):
    run.step(batch)
run.save()
run.close()
"""


def trials(seed: int) -> list[dict[str, Any]]:
    """The clean runs, and the faults that this seed draws."""
    found: list[dict[str, Any]] = [{"layout": "clean", "name": name} for name in CLEAN]
    drawn = random.Random(seed)
    while len(found) < len(CLEAN) + DRAWN:
        kind, layout = drawn.choice(sorted(KINDS)), drawn.choice(sorted(LAYOUTS))
        _, _, place, layouts = KINDS[kind]
        places = [at for at in ("data", "forward") if layout in WHOLE or at == "data"]
        rank, at = drawn.choice(LAYOUTS[layout][0]), drawn.choice(places)
        after = drawn.randrange(24, 34) if at == "forward" else drawn.randrange(40, 80)
        if (layouts and layout not in layouts) or kind in ONCE or not place:
            continue
        if kind == "loader":
            after = 10 + after % 15  # of one worker's own samples: an island's has 32 in all
        trial = {"kind": kind, "at": layout, "rank": rank, "place": at, "after": after}
        found.append({"layout": "drawn", "number": len(found) - len(CLEAN), **trial})
    return found


def name_of(trial: dict[str, Any]) -> str:
    if trial["layout"] == "clean":
        return f"clean: {trial['name']}"
    words = "drawn {number}: {kind} in {at}, rank {rank}, in {place} after {after}"
    return words.format(**trial)


def clean(name: str) -> dict[str, Any]:
    """A clean run; what `shoal diagnose` says of it."""
    with tempfile.TemporaryDirectory(prefix="clean-") as folder:
        arguments = CLEAN[name]
        what, words = "", arguments
        if arguments[0] in (STOP, AGAIN, LOOP):
            what, words = arguments[0], arguments[1:]
        if what == LOOP:
            codes = [own_loop(Path(folder))]
        else:
            run = command(Path(folder), None, *words)
            if what == STOP:
                run.wait_for(lambda: run.steps() >= 6)
                run.process.send_signal(signal.SIGTERM)
            codes = [run.finish(DEADLINE_S)[0]]
            if what in (STOP, AGAIN):
                longer = ("train.steps=60",) if what == AGAIN else ()
                again = CommandLine(run.folder, "--resume", "runs/run", *longer)
                codes.append(again.finish(DEADLINE_S)[0])
        words = ("-m", "shoal", "diagnose", "runs/run")
        said = shared().run(*words, cwd=Path(folder))
    wanted = [143, 0] if what == STOP else [0, 0] if what == AGAIN else [0]
    lines = said.stdout.splitlines()
    wrong = "" if codes == wanted else f"status {codes}"
    if said.returncode or not lines or not lines[0].endswith(": no fault"):
        wrong = wrong or f"diagnose {said.returncode}: {said.stdout[-300:]}{said.stderr[-300:]}"
    return {"codes": codes, "told": lines, "wrong": wrong}


def own_loop(folder: Path) -> int:
    """A script with a loop of its own, on one process."""
    command_files = ("hanging.py", "faulty.py")
    for name in command_files:
        (folder / name).write_text((HERE.parent / "worlds" / name).read_text())
    (folder / "script.py").write_text(OWN_LOOP)
    return shared().run("script.py", cwd=folder).returncode


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seed", type=int, required=True)
    options, sys.argv[1:] = parser.parse_known_args()
    shared()  # imports once
    unbroken: dict[str, Any] = {}

    def do(trial: dict[str, Any]) -> dict[str, Any]:
        if trial["layout"] == "clean":
            try:
                return clean(trial["name"])
            except AssertionError as failure:
                return {"wrong": f"no end: {str(failure)[-600:]}"}
        at = trial["at"]
        if at not in unbroken:
            one({"layout": at, "kind": "", "rank": 0}, unbroken)
        return one({**trial, "layout": at}, unbroken)

    return run_trials(
        __doc__, TARGET, trials(options.seed), name_of, do, lambda done: {"seed": options.seed}
    )


if __name__ == "__main__":
    sys.exit(main())
