"""Habits of training loops: functions that are right under a layout, or named, and never wrong.

    @habit("losses", sums=True)      its loss and numbers are sums over samples, so that a layout
    def focal(script): ...           can make it right; False: a mistake, or a coupling of samples

A cell of the matrix is a habit × a layout. Its outcome:

    right    weights, losses and noted numbers equal plain PyTorch's on the whole batch (1e-9)
    named    an error of Shoal, or a line to the user
    raised   an exception of torch or Python, which names nothing
    WRONG    other numbers, exit 0, no line
    n/a      it has a model or data that the layout (cp, ep) cannot take
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from guards import Lines
from habits.habit_sides import PLACE, NotApplicableError, Script
from shoal.base.errors import ShoalError
from shoal.fabric import World

LAYOUTS = ("single", "ddp", "zero2", "fsdp", "tp", "pp")
ROOMS = (
    *("loss_habits", "gradient_habits", "optimizer_habits", "model_habits", "loop_habits"),
    *("copy_habits", "update_habits", "state_habits", "batch_habits"),
    *("column_habits", "layer_habits", "recipe_habits", "script_habits"),
    *("layout_blind_habits", "own_part_habits"),
)
USUAL = (
    *("on 2 cores", "processes compute on", "layout.strategy = auto", "has no blocks of layers"),
    *("stays whole: it meets no value", "experts, "),
)
"""Parts of lines about the machine and the layout, which say nothing of the script."""
EQUAL = 1e-9


@dataclass(frozen=True)
class Habit:
    """One habit.

    Attributes:
        act: the script.
        kind: what it is about.
        sums: it is a sum over samples.
        near: largest relative difference that counts as equal; more than EQUAL where the model
            computes in fp32.
        ends: it may end ranks, so it runs as a program under torchrun, with its watchdog.
    """

    act: Callable[[Script], None]
    kind: str
    sums: bool
    near: float = EQUAL
    ends: bool = False


TABLE: dict[str, Habit] = {}


def habit(
    kind: str, *, sums: bool, near: float = EQUAL, ends: bool = False
) -> Callable[[Callable[[Script], None]], Any]:
    """Put a habit into the table."""

    def mark(act: Callable[[Script], None]) -> Callable[[Script], None]:
        known = TABLE.get(act.__name__)  # pytest's search for doctests runs a module once more
        twice = known is not None and known.act.__code__ != act.__code__
        assert not twice, f"two habits are called {act.__name__}"
        TABLE[act.__name__] = Habit(act, kind, sums, near, ends)
        return act

    return mark


def table() -> dict[str, Habit]:
    """Return all habits."""
    for room in ROOMS:
        importlib.import_module(f"habits.{room}")
    return TABLE


def attempt(world: World, name: str, layout: str) -> dict[str, Any]:
    """Run a habit on this rank and in plain PyTorch.

    Returns:
        The error, the lines to the user, and the largest difference to plain PyTorch with the name
        of the tensor; a difference is relative to the largest number of its tensor.
    """
    act, PLACE["layout"] = table()[name].act, layout
    plain, ours = Script(None, layout), Script(world, layout)
    try:
        act(plain)
    except Exception as error:
        if isinstance(error, NotApplicableError) or layout.startswith("cp"):
            return {"not_applicable": True}  # the plain script cannot take sequences
        raise
    wanted = plain.result()
    found: dict[str, Any] = {"error": "", "raised": "", "difference": -1.0, "where": ""}
    with Lines() as heard:
        try:
            act(ours)
            if ours.notes_alone and ours.rank:
                wanted.pop("noted")
            found |= difference(ours.result(), wanted)
        except ShoalError as error:
            found["error"] = f"{type(error).__name__}: {error}"
        except Exception as error:
            found["raised"] = f"{type(error).__name__}: {str(error)[:300]}"
        finally:
            end(ours.run)
    if found["error"]:  # as an uncaught error is printed, before a launcher ends the other ranks
        sys.stderr.write(f"shoal: {found['error']}\n")
    found["near"] = table()[name].near
    found["lines"] = [line for line in heard.lines if not any(part in line for part in USUAL)]
    return found


def end(run: Any) -> None:
    """Leave the world to the next habit."""
    if run is None:
        return
    run.guards.close()
    for undo in run.program.on_close:
        undo()


def difference(ours: dict[str, list[float]], wanted: dict[str, list[float]]) -> dict[str, Any]:
    """Return the largest relative difference, and where it is."""
    worst = {"difference": 0.0, "where": ""}
    for name, numbers in wanted.items():
        got = ours.get(name)
        if got is None or len(got) != len(numbers):
            return {"difference": float("inf"), "where": f"{name}: another size"}
        size = max([abs(one) for one in numbers], default=0.0) or 1.0
        apart = max([abs(a - b) for a, b in zip(got, numbers, strict=True)], default=0.0) / size
        if not apart <= worst["difference"]:
            worst = {"difference": apart, "where": name}
    return worst


def outcome(answers: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the outcome of a cell from the answers of all ranks, and what shows it."""
    if any(one.get("not_applicable") for one in answers):
        return "n/a", "a model or data of its own"
    errors = [one["error"] for one in answers if one["error"]]
    if errors:
        return "named", errors[0]
    if raised := [one["raised"] for one in answers if one["raised"]]:
        return "raised", raised[0]
    worst = max(answers, key=lambda one: one["difference"])
    if worst["difference"] <= worst["near"]:
        return "right", ""
    if lines := [line for one in answers for line in one["lines"]]:
        return "named", " | ".join(lines)
    return "WRONG", f"{worst['difference']:.1e} in {worst['where']}"
