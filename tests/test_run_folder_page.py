"""docs/reference/run-folder.md names all files of a run, the keys of its rows, and all events.

UPDATE_DOCS=1 writes the table of events anew. tests/worlds/machines/test_first_run.py compares the
page with a real run.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

from shoal.base.runlog.events import EVENTS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "run-folder.md"
TABLE = "| event | fields | says |\n|---|---|---|\n"
COMMON = {"rank", "step"}
"""Fields of every line."""
UNNAMED = "..."
"""Stands for fields that an event's call passes on."""


def calls_of(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Yield (event, fields) of each call that names an event first."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            word = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = node.args[0].value
            if word in ("emit", "report", "tell") and isinstance(name, str) and name in EVENTS:
                yield name, {one.arg or UNNAMED for one in node.keywords}


def fields_of_events() -> dict[str, set[str]]:
    """Every event's fields, as the calls in the source name them."""
    found: dict[str, set[str]] = {name: set() for name in EVENTS}
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(f'"{name}"' in text for name in EVENTS):
            for name, fields in calls_of(ast.parse(text)):
                found[name] |= fields - COMMON
    return found


def table() -> str:
    """The page's table of events."""
    rows = []
    for name, fields in fields_of_events().items():
        named = ", ".join(f"`{one}`" for one in sorted(fields - {UNNAMED}))
        more = [UNNAMED] if UNNAMED in fields or not fields else []
        rows.append(
            f"| `{name}` | {', '.join([*filter(None, [named]), *more])} | {EVENTS[name]} |\n"
        )
    return TABLE + "".join(rows)


def test_every_event_is_on_the_page_with_its_fields() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, found, _ = text.partition(TABLE)
    assert found, "the table of events"
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(before + table(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == before + table(), "try: UPDATE_DOCS=1"


def test_the_page_says_what_writers_call_their_files() -> None:
    """Names in the source and on the page are the same."""
    from shoal.base.runlog.rank_records import FOLDER, PARTS
    from shoal.launch.watch.device_records import DEVICES_FILE, parse_devices
    from shoal.trainer.metrics_recorder import STEP_FILES
    from shoal.trainer.run_folder.start_files import RANKS_FILE
    from shoal.trainer.step.expert_counts import EVERY
    from shoal.wire.phases import FILE_NAME

    text = PAGE.read_text(encoding="utf-8")
    for name in (DEVICES_FILE, *STEP_FILES, RANKS_FILE, FILE_NAME, f"{FOLDER}/node-N.bin"):
        assert f"`{name}`" in text, name
    assert f"parts of a step are: {', '.join(PARTS)}." in " ".join(text.lower().split())
    assert f"every {EVERY}th step" in text
    device = parse_devices("0, X, 1, 1, 1, 1, 1")[0]
    assert [key for key in device if f'"{key}":' not in text] == []


def test_the_readme_of_docs_lists_the_page() -> None:
    assert re.search(r"\(reference/run-folder\.md\)", (ROOT / "docs" / "README.md").read_text())
