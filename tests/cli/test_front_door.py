"""What a newcomer meets of the command line: grouped verbs, pages, versions, JSON for programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import shoal
from shoal.base import package_source
from shoal.base.errors import ConfigError
from shoal.cli import docs, main

ROOT = Path(__file__).resolve().parents[2]


def answer(*words: str) -> str:
    """What a verb prints; it must end well."""
    done = CliRunner().invoke(main.app, words)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_every_verb_stands_under_a_heading() -> None:
    told = answer("--help")
    verbs = [verb for group in main.HEADINGS.values() for verb in group]
    registered = {one.name for one in main.app.registered_commands} | set(main.GROUPS)
    assert sorted(verbs) == sorted(registered)
    for heading, group in main.HEADINGS.items():
        part = told.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\S+)", part, re.M) == list(group)
    assert "..." not in told.partition("\nTrain:\n")[2], "a line was cut"
    assert max(map(len, told.splitlines())) <= 80


def test_the_version_names_the_source(tmp_path: Path) -> None:
    digest = package_source.package_digest()
    assert answer("--version") == f"shoal {shoal.__version__} (source {digest[:12]})\n"


def test_the_digest_is_that_of_the_package_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In site-packages lie 30,000 files beside it: what changes there is not Shoal's source."""
    (tmp_path / "shoal" / "base").mkdir(parents=True)
    (tmp_path / "shoal" / "base" / "one.py").write_text("1")
    (tmp_path / "other.py").write_text("1")
    assert Path(shoal.__file__).parent == package_source.PACKAGE
    monkeypatch.setattr(package_source, "PACKAGE", tmp_path / "shoal")
    before = package_source.package_digest()
    (tmp_path / "other.py").write_text("2")
    assert package_source.package_digest() == before
    (tmp_path / "shoal" / "base" / "one.py").write_text("2")
    assert package_source.package_digest() != before


def test_docs_lists_and_prints_pages() -> None:
    told = answer("docs")
    pages = {p.stem for p in (ROOT / "docs" / "start").glob("*.md")} - {"README"}
    assert pages <= set(re.findall(r"^  (\S+)", told, re.M))
    text = (ROOT / "docs" / "start" / "own-loop.md").read_text()
    assert answer("docs", "own-loop").strip() == text.strip()
    assert answer("docs", "own", "loop") == answer("docs", "docs/start/own-loop.md")
    assert json.loads(answer("docs", "own-loop", "--json"))["text"] == text
    assert {one["name"] for one in json.loads(answer("docs", "--json"))} >= pages
    proof = answer("docs", "proof/any-module")
    assert proof != answer("docs", "any-module")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("own-lop", "try: shoal docs own-loop"),
        ("vllm", "try: shoal docs serve"),
        ("q0", "all pages"),
        ("scr", "try: shoal docs script"),
        ("quikstart", "try: shoal docs tutorial"),
        ("model", "try: shoal docs first-model"),
        ("mem", "try: shoal docs start/memory"),
        ("", "all pages"),
    ],
)
def test_a_page_that_is_none_names_the_nearest(word: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"docs {word}: no such page; {hint}"):
        docs.find_page(word, docs.list_pages())


def test_two_pages_of_a_name_are_told_apart() -> None:
    lines = [line for line in answer("docs").splitlines() if line.startswith("  memory ")]
    assert [re.findall(r"\((\S+)\)$", line) for line in lines] == [
        ["start/memory"],
        ["how-it-works/memory"],
    ]
    done = CliRunner().invoke(main.app, ["docs", "memory"])
    assert "another page of this name: shoal docs how-it-works/memory" in done.stderr
    assert "another page" not in done.stdout
    assert CliRunner().invoke(main.app, ["docs", "start/memory"]).stderr == ""


def test_a_page_with_every_key_names_the_page_to_begin_with() -> None:
    """A reader of README typed its link's text, and got 1,959 words instead of the first page."""
    pages = docs.list_pages()
    for page, first in docs.FIRST.items():
        done = CliRunner().invoke(main.app, ["docs", page.partition("/")[2]])
        assert done.stderr == f"begin with: shoal docs {first}\n"
        assert f"../{first}.md" in done.stdout[:300], "the page itself names it too"
        assert docs.find_page(first, pages).folder == "start"


