"""Run whole scripts of Accelerate, DeepSpeed and Lightning by the library and by Shoal, and compare them.

    python tests/proof/door_scripts.py --side theirs     once, where the libraries are installed
    python tests/proof/door_scripts.py                   by Shoal, beside the rows that were kept
    python tests/proof/door_scripts.py --only accelerate/causal_lm,lightning

The scripts stand in `tests/proof/doors/`. Each trains, validates, logs, saves, and is started again
to resume. Compared are the numbers of every line that rank 0 prints, and every file: tensors by
shape, norm and sum, texts by their numbers. Of a state's folder, whose files are each library's
own, only the existence is compared. DeepSpeed's own side may hang on gloo: each start has a deadline
and a second try. Processes are forked from one that has imported the library.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent / "doors"
RESULTS = Path(os.environ.get("DOORS") or HERE.parents[2] / "proof" / "results" / "doors.json")
LIBRARIES = {"accelerate": "accelerate", "deepspeed": "deepspeed", "lightning": "lightning.pytorch"}
RELATIVE, ABSOLUTE = 1e-4, 2e-6
"""float32: rounding differs where sums run in another order, and Adam divides it by small norms."""
SIZE = 2
OWN_LINES = (
    "[rank",
    "[W",
    "[20",
    "WARN",
    "$",
    "Detected checkpoint",
    "Processing zero",
    "Parsing",
    "Reconstructed",
)
"""Beginnings of lines that a library itself prints."""
DEADLINE_S = 150.0
STATES = ("random_states_0.pkl", "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")  # fmt: skip
"""Files of a folder that is a state of the library's own."""
RESUMES: dict[str, tuple[str, ...]] = {
    "accelerate/image_classes": ("--resume_from_checkpoint", "out/epoch_0"),
    "accelerate/causal_lm": ("--resume_from_checkpoint", "lm/step_5"),
    "accelerate/diffusion_ema": ("--resume_from_checkpoint", "latest"),
    "accelerate/own_checkpoints": ("--resume", "kept/1.pth"),
    "accelerate/two_players": ("--resume", "gan-1"),
    "accelerate/distilled": ("--resume", "student-1.pt"),
    "accelerate/frozen_trunk": ("--resume", "detector/state_1"),
    "accelerate/by_hand": ("--resume", "by-hand/0"),
    "deepspeed/masked_words": ("--load_checkpoint_dir", "experiments"),
    "deepspeed/teacher_and_student": ("--resume", "step_6"),
}
"""Words of the second start; for the others --resume."""
ALWAYS = {
    "deepspeed/cifar_like": ("--deepspeed",),
    "deepspeed/by_epochs_and_early_stop": ("--deepspeed", "--deepspeed_config", "ds.json"),
}
ORDER = "load_state forgets where the sampler's order was, on several processes"
FORGETS = {
    f"accelerate/{name}": ORDER
    for name in ("by_hand", "causal_lm", "diffusion_ema", "frozen_trunk", "image_classes",
                 "numbered_states", "split_plateau", "two_players")
}  # fmt: skip
"""Scripts whose second start the library itself continues wrongly → why. Ours continues the first:
its last lines and files are those of the library's first start."""


MISTAKES = {
    "lightning/thawing": "DDP sums no gradients of weights that were frozen when it wrapped the model"
}
"""Scripts that the library itself trains wrongly → why; it is run without that mistake."""


def scripts(only: str = "") -> list[str]:
    """Return the scripts as DOOR/NAME, all or those whose name begins with a given word."""
    found = sorted(
        f"{path.parent.name}/{path.stem}"
        for path in HERE.glob("*/*.py")
        if path.stem != "doors_args"
    )
    wanted = tuple(only.split(",")) if only else ("",)
    return [one for one in found if one.startswith(wanted)]


def words_of(script: str, side: str) -> list[list[str]]:
    """Return the arguments of the first start and of the second."""
    always = [*ALWAYS.get(script, ())]
    if script.startswith("lightning/") and side == "ours":
        always += ["--strategy", "shoal_ddp"]
    elif script == "lightning/own_loaders":  # some weights get no gradient in some steps
        always += ["--strategy", "ddp_find_unused_parameters_true"]
    return [always, [*always, *RESUMES.get(script, ("--resume",))]]


def run_all(side: str, door: str, names: list[str]) -> dict[str, Any]:
    """Import a library once, and run its scripts in forked processes."""
    os.environ.update(
        ACCELERATE_USE_CPU="true", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="",
        TORCHELASTIC_RUN_ID="doors", WORLD_SIZE=str(SIZE), LOCAL_WORLD_SIZE=str(SIZE),
        MASTER_ADDR="127.0.0.1", LOCAL_SIZE=str(SIZE), CROSS_RANK="0", CROSS_SIZE="1",
    )  # fmt: skip
    if side == "ours":
        __import__(f"shoal.neighbours.{door}")
    else:
        __import__(LIBRARIES[door])
        if door == "deepspeed":  # gloo in place of an extension that takes minutes to compile
            sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    with contextlib.suppress(ImportError):
        import torch.utils.tensorboard  # noqa: F401
    found = {}
    for name in names:
        found[name] = run_script(side, name)
        sys.stderr.write(f"{name}: {found[name].get('fails', 'ran')}\n")
    return found


