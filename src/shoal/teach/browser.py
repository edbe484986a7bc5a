"""Answer a page in a browser: one function a widget, plain text in, plain data out.

The browser loads these rooms as a zip, with the standard library alone: nothing here may import
rich, typer or msgspec (`website/browser_zip.py`).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from collections.abc import Callable
from typing import Any

from shoal.base.errors import PlanError, ShoalError
from shoal.teach.drawings.timeline_svg import timeline_svg
from shoal.teach.drawings.walk_svg import walk_svg
from shoal.teach.puzzles import get_puzzle, puzzle_run_timeline, reference
from shoal.teach.puzzles.user_program import program_of, run_on_ranks, score_lines
from shoal.teach.walks.pipelines_walk import PipelineCase, pipeline

WALKS = {
    **dict.fromkeys(
        ("ring", "halving", "tree", "broadcast", "all_gather", "reduce_scatter"), "collectives"
    ),
    **{name: name for name in ("ddp", "zero", "fsdp", "tp", "cp", "ep", "local_steps")},
}
"""Name of a walk → its module, without `_walk`."""


NAME = "your program"
"""Of a program in a page, for messages and tracebacks."""


def call(request: str) -> str:
    """Answer one request of a page, as JSON: {"svg": …, "lines": […]} or {"error": one line}.

    >>> json.loads(call('{"what": "puzzle", "number": 0, "code": "x = 1"}'))["error"]
    'your program: it has no async def program(m); try: the first example of shoal docs puzzles'
    >>> "svg" in json.loads(call('{"what": "walk", "name": "tp", "ranks": 2}'))
    True
    """
    asked = json.loads(request)
    try:
        answer = _ANSWERS[asked.pop("what")](**asked)
    except ShoalError as failure:
        answer = {"error": str(failure)}
    return json.dumps(answer, ensure_ascii=False)


def draw_walk(name: str, **numbers: Any) -> dict[str, Any]:
    """Return the drawing of a walk.

    Raises:
        PlanError: no such walk, or numbers that it cannot show.
    """
    key = name.replace("-", "_")
    if key not in WALKS:
        raise PlanError(f"walk {name}: there is no such walk; try: {', '.join(WALKS)}")
    module = importlib.import_module(f"shoal.teach.walks.{WALKS[key]}_walk")
    walk = getattr(module, key)(**numbers)
    return {"svg": walk_svg(walk), "lines": [walk.checked]}


def draw_pipeline(name: str, **numbers: Any) -> dict[str, Any]:
    """Return the drawing of a pipeline schedule.

    Raises:
        PlanError: an unknown schedule, or numbers that it does not allow.
    """
    line = pipeline(name, PipelineCase(**numbers))
    return {"svg": timeline_svg([line]), "lines": [f"{k}: {v}" for k, v in line.facts.items()]}


def run_puzzle_code(number: int, code: str) -> dict[str, Any]:
    """Run a program that a user typed; return its drawing and its score.

    Raises:
        ConfigError: the code fails.
        PlanError: it breaks a rule, or its ranks wait for each other.
    """
    puzzle = get_puzzle(number)
    models = run_on_ranks(puzzle, program_of(code, NAME), NAME)
    line = puzzle_run_timeline(models, f"puzzle {number}, {puzzle.title}: yours")
    return {"svg": timeline_svg([line]), "lines": score_lines(puzzle, models)}


def author_code(number: int) -> dict[str, Any]:
    """Return the author's program of a puzzle, with what it calls, as text to start from.

    >>> text = author_code(6)["code"]
    >>> text.splitlines()[-1], "PuzzleRank" in text
    ('program = gpipe', False)
    """
    program = get_puzzle(number).program
    module = inspect.getsource(reference)
    lines = module.splitlines()
    parts: dict[str, ast.stmt] = {}
    for node in ast.parse(module).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            parts[node.targets[0].id] = node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts[node.name] = node
    wanted, new = set[str](), [program.__name__]
    while new:
        name = new.pop()
        wanted.add(name)
        used = {one.id for one in ast.walk(parts[name]) if isinstance(one, ast.Name)}
        new += sorted((used & set(parts)) - wanted)
    kept = [node for name, node in parts.items() if name in wanted]
    texts = ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in kept]
    code = "\n\n\n".join([*texts, f"program = {program.__name__}\n"])
    return {"code": code.replace(": PuzzleRank", "").replace(" -> None", "")}


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "walk": draw_walk,
    "pipeline": draw_pipeline,
    "puzzle": run_puzzle_code,
    "author": author_code,
}