def test_an_installation_without_pages_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no pages in"):
        docs.list_pages(tmp_path)


def test_the_wheel_holds_the_pages(tmp_path: Path) -> None:
    """As `make wheel` makes it, from a copy: a build leaves folders beside its sources."""
    copy = tmp_path / "tree"
    files = subprocess.run(
        ["git", "ls-files", "src", "docs", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in files:
        there = copy / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            there.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():
            there.write_bytes((ROOT / name).read_bytes())
    make = "from setuptools import build_meta; build_meta.build_wheel('..')"
    done = subprocess.run(
        [sys.executable, "-c", make], cwd=copy, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    pages = {"start/own-loop.md", "README.md", "zh/learn/ranks.md"}
    assert {f"shoal/pages/{name}" for name in pages} <= set(names)


def options(command: Any) -> set[str]:
    """The options of a verb."""
    return {text for one in command.params for text in getattr(one, "opts", ())}


FACTS = (
    *(
        "compare",
        "diagnose",
        "docs",
        "doctor",
        "links",
        "plan",
        "prove",
        "replay",
        "report",
        "runs",
        "sample",
        "simulate",
        "trace",
        "watch",
    ),
    *("checkpoint list", "checkpoint verify", "checkpoint export", "checkpoint import"),
    *("config import", "find lr", "find micro-batch", "data look", "islands show"),
)
ACTS = (
    *("train", "run", "serve", "launch slurm", "launch kubernetes", "launch ssh"),
    *("islands key", "islands witness"),
)
"""Verbs that start something, or write a file for a person."""


def test_every_verb_that_prints_facts_has_json() -> None:
    group: Any = typer.main.get_command(main.app)
    verbs = {}
    for name, one in group.commands.items():
        inner = getattr(one, "commands", None)
        verbs |= {f"{name} {sub}": c for sub, c in inner.items()} if inner else {name: one}
    assert sorted(verbs) == sorted([*FACTS, *ACTS])
    assert [name for name in FACTS if "--json" not in options(verbs[name])] == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of an own loop, with one checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    model = torch.nn.Linear(4, 3)
    run = shoal.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), batch=4, folder=folder)
    run.step((torch.ones(4, 4), torch.tensor([0, 1, 2, 0])))
    run.save()
    run.close()
    return folder


def test_checkpoints_as_json(trained: Path, tmp_path: Path) -> None:
    [row] = json.loads(answer("checkpoint", "list", str(trained), "--json"))
    assert (row["step"], row["tensors"] >= 2, row["bytes"] > 0) == (1, True, True)
    [told] = json.loads(answer("checkpoint", "verify", str(trained), "--json"))
    assert told == {"path": row["path"], "problems": []}
    out = tmp_path / "weights.safetensors"
    told = json.loads(answer("checkpoint", "export", str(trained), str(out), "--json"))
    assert (told["path"], told["files"], told["bytes"]) == (
        str(out),
        [out.name],
        out.stat().st_size,
    )
    whole = json.loads(answer("checkpoint", "export", str(trained), str(tmp_path / "x"), "--json"))
    assert "no config.json" in whole["notices"][0]
    back = json.loads(answer("checkpoint", "import", str(out), str(tmp_path / "y"), "--json"))
    assert (back["tensors"], Path(back["path"]).parent) == (2, tmp_path / "y")
    part = next(Path(row["path"]).glob("*.bin"), None) or next(
        p for p in Path(row["path"]).iterdir() if p.name != "manifest.json" and p.stat().st_size
    )
    kept = part.read_bytes()
    part.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    done = CliRunner().invoke(main.app, ["checkpoint", "verify", str(trained), "--json"])
    part.write_bytes(kept)
    assert done.exit_code == 2
    assert json.loads(done.stdout)[0]["problems"]


def test_an_imported_configuration_as_json(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "gradient_clipping": 1}')
    words = ["--processes", "2", "--era", "0.19.8", "--out", str(tmp_path / "run.toml"), "--json"]
    told = json.loads(answer("config", "import", str(tmp_path / "ds.json"), *words))
    assert told["values"]["train.batch"] == 8
    assert any("gradient_clipping" in line for line in told["report"])
