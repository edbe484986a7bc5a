"""Pack the part of Shoal that a browser loads: drawings, walks, puzzles, exercises, planner; no torch.

    python website/browser_zip.py OUT.zip

It imports with the standard library alone. A test starts `python -I -S` on the zip and imports
MODULES, so that nothing else can slip in.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shoal"
ROOMS = ("base", "config", "planning", "forecast", "teach")
MODULES = (
    "shoal.teach.browser",
    "shoal.teach.exercises.answers",
    "shoal.teach.puzzles",
    "shoal.teach.calculators.scaling",
    "shoal.teach.drawings.timeline_svg",
    "shoal.teach.drawings.walk_svg",
    *(f"shoal.teach.walks.{name}_walk" for name in (
        "collectives", "cp", "ddp", "ep", "fsdp", "local_steps", "pipelines", "tp", "zero",
    )),
    "shoal.forecast.search.case_settings",
    "shoal.forecast.search.layout_search",
    "shoal.forecast.search.plan_document",
    "shoal.forecast.machines.cluster_syntax",
    "shoal.forecast.models.published_models",
    "shoal.forecast.fit.peak_memory",
    "shoal.forecast.time.step_time",
)  # fmt: skip
"""What pages call; the rest of the rooms comes with it."""
DATE = (2020, 1, 1, 0, 0, 0)
"""Of every file, so that equal sources make equal bytes."""


def write_zip(target: Path) -> int:
    """Write the zip; return its bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    files = [SOURCE / "__init__.py", *(p for room in ROOMS for p in (SOURCE / room).rglob("*"))]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in sorted(files):
            if path.is_file() and path.suffix in (".py", ".txt", ".json"):
                entry = zipfile.ZipInfo(str(path.relative_to(SOURCE.parent)), DATE)
                packed.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    return target.stat().st_size


if __name__ == "__main__":
    sys.stdout.write(f"{write_zip(Path(sys.argv[1]))} bytes\n")