def run_script(side: str, script: str) -> dict[str, Any]:
    """Run both starts of a script in a folder of its own; return their lines and the files."""
    for attempt in (1, 2):
        with tempfile.TemporaryDirectory() as place:
            found: dict[str, Any] = {"starts": []}
            for words in words_of(script, side):
                codes, lines, errors = run_world(script, words, Path(place))
                found["starts"].append({"words": words, "lines": lines})
                if any(codes):
                    found["fails"] = f"{codes}: {errors[-1500:]}"
                    break
                files = json.dumps(describe_files(Path(place)))
                found["starts"][-1]["files"] = json.loads(files.replace(place, "FOLDER"))
            if "fails" not in found or side == "ours" or attempt == 2:
                return found
    raise RuntimeError(script)


def run_world(script: str, words: list[str], place: Path) -> tuple[list[int], list[str], str]:
    """Fork the ranks of a script; return exit codes, rank 0's lines, and both error outputs."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    logs = Path(tempfile.mkdtemp())
    children = [fork_rank(script, words, place, rank, port, logs) for rank in range(SIZE)]
    codes, ends = [-1] * SIZE, time.monotonic() + DEADLINE_S
    while -1 in codes and time.monotonic() < ends:
        for rank, child in enumerate(children):
            if codes[rank] == -1 and (done := os.waitpid(child, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(done[1]) & 0xFF
                if codes[rank]:
                    ends = min(ends, time.monotonic() + 15)
        time.sleep(0.02)
    for rank, child in enumerate(children):
        if codes[rank] == -1:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            codes[rank] = 124
    lines = (logs / "out-0").read_text().splitlines()
    errors = "\n".join((logs / f"err-{rank}").read_text() for rank in range(SIZE))
    shutil.rmtree(logs)
    return codes, [one for one in lines if not one.startswith(OWN_LINES)], errors


def fork_rank(script: str, words: list[str], place: Path, rank: int, port: int, logs: Path) -> int:
    """Run a script as a rank in a forked process; return its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(logs / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT), number)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(port))
        os.environ.update(NODE_RANK="0", GROUP_RANK="0")
        path = HERE / f"{script}.py"
        if script in MISTAKES and "torch" in sys.modules and "shoal" not in sys.modules:
            sum_all_gradients()
        sys.argv, sys.path[:0] = [str(path), *words], [str(path.parent)]
        os.chdir(place)
        runpy.run_path(str(path), run_name="__main__")
        code = 0
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def sum_all_gradients() -> None:
    """Let DDP sum gradients also of weights that train only later."""
    from torch.nn.parallel import DistributedDataParallel

    right = DistributedDataParallel.__init__

    def wrap(self: Any, module: Any, *values: Any, **named: Any) -> None:
        frozen = [one for one in module.parameters() if not one.requires_grad]
        for one in frozen:
            one.requires_grad_(True)
        right(self, module, *values, **{**named, "find_unused_parameters": True})
        for one in frozen:
            one.requires_grad_(False)

    DistributedDataParallel.__init__ = wrap  # type: ignore[method-assign]


def describe_files(place: Path) -> dict[str, Any]:
    """Return each file's content in short; of a state's folder its existence alone."""
    states = {path.parent for name in STATES for path in place.rglob(name)}
    found: dict[str, Any] = {str(one.relative_to(place)): "state" for one in states}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if path.is_dir() or path.suffix == ".py" or any(one in path.parents for one in states):
            continue
        found[re.sub(r"tfevents.*", "tfevents", name)] = describe_file(path)
    return found


