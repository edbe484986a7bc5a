"""Replays of drawn steps of drawn runs: equal to the bit on the run's layout, to rounding elsewhere.

    python tests/proof/replays.py [--seed 51]

Five runs (single, ddp, fsdp, tensor parallel, pipeline; dropout on) train twelve steps with saves
every fourth. Of each, four steps are drawn and repeated on its own layout, then four on another
one. Then pairs of runs with one planted difference each are compared: the first step and tensor
that `shoal replay --against` names are those that the plant moves first. At last runs are replayed
that met a fault of their moment, or another environment (`replay_plants.py`).
Results: proof/results/replays.json.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "proof"), str(ROOT / "tests" / "worlds"), str(ROOT / "tests")]

from compositions_drawn import BASE, MODELS, Words, furnish  # noqa: E402
from kept_rows import counted, parser_of, rows_before, versions  # noqa: E402
from replay_plants import COMMON as COMMON_OF_PLANTS  # noqa: E402
from replay_plants import (  # noqa: E402
    REPRODUCIBLE,
    TRANSIENT,
    Plant,
    change_source,
    write_files,
    write_scales,
)
from source import source_hash  # noqa: E402

TARGET = ROOT / "proof" / "results" / "replays.json"
DEADLINE_S = 600.0
PRELOADED = (
    "torch._dynamo", "shoal.cli.main", "shoal.cli.start", "shoal.cli.replay_run",
    "shoal.cli.replay_pair", "shoal.cli.workers.replay_worker", "shoal.trainer.main_job",
    "shoal.replay.step_recorder",
)  # fmt: skip
"""Imports of most commands; forks have them already."""
STEPS = 12
COMMON: Words = {**BASE, "train.micro_batch": "2", "train.steps": str(STEPS), "checkpoint.every": "4",
                 "checkpoint.keep": "9", "train.prove": "off", "train.validate_every": "5"}  # fmt: skip
RUNS: dict[str, tuple[str, Words]] = {
    "single": ("gpt", {"layout.strategy": "single", "launch.processes": "1"}),
    "ddp": ("llama", {"layout.strategy": "ddp", "launch.processes": "2"}),
    "fsdp": ("gpt", {"layout.strategy": "fsdp", "launch.processes": "2"}),
    "tp": ("llama", {"layout.tp": "2", "launch.processes": "2"}),
    "pp": ("gpt", {"layout.pp": "2", "launch.processes": "2"}),
}
OTHERS: dict[str, list[str]] = {
    "single": ["layout.strategy=ddp", "launch.processes=2"],
    "ddp": ["--layout", "single"],
    "fsdp": ["layout.strategy=ddp"],
    "tp": ["--layout", "single"],
    "pp": ["--layout", "single"],
}
ISLANDS: Words = {
    "layout.strategy": "single", "launch.processes": "1", "islands.method": "diloco",
    "islands.count": "2", "islands.period": "4", "train.validate_every": "0",
}  # fmt: skip
ISLAND_STEPS = (("island-0", 2), ("island-0", 7), ("island-1", 5), ("island-1", 12))
"""Steps of rounds whose first state is on disk: an island repeats them alone."""
DROPOUT: Words = {"model.dropout": "0.1"}
PLANTS: dict[str, tuple[list[str], int, tuple[str, ...]]] = {
    "seed": (["train.seed=1"], 1, ("weights before",)),
    "second moment": (["optimizer.betas=[0.9,0.999]"], 1, ("weights after",)),
    "weight decay": (["optimizer.weight_decay=0.2"], 1, ("weights after",)),
    "learning rate": (["optimizer.lr=0.0011"], 1, ("weights after",)),
    "clip": (["optimizer.clip=0.1"], 1, ("weights after",)),
    "dropout": (["model.dropout=0.11"], 1, ("forward",)),
    "batch": (["train.batch=12"], 1, ("forward",)),
    "warm-up": (["optimizer.warmup_steps=4"], 1, ("weights after",)),
    "a layer": (["model.layers=2"], 1, ("weights before",)),
    "format": (["precision.compute=bf16"], 1, ("forward",)),
}
"""Name → (settings of the second run, the first step, kinds of tensor that it moves first)."""


def shoal(here: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a working folder, with more environment variables.

    Its processes are forked from this one, which has imported torch. Islands, and environment
    variables of torch's own, need new processes.
    """
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{here}", "SHOAL_CACHE": str(here / "c")}
    if set(more) <= {"PLANT"} and not any(word.startswith("islands.method") for word in words):
        return run_forked(here, words, {**environ, **more})
    return subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=here, env=environ | more, capture_output=True, text=True, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip


