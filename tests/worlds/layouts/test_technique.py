"""A technique is a policy, a file and a line: a toy one is added so, and is found everywhere."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from known_machine import write_machine

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "shoal"

POLICY = '''
@dataclass(frozen=True, kw_only=True)
class ToyPolicy:
    """What a block's output is handed through."""

    toy: str = choice_field(("none", "copies"))
    """none, copies: every output of a block is copied once"""


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy(OffloadPolicy, RecomputePolicy, ToyPolicy):'''
TECHNIQUE = '''"""Copies every output of a block."""

from dataclasses import replace

import torch

from shoal.parallel.program import Program


def apply(program: Program) -> Program:
    """Copy the outputs of the module's parts."""
    program.notices.append(f"memory.toy = {program.plan.toy}: outputs are copied")
    hooks = [
        part.register_forward_hook(lambda part, inputs, output: output.clone())
        for part in program.module.children()
        if isinstance(part, torch.nn.Linear)
    ]
    return replace(program, on_close=(*program.on_close, *(hook.remove for hook in hooks)))
'''
LINE = '    (ToyPolicy, "toy"),\n    (OffloadPolicy, "offload"),\n'


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Shoal that has one technique more."""
    folder = tmp_path_factory.mktemp("toy")
    shutil.copytree(SOURCE, folder / "src" / "shoal")  # with what Python compiled of it
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "test_configuration_page.py", folder / "tests")
    room = folder / "src" / "shoal"

    def change(path: Path, old: str, new: str) -> None:
        text = path.read_text()
        assert text.count(old) == 1, old
        path.write_text(text.replace(old, new))

    old = "\n@dataclass(frozen=True, kw_only=True)\nclass MemoryPolicy(OffloadPolicy, RecomputePolicy):"
    change(room / "base" / "layouts" / "policies.py", old, POLICY)
    (room / "parallel" / "toy.py").write_text(TECHNIQUE)
    line = '    (OffloadPolicy, "offload"),\n'
    change(room / "parallel" / "compose.py", line, LINE)
    change(
        room / "parallel" / "compose.py",
        "    OffloadPolicy,\n",
        "    OffloadPolicy,\n    ToyPolicy,\n",
    )
    path = f"{folder / 'src'}:{folder / 'tests'}"
    cache = {"SHOAL_CACHE": str(folder / "cache")}
    write_machine(folder / "cache")
    return {**os.environ, "PYTHONPATH": path, "FOLDER": str(folder), **cache}


def said(toy: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], env=toy, cwd=toy["FOLDER"], capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


WORDS = ["model.name=mlp", "data.source=digits", "train.steps=2", "layout.strategy=ddp"]
SCRIPT = f"""
import contextlib, sys

sys.argv = ["shoal", "train", "--help"]  # what is asked at first decides what is imported
import test_configuration_page as page
import torch
import shoal
from shoal.cli.main import main

with contextlib.suppress(SystemExit):
    main()
sys.argv = ["shoal", "train", *{WORDS}, "memory.toy=copie"]
try:
    main()
except SystemExit as ended:
    print("ended with", ended.code)
net = torch.nn.Sequential(torch.nn.Linear(4, 4))
start = lambda **words: shoal.parallelize(net, lambda p: torch.optim.SGD(p, lr=0.1),
                                          lambda o, t: ((o - t) ** 2), **words)
run = start(toy="copies")
print("run", run.plan.toy)
run.close()
run = start(plan=shoal.Plan(shoal.Layout(), toy="copies"))
print("plan", run.plan.toy)
print("page", "| `toy` | `\\"none\\"` | none, copies: every output" in page.render())
"""


def test_help_an_own_loop_and_the_page_know_it(toy: dict[str, str]) -> None:
    """And a wrong word of its key."""
    lines = said(toy, "-c", SCRIPT).splitlines()
    memory = [sorted(line.split()) for line in lines if line.strip().startswith("[memory]")]
    assert memory == [["[memory]", "offload", "offload_to", "recompute", "toy"]]
    assert "shoal: memory.toy = copie: not one of none, copies; try: copies" in lines
    told = [line for line in lines if line.split()[:1] in (["ended"], ["run"], ["plan"], ["page"])]
    assert told == ["ended with 2", "run copies", "plan copies", "page True"]


@pytest.mark.proof  # a key that all commands know: tests/trainer/test_every_key.py
def test_a_command_knows_it(toy: dict[str, str]) -> None:
    """run.toml, the proof of two steps against one process, plan.json."""
    more = ["launch.processes=2", "run.name=x", "memory.toy=copies"]
    told = said(toy, "-m", "shoal", "train", *WORDS, *more)
    assert "memory.toy = copies: outputs are copied" in told
    assert "computes what one process computes" in told
    run = Path(toy["FOLDER"]) / "runs" / "x"
    assert 'toy = "copies"' in (run / "run.toml").read_text()
    assert json.loads((run / "plan.json").read_text())["toy"] == "copies"


KEYS = {
    "recompute": ("parallel/recompute.py",),
    "offload": ("parallel/offload/",),
    "offload_to": ("parallel/offload/",),
    "compile": ("parallel/compiling/",),
    "compress": ("parallel/data_parallel/compress.py",),
    "defer_sync": ("parallel/data_parallel/zero.py", "parallel/data_parallel/fsdp.py"),
    "strict": ("parallel/tensor_parallel/", "parallel/context_parallel/"),
    "sequence_parallel": ("parallel/tensor_parallel/",),
    "split": ("parallel/tensor_parallel/",),
    "context": ("parallel/context_parallel/",),
    "blocks": ("trace/find/blocks.py",),
}
"""Keys of techniques, and the files that are the technique."""

HOMES = (
    "base/layouts/policies.py",
    "base/layouts/parameter_servers.py",
    "config/",
    "planning/",
    "forecast/",
    "teach/",
)
"""Declared, refused beside servers, read from run.toml, priced and explained here."""

SCHEDULES = {"gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe"}
ORDERS = (
    *(
        "base/layouts/schedule_names.py",
        "planning/pipeline_schedules.py",
        "planning/dualpipe_schedule.py",
    ),
    *("planning/pipeline_bubble.py", "planning/schedule_checks.py", "parallel/pipeline/", "teach/"),
)


OF_PLANS = {"plan", "policy", "layout", "memory", "train", "asked"}


def trees(pattern: str) -> list[tuple[str, ast.Module]]:
    """Parse the source files whose text matches, by their paths: parsing all costs three seconds."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    return [
        (str(path.relative_to(SOURCE)), ast.parse(text))
        for path, text in texts.items()
        if re.search(pattern, text)
    ]


def test_nobody_else_spells_a_techniques_key() -> None:
    found = []
    for path, tree in trees(rf"({'|'.join(OF_PLANS)})\.({'|'.join(KEYS)})\b"):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or path.startswith(HOMES):
                continue
            if node.attr not in KEYS:
                continue
            held = ast.unparse(node.value).rpartition(".")[2]
            if held in OF_PLANS and not path.startswith(KEYS[node.attr]):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_nobody_else_compares_a_schedules_name() -> None:
    found = []
    for path, tree in trees(f"[\"']({'|'.join(SCHEDULES)})[\"']"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and not path.startswith(ORDERS):
                texts = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                if texts & SCHEDULES:
                    found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
