"""Run test files one by one, each in a fork of this process, and keep which blocks each executed.

    python tests/touch/touch_sessions.py FOLDER COUNT FILE …

`touch_map.py` starts it in the environment that imports `touch_hook.py`. A fork has torch and pytest,
which are not marked and take 2 CPU seconds to import; it imports Shoal itself. FOLDER/rows gets for
each file its blocks (.bits), its status and CPU seconds (.json), and its output (.log).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = (
    *("pytest", "numpy", "psutil", "msgspec", "rich.console", "typer.testing", "torch"),
    *("torch._dynamo", "torch.distributed.fsdp", "torch.fx.experimental.proxy_tensor"),
)
"""What most sessions import. Not transformers and safetensors: Shoal asks whether they are loaded."""
AT_ONCE = 3
LONGEST_S = 1800.0


def row_of(folder: Path, test: str) -> Path:
    """Return the file of a test's blocks."""
    return folder / "rows" / (test.replace("/", "-") + ".bits")


def start(folder: Path, test: str, count: int) -> int:
    """Fork a session of one test file; return its process id, 0 in the session itself."""
    row = row_of(folder, test)
    cells = row.with_suffix(".map")
    cells.write_bytes(bytes(count))
    if child := os.fork():
        return child
    for stream, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        name = os.devnull if stream == 0 else row.with_suffix(".log")
        opened = os.open(name, mode | os.O_CREAT | (os.O_TRUNC if stream == 1 else 0), 0o644)
        os.dup2(opened, stream)
        os.close(opened)
    os.environ |= {
        "SHOAL_TOUCH": str(cells),
        "SHOAL_TOUCH_INDEX": str(folder / "index"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    sys.argv = ["pytest", test, "-p", "no:cacheprovider"]
    sys.path[0] = str(ROOT)  # as `python -m pytest` has it
    importlib.import_module("touch_hook")
    return 0


def keep(folder: Path, test: str, status: int, cpu_s: float, wall_s: float) -> None:
    """Write the row of a session that ended."""
    row = row_of(folder, test)
    cells = row.with_suffix(".map")
    touched = cells.read_bytes()
    cells.unlink()
    row.with_suffix(".json").write_text(json.dumps({"status": status, "cpu_s": round(cpu_s, 1)}))
    row.write_bytes(touched)
    red = ", RED" if status not in (0, 5) else ""
    sys.stderr.write(f"{test}: {sum(touched)} blocks, {wall_s:.0f} s, {cpu_s:.1f} CPU s{red}\n")


def serve(folder: Path, count: int, tests: list[str]) -> bool:
    """Run sessions, AT_ONCE at a time, until all have a row; return whether this process is one."""
    waiting, running = tests[::-1], dict[int, tuple[str, float]]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            test = waiting.pop()
            if not (child := start(folder, test, count)):
                return True
            running[child] = (test, time.monotonic())
        child, status, spent = os.wait4(-1, os.WNOHANG)
        if child in running:
            test, began_s = running.pop(child)
            cpu_s = spent.ru_utime + spent.ru_stime
            code = os.waitstatus_to_exitcode(status)
            keep(folder, test, code, cpu_s, time.monotonic() - began_s)
            continue
        for child, (_, began_s) in running.items():
            if time.monotonic() - began_s > LONGEST_S:
                os.kill(child, 9)
        time.sleep(0.05)
    return False


def main() -> int:
    """Import libraries, fork the sessions; be one of them."""
    folder, count, *tests = sys.argv[1:]
    for name in LIBRARIES:
        importlib.import_module(name)
    assert "shoal" not in sys.modules
    gc.freeze()
    if not serve(Path(folder), int(count), tests):
        return 0
    import pytest

    return pytest.main()


if __name__ == "__main__":
    raise SystemExit(main())