def describe_file(path: Path) -> Any:
    """Return a file's content: tensors as [shape, norm, sum], others as lines."""
    import safetensors.torch
    import torch

    if path.suffix == ".safetensors":
        return dict(flatten(safetensors.torch.load_file(path)))
    if path.suffix in (".pt", ".pth", ".bin", ".tar", ".ckpt"):
        try:
            return dict(flatten(torch.load(path, map_location="cpu", weights_only=True)))
        except Exception:
            kept = torch.load(path, map_location="cpu", weights_only=False)
            return dict(flatten(kept))
    if path.suffix in (".json", ".jsonl", ".csv", ".txt", "") and "tfevents" not in path.name:
        return path.read_text().splitlines()
    return "there"


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers of a structure by their paths."""
    import numpy as np
    import torch

    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value)
    if isinstance(value, Mapping):
        for name, one in value.items():
            if name in ("time_elapsed", "loops"):  # of Lightning's timer, and its counters
                continue
            yield from flatten(one, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor | dict) for v in value):
        for number, one in enumerate(value):
            yield from flatten(one, f"{path}.{number}")
    elif isinstance(value, torch.Tensor):
        whole = value.detach().double()
        numbers = (float(f"{one.item():.9g}") for one in (whole.norm(), whole.sum()))
        yield path, [list(whole.shape), *numbers]
    else:
        yield path, json.loads(json.dumps(value, default=str))


def differences(mine: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Yield what differs between two results."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in {**theirs, **mine}:
            if name not in mine or name not in theirs:
                side = "only theirs" if name in theirs else "only ours"
                yield f"{at} {name}: {side}"
            else:
                yield from differences(mine[name], theirs[name], f"{at} {name}")
    elif isinstance(mine, list) and isinstance(theirs, list):
        if len(mine) != len(theirs):
            yield f"{at}: {len(mine)} for {len(theirs)}: {mine[-3:]} {theirs[-3:]}"
        for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
            yield from differences(one, other, f"{at}[{number}]")
    elif isinstance(mine, float) or isinstance(theirs, float):
        close = isinstance(mine, float | int) and isinstance(theirs, float | int)
        if not close or not math.isclose(mine, theirs, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            yield f"{at}: {mine} for {theirs}"
    elif isinstance(mine, str) and isinstance(theirs, str) and mine != theirs:
        pairs = [parse(mine), parse(theirs)]
        words = [[one for one in side if isinstance(one, str)] for side in pairs]
        if words[0] != words[1]:
            yield f"{at}: {mine} for {theirs}"
        else:
            yield from differences(pairs[0], pairs[1], at)
    elif mine != theirs:
        yield f"{at}: {mine} for {theirs}"


def parse(line: str) -> list[Any]:
    """Return a line's words and numbers.

    >>> parse("step 3 loss: 1.5e-3, [0.1]")
    ['step', 3.0, 'loss:', 0.0015, 0.1]
    """
    found: list[Any] = []
    for word in re.split(r'[\s,\[\](){}"=]+', line):
        try:
            found.append(float(word))
        except ValueError:
            found += [word] if word else []
    return found


def compare(script: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return what a script finds or leaves otherwise by Shoal."""
    if "fails" in ours or "fails" in theirs:
        return [f"ours: {ours.get('fails', '')} theirs: {theirs.get('fails', '')}"]
    found = []
    pairs = [list(one) for one in zip(ours["starts"], theirs["starts"], strict=True)]
    if script in FORGETS:
        pairs[1][1] = theirs["starts"][0]
    for number, (mine, other) in enumerate(pairs):
        count = min(len(mine["lines"]), len(other["lines"])) if number else 0
        lines = [
            one["lines"][-count:] if script in FORGETS else one["lines"] for one in (mine, other)
        ]
        while lines[0] and script in FORGETS and parse(lines[0][0])[:1] != parse(lines[1][0])[:1]:
            lines = [one[1:] for one in lines]  # the line of the resume itself
        found += differences(*lines, f"start {number + 1}")
        # A tracker's folder is named by the time, and a state of the first start may be pruned.
        named = [one for one in other["files"] if not re.search(r"/\d{9,}\.\d+/", one)]
        pruned = script in FORGETS and number
        files = {
            n: other["files"][n] for n in named if not (pruned and other["files"][n] == "state")
        }
        own = {name: mine["files"].get(name) for name in files if name in mine["files"]}
        folders = [name for name, kind in files.items() if kind == "state"]
        for name in folders:
            if any(one.startswith(f"{name}/") for one in mine["files"]):
                own[name] = "state"
        found += differences(own, files, f"start {number + 1}: file")
    return found


def main() -> int:
    """Run a side, or one door of it in a process of its own."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--side", choices=("theirs", "ours"), default="ours")
    words.add_argument("--only", default="")
    words.add_argument("--inside", default="", help=argparse.SUPPRESS)
    asked = words.parse_args()
    if asked.inside:
        door = asked.inside.split("/")[0]
        out = Path(sys.stdin.readline().strip())
        out.write_text(json.dumps(run_all(asked.side, door, asked.inside.split(","))))
        return 0
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = 0
    for door in LIBRARIES:
        names = [one for one in scripts(asked.only) if one.startswith(f"{door}/")]
        if not names:
            continue
        if door == "lightning" and importlib.util.find_spec("lightning") is None:
            sys.stderr.write("lightning: is not installed here, so its scripts were not run\n")
            continue
        with tempfile.NamedTemporaryFile() as file:
            command = [sys.executable, __file__, "--side", asked.side, "--inside", ",".join(names)]
            limit = 2 * len(names) * 2 * DEADLINE_S
            subprocess.run(command, input=file.name, text=True, check=True, timeout=limit)
            found = json.loads(Path(file.name).read_text())
        for name, row in found.items():
            if asked.side == "theirs":
                kept[name] = row
            else:
                different = compare(name, row, kept[name])
                failed += bool(different)
                text = "\n    ".join(different[:12])
                sys.stderr.write(f"{name}: {len(different)} differences\n    {text}\n")
    if asked.side == "theirs":
        lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(kept.items())]
        RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
