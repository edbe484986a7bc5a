"""Rows of a table that takes longer than one sitting: kept in a file, gone on with, counted.

Every row says which source it was made with (`source_hash`), and counts for that one alone unless
it is asked to stay.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Options that all tables have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fresh", action="store_true", help="forget what is done already")
    parser.add_argument("--keep", action="store_true", help="keep rows of earlier sources too")
    return parser


def done_already(path: Path, source: str) -> dict[str, Row]:
    """Rows of this source, or of any for ""."""
    try:
        rows = json.loads(path.read_text())["rows"]
    except (OSError, ValueError, KeyError):
        return {}
    return {key: row for key, row in rows.items() if source in ("", row["source"])}


def rows_before(options: argparse.Namespace, path: Path, source: str) -> dict[str, Row]:
    """What a sitting begins with, as its options say."""
    return {} if options.fresh else done_already(path, "" if options.keep else source)


def counted(outcomes: Iterable[str]) -> str:
    """How often every outcome came up, the most frequent first.

    >>> counted(["equal", "refused", "equal"])
    '2 equal, 1 refused'
    """
    return ", ".join(f"{number} {what}" for what, number in Counter(outcomes).most_common())


def versions() -> dict[str, str]:
    """Of Python, torch, and transformers where that is installed."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        import transformers
    except ImportError:
        return found
    return {**found, "transformers": transformers.__version__}


def verdicts(rows: dict[str, Row]) -> str:
    """How often every verdict came up."""
    return f"{len(rows)} rows: {counted(row['verdict'] for row in rows.values())}"


def write_rows(path: Path, definition: str, rows: dict[str, Row]) -> None:
    """The record: when, with what, what a row says, and the rows."""
    result = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": versions(),
        "definition": definition,
        "counts": verdicts(rows),
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
