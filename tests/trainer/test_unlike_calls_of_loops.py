"""Calls that every rank must make: one that failed on a rank alone is named at its next call."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shoal.base.errors import ConfigError
from shoal.trainer.guards import call_log
from shoal.trainer.guards.call_log import CollectiveCallLog


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> list[CollectiveCallLog]:
    """The meetings of two ranks, which count in one store."""
    monkeypatch.setattr(call_log, "GATHER_S", 0.5)
    monkeypatch.setattr(call_log.phases, "page", None)  # that of a run before
    monkeypatch.setattr(call_log, "_made", iter([0, 0]))
    store = dist.HashStore()
    made = [
        CollectiveCallLog(SimpleNamespace(rank=rank, size=2, ranks=(0, 1), group=None), store)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    for one in made:
        one.open_run()
    return made


def fails(meeting: CollectiveCallLog) -> None:
    with pytest.raises(RuntimeError, match="a loss"), meeting.at("run.step"):
        raise RuntimeError("a loss that one rank cannot have")


def test_an_error_that_one_rank_swallows_is_named_at_its_next_call(
    both: list[CollectiveCallLog],
) -> None:
    fails(both[1])
    for _ in range(2):  # who catches that too hears it again
        with pytest.raises(ConfigError) as caught, both[1].at("run.step"):
            pass
    assert str(caught.value) == (
        "rank 1 caught an error of run.step (RuntimeError: a loss that one rank cannot have) and goes "
        "on, and other ranks had none; try: let the error end the process, or catch it on every rank"
    )


def test_an_error_of_all_ranks_may_be_caught(both: list[CollectiveCallLog]) -> None:
    fails(both[0])
    late = threading.Timer(0.1, fails, [both[1]])
    late.start()
    with both[0].at("run.step"):
        pass
    late.join()
    with both[1].at("run.step"):
        pass


def test_an_error_on_its_way_up_stays_what_it_is(both: list[CollectiveCallLog]) -> None:
    def script() -> Any:
        try:
            with both[0].at("run.step"):
                raise RuntimeError("a loss")
        finally:
            with both[0].at("run.close"):
                pass

    with pytest.raises(RuntimeError, match="a loss"):
        script()


def test_an_error_caught_before_the_close_is_named(both: list[CollectiveCallLog]) -> None:
    fails(both[0])
    with (
        pytest.raises(ConfigError, match="rank 0 caught an error of run.step"),
        both[0].at("run.close"),
    ):
        pass
