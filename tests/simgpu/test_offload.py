"""Offload on a simulated device: the bits of a run without, whatever the schedule, in less memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proof_rows import rows

FORMATS: tuple[dict[str, Any], ...] = (
    {"precision": "fp64", "micro_batch": 1, "model": {"dim": 256, "layers": 3}},
    {"precision": "bf16", "recompute": "full", "model": {"dim": 384, "layers": 2}},
)
"""Wide enough for moments of 1 MiB, which is what leaves."""

LIMIT_BYTES = 2**28
"""Of a device so small a step goes through 4 MiB of parameters at a time."""

POLICIES = ("optimizer", "parameters", "activations")
SCHEDULES = (("lazy", 0), ("drawn", 0))
ROWS = rows([("fp64", "bf16"), SCHEDULES], kept=[("fp64", ("lazy", 0)), ("bf16", ("drawn", 0))])
"""Clocks know a missing wait in any schedule: of the four, two."""

Told = dict[str, Any]


def train(forks: Any, asked: list[dict[str, Any]]) -> list[Told]:
    done = forks.run("offload_case.py", json.dumps(asked))
    assert done.returncode == 0, done.stderr[-3000:]
    told: list[Told] = json.loads(done.stdout.splitlines()[-1])
    return told


def numbers(told: Told) -> dict[str, Any]:
    return {name: told[name] for name in ("losses", "norms", "weights")}


@pytest.mark.parametrize(("precision", "schedule"), ROWS)
def test_what_waits_on_the_host_changes_no_bit(
    forks: Any, precision: str, schedule: tuple[str, int]
) -> None:
    """Losses, clipped norms and weights, under schedules that run as late as they may, or drawn."""
    (form,) = [one for one in FORMATS if one["precision"] == precision]
    plain = {**form, "offload": "none", "mode": "eager", "seed": 0, "limit_bytes": LIMIT_BYTES}
    later = {"mode": schedule[0], "seed": schedule[1]}
    asked = [plain, *({**plain, "offload": policy, **later} for policy in POLICIES)]
    first, *others = train(forks, asked)
    for told, one in zip(others, asked[1:], strict=True):
        assert numbers(told) == numbers(first), one
    peaks = {
        one["offload"]: told["peak_bytes"] for told, one in zip(others, asked[1:], strict=True)
    }
    assert peaks["parameters"] < peaks["optimizer"] < first["peak_bytes"]


def test_a_run_ends_where_the_optimizers_state_has_no_room(forks: Any) -> None:
    """`run.close` gives it back to the device, which was short of it."""
    whole = {
        "offload": "none", "precision": "fp32", "mode": "eager", "seed": 0, "limit_bytes": 2**32,
        "model": {"dim": 512, "layers": 4}, "rows": 2, "micro_batch": 1,
    }  # fmt: skip
    short = {**whole, "offload": "optimizer", "limit_bytes": 184 * 2**20}
    ours, plain = train(forks, [short, whole])
    assert plain["peak_bytes"] > ours["peak_bytes"]
    assert numbers(ours) == numbers(plain)


CARD_BYTES = 24 * 2**30


@pytest.mark.proof
def test_a_hundredth_of_a_13b_runs_in_a_hundredth_of_24_gib(forks: Any) -> None:
    """The setting that `shoal plan` proposes for llama-2-13b on one card of 24 GiB."""
    asked = {
        "offload": "parameters", "precision": "bf16", "recompute": "full", "mode": "drawn",
        "seed": 0, "model": {"dim": 512, "layers": 44}, "rows": 1, "micro_batch": 1,
        "limit_bytes": CARD_BYTES // 100,
    }  # fmt: skip
    whole = {**asked, "offload": "none", "limit_bytes": 2**32}
    ours, plain = train(forks, [asked, whole])
    assert ours["parameters"] >= 130_000_000
    assert ours["peak_bytes"] <= CARD_BYTES // 100 < plain["peak_bytes"] // 10
    assert numbers(ours) == numbers(plain)
