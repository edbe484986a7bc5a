"""Settings, plan and environment of runs as flat keys, and the keys whose values differ.

    run.toml       section.key         a key that one run lacks counts with its default
    plan.json      plan.key            layout, batch, parameters …
    environment    version of torch, source of train.py, device, hosts

A run without run.toml (an own loop) has no value for its keys, and makes none of them differ.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.base.errors import shorten
from shoal.base.layouts.layout import Layout
from shoal.base.runlog.damaged_lines import Record
from shoal.config.differences import ABSENT, PLACES, changes_result
from shoal.config.sections import Config
from shoal.config.trust import CODE
from shoal.report.run_contents import RunContents
from shoal.report.sections.history import hosts_text, read_saved_record

MOST_TOML_BYTES = 1 << 18
MOST_KEYS, MOST_SOURCES = 4_000, 200
"""Keys of a run.toml, and source files of a run, that are read."""
PLAN_KEYS = (
    "model", "parameters", "unit", "steps", "batch", "micro_batch", "accumulate", "compute",
    "device",
)  # fmt: skip
OF_TOML = {
    "steps": "train.steps", "batch": "train.batch", "micro_batch": "train.micro_batch",
    "accumulate": "train.accumulate", "compute": "precision.compute", "model": "model.name",
}  # fmt: skip
"""Keys of plan.json that repeat one of run.toml."""
UNKNOWN = "–"


@dataclass(frozen=True)
class RunKeys:
    """Keys of one run with their values as text.

    Attributes:
        settings: of run.toml; None if the run has none that can be read.
        others: of the plan and the environment.
        is_renamed: run.name of run.toml is not the name of the folder.
    """

    settings: Mapping[str, str] | None
    others: Mapping[str, str]
    is_renamed: bool = False

    @property
    def unrecorded(self) -> list[str]:
        """Return those of "run.toml", "versions" and "sources" that are not known."""
        kinds = {"versions": "version of ", "sources": "source of "}
        if self.settings is not None and not self.functions:
            del kinds["sources"]  # the run calls no code but Shoal's, which the version names
        return (["run.toml"] if self.settings is None else []) + [
            kind
            for kind, begin in kinds.items()
            if not any(key.startswith(begin) for key in self.others)
        ]

    @property
    def functions(self) -> list[str]:
        """Return the keys of run.toml that name a function of the user."""
        settings = self.settings or {}
        return [
            key
            for key in CODE
            if ("function:" if key.startswith("data.") and key != "data.collate" else ":")
            in settings.get(key, "")
        ]


@dataclass(frozen=True)
class KeyDifference:
    """A key whose value differs between runs.

    Attributes:
        key: its name.
        values: a text per run, `UNKNOWN` where it is not recorded.
        changes: whether another value changes the result of a run.
    """

    key: str
    values: tuple[str, ...]
    changes: bool


def read_run_keys(run: RunContents) -> RunKeys:
    """Return the keys of a run, from its folder."""
    others = _plan_keys(run.plan)
    record = read_saved_record(run)
    versions = record.get("versions")
    if isinstance(versions, dict):
        others |= {f"version of {name}": _text(one) for name, one in versions.items()}
    code = record.get("code")
    for name, one in list(code.items())[:MOST_SOURCES] if isinstance(code, dict) else []:
        if isinstance(one, list) and len(one) == 2:
            others[f"source of {name}"] = _text(one[1])
    if hosts := hosts_text(run):
        others["hosts"] = shorten(hosts)
    for event in run.named("compute_started")[-1:]:
        others |= {
            f"start: {key}": _text(event[key]) for key in ("dtypes", "threads") if key in event
        }
    settings = _read_settings(run.folder / "run.toml")
    name = others["run.name"] = (settings or {}).pop("run.name", "") or UNKNOWN
    is_renamed = name not in (UNKNOWN, shorten(run.folder.resolve().name))
    return RunKeys(settings or None, others, is_renamed)


def _read_settings(path: Path) -> dict[str, str] | None:
    try:
        with path.open("rb") as file:
            tables = tomllib.loads(file.read(MOST_TOML_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    found: dict[str, str] = {}
    for section, table in tables.items():
        if not isinstance(table, dict):
            table = {"": table}
        for name, value in table.items():
            key = f"{section}.{name}" if name else section
            if key not in PLACES - {"run.name"} and len(found) < MOST_KEYS:
                found[key] = _text(value)
    return found or None


def _plan_keys(plan: Record) -> dict[str, str]:
    found = {f"plan.{key}": _text(plan[key]) for key in PLAN_KEYS if key in plan}
    try:
        found["plan.layout"] = Layout(**plan["layout"]).text()
    except (KeyError, TypeError, ValueError, AttributeError):
        return found
    return found


def _text(value: Any) -> str:
    """Return a value as one short text, in TOML's words where they are short.

    >>> _text(True), _text(0.1), _text("a"), _text([1, 2])
    ('true', '0.1', 'a', '[1, 2]')
    """
    if isinstance(value, str):
        return shorten(value)
    try:
        return shorten(json.dumps(value, ensure_ascii=False, default=str))
    except (ValueError, RecursionError):
        return "…"


def _default_text(key: str) -> str:
    section, _, name = key.partition(".")
    value = getattr(getattr(Config(), section, None), name, ABSENT) if name else ABSENT
    return _text(list(value) if isinstance(value, tuple) else value)


def list_key_differences(runs: Sequence[RunKeys]) -> list[KeyDifference]:
    """Return the keys whose known values differ: first those that change the result of a run."""
    found = []
    for key in dict.fromkeys(key for run in runs for key in run.settings or ()):
        default = _default_text(key)
        values = [UNKNOWN if r.settings is None else r.settings.get(key, default) for r in runs]
        if _differ(values):
            found.append(KeyDifference(key, tuple(values), changes_result(key)))
    repeated = {f"plan.{name}" for name, key in OF_TOML.items() if _all_have(runs, key)}
    for key in dict.fromkeys(key for run in runs for key in run.others):
        values = [run.others.get(key, UNKNOWN) for run in runs]
        if key == "run.name" and not any(run.is_renamed for run in runs):
            continue
        if key not in repeated and _differ(values):
            changes = key.startswith("source of ") or key in ("plan.model", "plan.parameters")
            found.append(KeyDifference(key, tuple(values), changes))
    return sorted(found, key=lambda one: not one.changes)


def _differ(values: Sequence[str]) -> bool:
    return len({value for value in values if value != UNKNOWN}) > 1


def _all_have(runs: Sequence[RunKeys], key: str) -> bool:
    return all(run.settings is not None and key in run.settings for run in runs)


def compared_keys_text(labels: Sequence[str], runs: Sequence[RunKeys]) -> str:
    """Return the keys that cannot be compared, because no run or not every run recorded them.

    >>> compared_keys_text(["a", "b"], [RunKeys({}, {}), RunKeys({}, {"version of torch": "2"})])
    'versions of a are not recorded'
    """
    missing: dict[str, list[str]] = {}
    for label, run in zip(labels, runs, strict=True):
        if kinds := join_names(run.unrecorded):
            missing.setdefault(kinds, []).append(label)
    parts = [f"{kinds} of {_short_list(names)}" for kinds, names in missing.items()]
    text = f"{', and '.join(parts)} are not recorded" if parts else ""
    unknown = [run for run in runs if "sources" in run.unrecorded]
    if functions := sorted({key for run in unknown for key in run.functions}):
        text += f", so the code behind {', '.join(functions)} is not compared"
    return text


def _short_list(names: Sequence[str]) -> str:
    return join_names([*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names)


def join_names(names: Sequence[str]) -> str:
    """Return names as a list in a sentence.

    >>> join_names(["a"]), join_names(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
