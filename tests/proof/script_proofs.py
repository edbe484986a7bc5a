"""`shoal prove -- train.py`: right scripts are equal, known mistakes are named, and what it costs.

`make proof PART=scripts` runs it, some ten minutes on 2 cores. A row is a right script under a layout
(`tests/worlds/user_scripts.py`, RIGHT), a known mistake (WRONG; mends that would make it right are
reverted), a script that cannot be proven (REFUSED), or the CPU seconds of a whole proof of
hundred_lines.py beside those of its first four steps under the same layouts: at most three times.
Rows go to proof/results/scripts.json one by one; rows of this source stay, --fresh begins anew.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGET = ROOT / "proof" / "results" / "scripts.json"
sys.path[:0] = [
    str(HERE),
    *(str(ROOT / "tests" / name) for name in ("worlds", "worlds/faults", "")),
]

from kept_rows import parser_of, rows_before, verdicts, write_rows  # noqa: E402
from source import source_hash  # noqa: E402

from user_scripts import REFUSED, RIGHT, WRONG  # noqa: E402
from worlds import Failed, Members  # noqa: E402

SCRIPT = HERE / "hundred_lines.py"
LAYOUTS, STEPS, ROUNDS, MOST = ("ddp", "fsdp"), 4, 3, 3.0
DEFINITION = (
    "equal, named or refused as it should be; cost: median CPU seconds of three proofs over those of "
    "the script's own first four steps, its processes started without a launcher"
)


def main() -> int:
    options = parser_of(__doc__).parse_args()
    source = source_hash()
    rows = rows_before(options, TARGET, source)
    worlds: dict[int, Members] = {}
    for name, (ranks, row) in trials().items():
        if name in rows:
            continue
        if ranks and (
            ranks not in worlds or any(p.poll() is not None for p in worlds[ranks].processes)
        ):
            worlds[ranks] = Members(ranks, Path(tempfile.mkdtemp()))
        rows[name] = {"source": source, **(row(worlds[ranks]) if ranks else row(None))}
        print(name, rows[name], flush=True)
        write_rows(TARGET, DEFINITION, rows)
    for world in worlds.values():
        world.close()
    bad = [name for name, row in rows.items() if row["verdict"] == "wrong"]
    print(verdicts(rows), *bad, sep="\n")
    return bool(bad)


def trials() -> dict[str, tuple[int, Callable[[Any], dict[str, Any]]]]:
    """Name of each row → (ranks of its world, or 0; what makes it)."""
    found: dict[str, tuple[int, Callable[[Any], dict[str, Any]]]] = {}
    for name, (_text, layouts) in RIGHT.items():
        for layout in layouts:
            found[f"right {name} {layout}"] = (
                2, lambda world, name=name, layout=layout: right(world, name, layout),
            )  # fmt: skip
    for name, mistake in WRONG.items():
        found[f"mistake {name}"] = (mistake.ranks, lambda world, name=name: wrong(world, name))
    for name, (*_, reason) in REFUSED.items():
        if reason:
            found[f"reason {name}"] = (2, lambda world, name=name: refused(world, name))
    found["cost"] = (0, lambda _world: cost())
    return found


def right(world: Members, name: str, layout: str) -> dict[str, Any]:
    """A right script is equal."""
    lifted = name == "float32_inside"  # the command does so by itself
    answer = call(world, "attempt_right", name=name, layout=layout, lifted=lifted)
    if answer["verdict"] == "equal":
        return {"verdict": "equal", "steps": answer["steps"], "largest": answer["largest"]}
    return {"verdict": "wrong", "text": answer["text"]}


def wrong(world: Members, name: str) -> dict[str, Any]:
    """A mistake is named by tensor or number, and by its first step."""
    mistake, answer = WRONG[name], call(world, "attempt_wrong", name=name)
    said = answer["text"]
    is_named = answer["verdict"] == "different" and answer["step"] == mistake.step
    is_named = is_named and all(part in said for part in mistake.finds)
    return {"verdict": "named" if is_named else "wrong", "reverted": mistake.revert, "text": said}


def refused(world: Members, name: str) -> dict[str, Any]:
    """A script that cannot be proven has its reason."""
    text, layout, reason = REFUSED[name]
    answer = call(world, "attempt", text=text, layout=layout)
    is_told = answer["verdict"] == "not proven" and reason in answer["reason"]
    return {"verdict": "refused" if is_told else "wrong", "text": answer["text"]}


def call(world: Members, case: str, **arguments: Any) -> dict[str, Any]:
    """The first rank's answer."""
    try:
        answer: dict[str, Any] = world.call(f"script_case:{case}", **arguments)[0]
    except Failed as failure:
        return {"verdict": "failed", "text": str(failure)[-1000:], "reason": "", "step": 0}
    return answer


def cost() -> dict[str, Any]:
    """CPU seconds of a proof, and of the script's own first steps under the same layouts."""
    proofs, starts = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shutil.copy(SCRIPT, folder / "train.py")
            before = {path.name for path in folder.rglob("*")}
            words = ["-m", "shoal", "prove", "--layouts", ",".join(LAYOUTS), "--steps", str(STEPS)]
            proofs.append(cpu_seconds(folder, [[*words, "--", "train.py"]], {}))
            left = {path.name for path in folder.rglob("*")} - before
            assert not left, f"the proof left {left} in the user's folder"
            starts.append(sum(start(folder, layout) for layout in LAYOUTS))
    ratio = statistics.median(proofs) / statistics.median(starts)
    verdict = "cheap" if ratio <= MOST else "wrong"
    return {"verdict": verdict, "ratio": ratio, "proof_cpu_s": proofs, "start_cpu_s": starts}


def start(folder: Path, layout: str) -> float:
    """CPU seconds of the script's own first steps on two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shutil.rmtree(folder / "runs", ignore_errors=True)
    environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    words = ["train.py", "--layout", layout, "--steps", str(STEPS)]
    return cpu_seconds(folder, [words, words], {**environ, "MASTER_PORT": port})


def cpu_seconds(folder: Path, programs: Sequence[Sequence[str]], environ: dict[str, str]) -> float:
    """CPU seconds of Python programs that run together, and of their descendants."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = [
        subprocess.Popen(
            [sys.executable, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env={**os.environ, **environ, **ranks(number, environ)},
        )
        for number, words in enumerate(programs)
    ]  # fmt: skip
    told = [process.communicate(timeout=600)[0] for process in running]
    assert not any(process.returncode for process in running), "\n".join(told)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ranks(number: int, environ: dict[str, str]) -> dict[str, str]:
    """A process's own variables in a world."""
    return {"RANK": str(number), "LOCAL_RANK": str(number)} if environ else {}


if __name__ == "__main__":
    sys.exit(main())