def run_forked(
    here: Path, words: tuple[str, ...], environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command in a fork of this process."""
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        return fork_command(here, words, environ, (output, errors))


def fork_command(
    here: Path, words: tuple[str, ...], environ: dict[str, str], files: tuple[Any, Any]
) -> subprocess.CompletedProcess[str]:
    """Run a command in a fork whose output goes to two files; return when it has ended."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for to, file in enumerate(files, 1):
                os.dup2(file.fileno(), to)
            os.chdir(here)
            os.environ.clear()
            os.environ.update(environ)
            sys.path.insert(0, str(here))
            sys.dont_write_bytecode = True  # a module changes within a second, and keeps its size
            code = run_command(list(words))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read().decode())
    return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(status), *texts)


def run_command(words: list[str]) -> int:
    """Run a command; its processes are this one, or forks of it."""
    from shoal.cli import replay_run, start
    from shoal.cli.main import app
    from shoal.cli.workers.replay_worker import prove_nothing, repeat_steps
    from shoal.trainer import main_job

    def repeat_here(prepared: Any, environ: Any, *, quiet: bool) -> None:
        folder = prepared.folder.resolve()
        size = prepared.loaded.config.launch.processes
        threads = int(environ.get("OMP_NUM_THREADS", "0"))  # as the run's ranks had
        assert not run_ranks(size, lambda world: repeat_steps(folder, world), threads)

    replay_run._train = repeat_here
    main_job.measure_machine = lambda *_: None  # for a forecast that nobody reads
    settings = [word for word in words[1:] if "=" in word]
    if words[0] == "train" and not any(word.startswith("islands.") for word in settings):
        resume = Path(words[words.index("--resume") + 1]) if "--resume" in words else None
        prepared = start.prepare_run(settings, resume, None, force=True)
        prepared.folder.mkdir(parents=True, exist_ok=True)
        start.write_run_folder(prepared)
        return run_ranks(
            prepared.loaded.config.launch.processes,
            lambda world: main_job.train(prepared.folder, prove_nothing, world=world),
        )
    try:
        app(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def run_ranks(size: int, work: Callable[[Any], int], threads: int = 0) -> int:
    """Run work(world) on so many ranks; return the first exit code that is not 0.

    Args:
        threads: of each rank; 0: its share of the cores.
    """
    import torch

    from shoal.base.estimates.facts import usable_cores
    from shoal.fabric import start_world
    from shoal.launch.processes import LOOPBACK, free_port

    # Also one rank is a fork: after a parallel sum no fork of this process could make another.
    port, pids = str(free_port()), []
    for rank in range(size):
        pids.append(os.fork())
        if not pids[-1]:
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
            os.environ |= dict(zip(names, map(str, (rank, rank, size, size)), strict=True))
            os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
            code = 1
            try:
                share = max(1, usable_cores() // size)  # as the launcher says
                torch.set_num_threads(threads or share)
                code = work(start_world({} if size == 1 else None))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return next((code for code in codes if code), 0)


def train(here: Path, name: str, kind: str, words: Words, *more: str) -> None:
    """Train a run, unless it is there.

    Raises:
        RuntimeError: it ended badly.
    """
    folders = (here / "runs" / name / one for one in ("checkpoints", "island-0/checkpoints"))
    if any(folder.is_dir() for folder in folders):
        return
    dropout = DROPOUT if kind == "gpt" else {}
    settings = [f"{k}={v}" for k, v in {**COMMON, **MODELS[kind], **dropout, **words}.items()]
    done = shoal(here, "train", *settings, f"run.name={name}", *more)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-800:]}")


def repeat(here: Path, name: str, step: int, words: list[str], *, is_same: bool) -> dict[str, Any]:
    """Return what one replay found."""
    done = shoal(here, "replay", f"runs/{name}", "--step", str(step), "--json", *words)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return {"outcome": "failed", "line": done.stderr.strip()[-300:]}
    good = found["repeats"] and found["same_layout"] == is_same
    row = {"outcome": "equal" if good else "different", "steps": found["compared_steps"],
           "from": found["from_step"], "layout": found["layout"]}  # fmt: skip
    return row | ({} if good else {"difference": found["difference"]})


def part(here: Path, plant: str) -> dict[str, Any]:
    """Return what `--against` named for a planted difference."""
    words, step, kinds = PLANTS[plant]
    name = plant.replace(" ", "-")
    train(here, name, "gpt", RUNS["single"][1], *words)
    done = shoal(here, "replay", "runs/single", "--against", f"runs/{name}", "--json")
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return {"outcome": "failed", "line": done.stderr.strip()[-300:]}
    tensor = found["tensor"] or {}
    named = tensor.get("step") == step and tensor.get("kind") in kinds
    key = words[0].partition("=")[0]
    keys = [one for one in found["differing_keys"] if one.startswith(key)]
    return {
        "outcome": "named" if named and keys else "not named",
        "tensor": tensor,
        "number": found["number"],
        "keys": keys,
    }


