"""Damaged run.toml and logs, a thousand of each: is every one refused in words, or read past?

    python tests/proof/mutations.py [--each 1000] [--seed 0] [--out proof/results/mutations.json]

    run.toml                                   bytes, values, keys, lines that are lost, doubled, cut;
                                               through all checks of `shoal train`, and of every
                                               second one of `--resume`, before anything starts
    metrics.jsonl, events.jsonl, plan.json     the same, through the start of a resume, the live view,
                                               what a resume cuts, the summary, the end of a run

Wrong are a traceback, more than LIMIT_S seconds, a refusal of several lines, and one that names
neither a file nor a key. Every mutation follows from (seed, file, number).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "benchmarks")]

from shoal.base.errors import ShoalError  # noqa: E402
from shoal.base.runlog.events import append_line  # noqa: E402
from shoal.base.runlog.truncate_logs import truncate_steps  # noqa: E402
from shoal.cli import start  # noqa: E402
from shoal.cli.ending import SessionEnding  # noqa: E402
from shoal.launch.stop_grace import longest_save_s  # noqa: E402
from shoal.launch.supervisor import MetricsProgress  # noqa: E402
from shoal.view import LiveView, summarise_run  # noqa: E402
from told_run import tell_run  # noqa: E402

LIMIT_S = 20
LOGS = ("metrics.jsonl", "events.jsonl", "plan.json")
FILES = ("run.toml", *LOGS)
ODD = (
    "0", "-1", "1e308", "-1e308", "nan", "inf", "true", '""', '"x"', "[]", "[1]", '["a", "b"]',
    "{a = 1}", "9223372036854775807", "2147483647", "1e-320", '"' + "x" * 5000 + '"', "'''a\nb'''",
    "1979-05-27", "0x10", '"\\u0000"', '"../../etc/passwd"', "[[1, 2], [3]]",
)  # fmt: skip
ODD_JSON = (None, 1, -1, 1e300, 10**400, "x", "x" * 5000, True, [], [1, "a"], {}, {"a": []}, [[]])
NAMES = re.compile(r"[\w-]+\.(toml|jsonl?)\b|\b[a-z]+\.[a-z_]+\b|command line")
"""What a refusal must name: a file, or a key with its section."""


def mutated_toml(text: str, luck: random.Random) -> bytes:
    """One to three changes of a run.toml."""
    lines = text.encode().splitlines(keepends=True)
    for _ in range(luck.randrange(1, 4)):
        place = luck.randrange(len(lines))
        line = lines[place]
        key, equals, _ = line.partition(b" = ")
        match luck.randrange(7):
            case 0:
                data = bytearray(b"".join(lines))
                data[luck.randrange(len(data))] = luck.randrange(256)
                lines = bytes(data).splitlines(keepends=True)
            case 1 | 2 | 3 if equals:
                lines[place] = key + b" = " + luck.choice(ODD).encode() + b"\n"
            case 4:
                del lines[place]
            case 5:
                lines.insert(luck.randrange(len(lines)), line)
            case _:
                lines[place] = line[: luck.randrange(len(line))] + b"\n" * luck.randrange(2)
        lines = lines or [b"\n"]
    return b"".join(lines)


def mutated_log(data: bytes, luck: random.Random) -> bytes:
    """One to three changes of a file of JSON lines, or of one JSON object."""
    for _ in range(luck.randrange(1, 4)):
        lines = data.splitlines(keepends=True) or [b"\n"]
        place = luck.randrange(len(lines))
        match luck.randrange(5):
            case 0:
                raw = bytearray(data or b"\n")
                raw[luck.randrange(len(raw))] = luck.choice([255, 0, 10, 34, 123, 91, 45, 57])
                lines = [bytes(raw)]
            case 1:
                deep = b'{"step":' + b"[" * 100_000 + b"\n"
                odd = [b"null\n", b"1\n", b"[]\n", b"\xff\xfe\n", b"\n", deep, b'{"step":1e999}\n']
                lines[place] = luck.choice(odd)
            case 2:
                lines[place] = lines[place][: luck.randrange(1 + len(lines[place]))]
            case 3:
                lines.insert(luck.randrange(len(lines)), lines[place])
            case _:
                try:
                    record = json.loads(lines[place])
                except (ValueError, RecursionError):
                    record = {}
                if isinstance(record, dict) and record:
                    record[luck.choice(list(record))] = luck.choice(ODD_JSON)
                    lines[place] = json.dumps(record).encode() + b"\n"
        data = b"".join(lines)
    return data


def whole(folder: Path) -> Path:
    """A run folder as a run of two ranks leaves it, with its run.toml."""
    named = [
        "model.name=mlp",
        "data.source=digits",
        f"run.name={folder.name}",
        f"run.folder={folder.parent}",
    ]
    prepared = start.prepare_run([*named, "layout.strategy=ddp", "launch.processes=2"], None)
    folder.mkdir()
    start.write_run_folder(prepared)
    tell_run(folder, steps=8)
    return folder


def read_all(folder: Path) -> str:
    """Everything that reads the logs of a run folder, as a resume and its end do."""
    (folder / "checkpoints" / "step-4").mkdir(parents=True)
    (folder / "checkpoints" / "step-4" / "manifest.json").touch()
    start.write_run_folder(start.prepare_run([], folder))
    out = io.StringIO()
    view = LiveView(folder, stream=out)
    view.tick()
    progress = MetricsProgress(folder / "metrics.jsonl")
    progress.poll()
    progress.step_s()
    progress.last_step()
    longest_save_s(folder)
    told = truncate_steps(folder / "metrics.jsonl", 4)
    append_line(folder / "metrics.jsonl", {"step": 5, "loss": 1.0})
    view.finish()
    SessionEnding.of(folder)
    summarise_run(folder)
    return told


def prepared(path: Path, *, resumed: bool) -> str:
    """All that `shoal train` checks before it starts anything; gives the refusal."""
    try:
        start.prepare_run([] if resumed else [str(path)], path.parent if resumed else None)
    except ShoalError as refused:
        return str(refused)
    return ""


def judged(work: Callable[[], str], must_name: bool) -> tuple[str, str]:
    """(read, refused or what is wrong; the words)."""

    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        told = work()
    except TimeoutError:
        return "hangs", f"more than {LIMIT_S} s"
    except BaseException as failure:
        return "traceback", f"{type(failure).__name__}: {failure}"
    finally:
        signal.alarm(0)
    if not told:
        return "read", ""
    if "\n" in told or len(told) > 1000:
        return "many lines", told
    return (
        ("refused" if must_name else "put aside", told) if NAMES.search(told) else ("unnamed", told)
    )


def run(name: str, each: int, seed: int, place: Path) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Mutate one file `each` times; gives how they ended, and those that were wrong."""
    source = whole(place / f"whole-{name}")
    original = (source / name).read_bytes()
    ended, wrong = Counter[str](), []
    for number in range(each):
        luck = random.Random(f"{seed} {name} {number}")
        copy = place / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        if name == "run.toml":
            copy.mkdir()
            (copy / name).write_bytes(mutated_toml(original.decode(), luck))
            resumed = number % 2 == 1
            if resumed:
                (copy / "checkpoints" / "step-8").mkdir(parents=True)
                (copy / "checkpoints" / "step-8" / "manifest.json").touch()
            how, told = judged(lambda: prepared(copy / name, resumed=resumed), True)  # noqa: B023
        else:
            shutil.copytree(source, copy)
            (copy / name).write_bytes(mutated_log(original, luck))
            how, told = judged(lambda: read_all(copy), False)  # noqa: B023
        ended[how] += 1
        if how not in ("read", "refused", "put aside"):
            wrong.append({"number": number, "how": how, "told": told[:300]})
    return ended, wrong


def main() -> None:
    """Mutate all files; exit status 1 if one mutation ended wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--each", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write what came out as JSON")
    options = parser.parse_args()
    from processes import machine
    from source import source_hash

    record: dict[str, Any] = {"each": options.each, "seed": options.seed, "source": source_hash()}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in FILES:
            began_s = time.process_time()
            ended, wrong = run(name, options.each, options.seed, Path(folder))
            seconds = round(time.process_time() - began_s, 1)
            record[name] = {"ended": dict(ended), "wrong": wrong, "cpu_s": seconds}
            print(name, dict(ended), f"{seconds} CPU-s", *wrong[:20], sep="\n  ", flush=True)
    record["machine"] = machine()
    if options.out:
        (HERE.parents[1] / options.out).write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(any(record[name]["wrong"] for name in FILES))


if __name__ == "__main__":
    main()
