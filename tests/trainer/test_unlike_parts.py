"""Where ranks have other work by the plan, the page that the launcher reads says so."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.launch.watch.page_reader import OwnedPage
from shoal.trainer.step.optimizer_step import update
from shoal.wire import phases
from shoal.wire.phases import BACKWARD, DATA, PASSES, UPDATE
from shoal.wire.watch_page import PAGE_VARIABLE, WatchPage


@pytest.mark.parametrize(
    ("stages", "uneven", "unlike", "own"),
    [
        (1, False, set(), set()),
        (1, True, {DATA, PASSES, BACKWARD}, set()),
        (2, False, set(), {PASSES, BACKWARD, UPDATE}),
        (2, True, {DATA, PASSES, BACKWARD}, {UPDATE}),
    ],
)
def test_unequal_work_is_marked_in_the_page(
    monkeypatch: pytest.MonkeyPatch,
    stages: int,
    uneven: bool,
    unlike: set[int],
    own: set[int],
) -> None:
    """NaN: other work in this step · negative: of every step, as stages have."""
    watched = OwnedPage("rank 0")
    page = WatchPage.open({PAGE_VARIABLE: watched.path})
    assert page is not None
    monkeypatch.setattr(phases, "page", page)
    program: Any = SimpleNamespace(pipe=SimpleNamespace(size=stages), reducer=None)
    tally: Any = SimpleNamespace(uneven=uneven)
    with pytest.raises(Exception, match="no reducer"):
        update(program, None, tally, clip=0, scale=1.0)  # type: ignore[arg-type]  # marks first
    page.record_step_end(1)
    kept = watched.steps()[1]
    assert {part for part, spent_s in enumerate(kept) if math.isnan(spent_s)} == unlike
    signs = {part for part, spent_s in enumerate(kept) if math.copysign(1.0, spent_s) < 0}
    assert signs - unlike == own
    watched.close()
