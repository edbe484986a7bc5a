"""`auto`: the planner ranks what this version runs on this machine, and the best is taken.

Rank 0 looks and tells the others, so that all ranks take the same layout. A run that was chosen for
once keeps its layout on as many processes, whatever has been measured since: a restart must go on
bit for bit. Where the model cannot be traced or the machine was never measured, the selection guide
decides (planner/guide.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from shoal.base.phases import phase
from shoal.base.plan import Plan
from shoal.config.resolve import asked_layout
from shoal.config.sections import Config
from shoal.fabric import World
from shoal.parallel import precision as formats
from shoal.planner.case_settings import beside
from shoal.planner.model_states import WIDTHS
from shoal.planner.settle import Words, is_open, kept_plan
from shoal.trainer.predict import FindFacts
from shoal.trainer.rank_layouts import best_plan


@phase("plan")
def choose(
    config: Config, facts: FindFacts, world: World, folder: Path
) -> tuple[Plan, Words | None]:
    """Take the plan that the start left in a run's folder, and choose its layout if that is open.

    facts    finds the model's, once they are needed (`facts_of`)
    Gives    (plan, None); where nothing can be ranked, the plan with the words from which the
             guide settles it
    """
    plan = Plan.from_json((folder / "plan.json").read_text())
    asked = asked_layout(config.layout)
    open_plan = replace(plan, why="")  # the guide speaks anew, of a model that it can count
    if not is_open(asked) or kept_plan(folder, world.size):
        return plan, None
    if world.size == 1:
        return open_plan, asked
    compute = formats.resolve(plan.compute, world.device)
    model = partial(facts, element_bytes=WIDTHS[compute])
    found = best_plan(model, plan, config.layout, beside(config), world)
    return (found, None) if found else (open_plan, asked)