def train_plant(here: Path, name: str, plant: Plant) -> str:
    """Train a planted run, unless it is there; return its folder.

    Raises:
        RuntimeError: it ended badly.
    """
    folder = f"runs/plant-{name.replace(' ', '-')}"
    if not (here / folder / "checkpoints").is_dir():
        words = ["train", *COMMON_OF_PLANTS, f"run.name={Path(folder).name}", *plant.words]
        done = shoal(here, *words, **plant.environ)
        if plant.changes_source:
            change_source(here)
            done = shoal(here, "train", "--resume", folder, "--force")
            write_files(here)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-800:]}")
    return folder


def replay_plant(here: Path, *words: str, **environ: str) -> dict[str, Any]:
    """Return the JSON of a replay; {"line": …} if it gave none."""
    done = shoal(here, "replay", *words, "--json", **environ)
    try:
        return {**json.loads(done.stdout), "code": done.returncode}
    except ValueError:
        return {"line": done.stderr.strip()[-300:], "code": done.returncode}


def divide(here: Path, name: str, plant: Plant, *, is_transient: bool) -> dict[str, Any]:
    """Return what was named of a plant of `replay_plants.py`."""
    write_files(here)
    if name == "a file that changed back":
        write_scales(here, 30.0)
    if is_transient or plant.by_record:
        folder = train_plant(here, name, plant)
        file = f"{Path(folder).name}.json"
        write_scales(here, 1.0)
        if plant.by_record and not (here / file).exists():
            words = (folder, "--step", str(plant.step), "--record", file)
            made = replay_plant(here, *words, **plant.environ)
            if made.get("code"):
                return {"outcome": "failed", "line": f"record: {made}"}
        if name == "changed source":
            change_source(here)
        again = replay_plant(here, folder, "--step", "8", **plant.environ_now)
        found = (
            replay_plant(here, folder, "--against", file, **plant.environ_now)
            if plant.by_record
            else again
        )
        step = (found.get("difference") or found.get("number") or {}).get("step")
        first = min((again.get("difference") or {}).get("step", 99), 4 + plant.step)
        keys = [*found.get("differing_keys", ()), *again.get("differing_keys", ())]
        told = {"step": step, "again from": again.get("from_step"), "again": first}
    else:
        train_plant(here, "none", Plant())
        folder = train_plant(here, name, plant)
        found = replay_plant(here, "runs/plant-none", "--against", folder)
        keys, told = found.get("differing_keys", []), {"number": found.get("number")}
        step = (found.get("tensor") or {}).get("step")
    tensor = found.get("tensor") or {}
    good = step == plant.step and plant.kind in ("", tensor.get("kind"))
    good = good and plant.tensor in ("", tensor.get("name"))
    good = good and (bool(tensor) or not plant.kind)
    good = good and (not plant.key or any(one.startswith(plant.key) for one in keys))
    row = {"tensor": tensor, "keys": keys, **told}
    return {"outcome": "named" if good else "not named", **row, "line": found.get("line", "")}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=51)
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    source = source_hash()
    rows = rows_before(options, options.out, source)
    dice = random.Random(options.seed)
    drawn = {name: dice.sample(range(1, STEPS + 1), 4) for name in RUNS}
    with tempfile.TemporaryDirectory(prefix="replays-") as folder:
        here = Path(folder)
        furnish(here)
        for plants, is_transient in ((REPRODUCIBLE, False), (TRANSIENT, True)):
            for name, one in plants.items():
                key = f"{'transient' if is_transient else 'plant'} {name}"
                if key not in rows and options.only in key:
                    found = divide(here, name, one, is_transient=is_transient)
                    keep(rows, key, {"source": source, **found}, options)
        for name, (kind, words) in RUNS.items():
            for step in drawn[name]:
                for what, more in (("same", []), ("other", OTHERS[name])):
                    key = f"{what} {name} {step}"
                    if key not in rows and options.only in key:
                        train(here, name, kind, words)
                        found = repeat(here, name, step, more, is_same=what == "same")
                        keep(rows, key, {"source": source, **found}, options)
        for island, step in ISLAND_STEPS:
            key = f"islands {island} {step}"
            if key not in rows and options.only in key:
                train(here, "islands", "gpt", ISLANDS)
                found = repeat(here, f"islands/{island}", step, [], is_same=True)
                keep(rows, key, {"source": source, **found}, options)
        for plant in PLANTS:
            if f"plant {plant}" not in rows and options.only in f"plant {plant}":
                train(here, "single", *RUNS["single"])
                keep(rows, f"plant {plant}", {"source": source, **part(here, plant)}, options)
    bad = [key for key, row in rows.items() if row["outcome"] not in ("equal", "named")]
    print(f"{len(rows)} rows: {counted(row['outcome'] for row in rows.values())}; bad: {bad}")
    return 1 if bad else 0


def keep(rows: dict[str, Any], key: str, row: dict[str, Any], options: Any) -> None:
    """Add a row to the results, and write them."""
    rows[key] = row
    print(f"{key}: {row['outcome']}", flush=True)
    found = {"seed": options.seed, "versions": versions(), "rows": rows}
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
