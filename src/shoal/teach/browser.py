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
from dataclasses import replace
from typing import Any

from shoal.base.errors import PlanError, ShoalError
from shoal.base.text.units import bytes_text, seconds_text
from shoal.teach.drawings.timeline_svg import timeline_svg
from shoal.teach.drawings.walk_svg import walk_svg
from shoal.teach.drawings.word_translation import WordTranslation
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

CODE = ("author",)
"""Requests whose answer is code, which stays as it is."""

LONGEST = 8192
"""Longest sequence of a plan, as `shoal plan` takes it if the user gives none."""

NAME = "your program"
"""Of a program in a page, for messages and tracebacks."""


def call(request: str, messages: str = "{}") -> str:
    """Answer one request of a page, as JSON: {"svg": …, "lines": […]} or {"error": one line}.

    Args:
        messages: translations of answers and drawings, as JSON; none on an English page.

    >>> json.loads(call('{"what": "puzzle", "number": 0, "code": "x = 1"}'))["error"]
    'your program: it has no async def program(m); try: the first example of shoal docs puzzles'
    >>> "svg" in json.loads(call('{"what": "walk", "name": "tp", "ranks": 2}'))
    True
    """
    asked = json.loads(request)
    what, words = asked.pop("what"), WordTranslation(json.loads(messages))
    if what not in CODE:
        asked["words"] = words
    try:
        answer = _ANSWERS[what](**asked)
    except ShoalError as failure:
        answer = {"error": words.text(str(failure))}
    return json.dumps(answer, ensure_ascii=False)


def draw_walk(name: str, words: WordTranslation, **numbers: Any) -> dict[str, Any]:
    """Return the drawing of a walk.

    Raises:
        PlanError: no such walk, or numbers that it cannot show.
    """
    key = name.replace("-", "_")
    if key not in WALKS:
        raise PlanError(f"walk {name}: there is no such walk; try: {', '.join(WALKS)}")
    module = importlib.import_module(f"shoal.teach.walks.{WALKS[key]}_walk")
    walk = words.walk(getattr(module, key)(**numbers))
    return {"svg": words.svg(walk_svg(walk)), "lines": [walk.checked]}


def draw_pipeline(name: str, words: WordTranslation, **numbers: Any) -> dict[str, Any]:
    """Return the drawing of a pipeline schedule.

    Raises:
        PlanError: an unknown schedule, or numbers that it does not allow.
    """
    line = words.timeline(pipeline(name, PipelineCase(**numbers)))
    lines = [f"{name}{words.text(': ')}{figure}" for name, figure in line.facts.items()]
    return {"svg": words.svg(timeline_svg([line])), "lines": lines}


def run_puzzle_code(number: int, code: str, words: WordTranslation) -> dict[str, Any]:
    """Run a program that a user typed; return its drawing and its score.

    Raises:
        ConfigError: the code fails.
        PlanError: it breaks a rule, or its ranks wait for each other.
    """
    puzzle = get_puzzle(number)
    models = run_on_ranks(puzzle, program_of(code, NAME), NAME)
    line = words.timeline(puzzle_run_timeline(models, f"puzzle {number}, {puzzle.title}: yours"))
    lines = [words.text(one) for one in score_lines(puzzle, models)]
    return {"svg": words.svg(timeline_svg([line])), "lines": lines}


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


def plan_model(model: str, machines: str, samples: int, words: WordTranslation) -> dict[str, Any]:
    """Return the planner's ranking for a published model, as `shoal plan` computes it.

    Args:
        machines: as --on, such as "8xH100-80GB".
        samples: of an optimizer step.

    Raises:
        PlanError: an unknown model or machine, or a batch below 1 or that no layout divides.
    """
    # Only here: a page without the planner does not pay for its import.
    from shoal.base.estimates.estimate import PlanningCase
    from shoal.base.layouts.layout import Layout
    from shoal.base.plans.plan import Plan
    from shoal.config.sections import Config
    from shoal.forecast.machines.cluster_syntax import parse_machines
    from shoal.forecast.memory.framework_memory import own_kernels
    from shoal.forecast.models.published_models import published_shape
    from shoal.forecast.models.transformer_costs import transformer_facts
    from shoal.forecast.search.case_settings import case_settings
    from shoal.forecast.search.layout_search import search_layouts
    from shoal.forecast.search.plan_document import plan_record
    from shoal.forecast.search.search_space import SearchSpace

    if samples < 1:
        raise PlanError(f"train.batch = {samples}: must be more than 0; try: train.batch=1")
    cluster, shape = parse_machines(machines), published_shape(model)
    sequence = shape.positions or min(shape.context or LONGEST, LONGEST)
    facts, narrow = (
        transformer_facts(shape, sequence, 2, own_kernels(cluster.device.kind, sequence, 2, stream))
        for stream in ("fp32", "bf16")
    )
    config = replace(Config(), model=replace(Config().model, name=model))
    case = PlanningCase(
        facts, cluster, Plan(Layout(), samples, compute="bf16"), **case_settings(config)
    )
    space = SearchSpace()
    found = search_layouts(case, space)
    record = plan_record(found, space, top=5, notes=(), narrow=lambda: narrow)
    lines = [
        f"{row['rank']}. {row['text']}: {seconds_text(row['step_s'])} per step, "
        f"{bytes_text(row['peak_bytes'])}, {row['verdict']}"
        for row in record["layouts"]
    ]
    fixes = [f"try: {fix['set']}: {bytes_text(fix['peak_bytes'])}" for fix in record["fixes"]]
    answer = [words.text(line) for line in (*lines, record["guide"], *fixes)]
    return {"lines": answer, "layouts": record["layouts"]}


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "walk": draw_walk,
    "pipeline": draw_pipeline,
    "puzzle": run_puzzle_code,
    "author": author_code,
    "plan": plan_model,
}
