"""`dp` on several devices of one process computes what one process computes, under drawn schedules."""

from __future__ import annotations

import json
from typing import Any

import pytest

SAMPLE = ("cnn-2", "mlp-2", "gpt-4")
"""BatchNorm; a frozen weight, one that nothing and some that not all use; dropout and a tied head."""

WHOLE = [f"{case}-{size}" for case in ("mlp", "cnn", "llama", "gpt", "towers") for size in (2, 4)]


def passed(forks: Any, names: tuple[str, ...] | list[str], **settings: str) -> None:
    done = forks.run("replicas.py", *names, **settings)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["checks"] == list(names)
    assert not told["wrong"], "\n".join(f"{k}: {v}" for k, v in told["wrong"].items())


def test_devices_of_one_process_equal_one_device(forks: Any) -> None:
    passed(forks, SAMPLE)


def test_what_replicas_hand_on_follow_and_refuse(forks: Any) -> None:
    """A module of one's own: buffers, draws of the host, changes of a loop, memory and bytes."""
    done = forks.run("replicas.py")
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["checks"]) == 8
    assert not told["wrong"], "\n".join(f"{k}: {v}" for k, v in told["wrong"].items())


@pytest.mark.proof
@pytest.mark.parametrize("settings", [{"SIM_MODE": "lazy"}, {"SIM_MODE": "eager"}, *(
    {"SIM_SEED": str(seed)} for seed in range(20)
)], ids=str)  # fmt: skip
def test_every_case_under_every_schedule(forks: Any, settings: dict[str, str]) -> None:
    passed(forks, WHOLE, **settings)
