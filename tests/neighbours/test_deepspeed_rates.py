"""DeepSpeed's schedules, beside figures of its own functions: every update's rate, bit for bit.

`deepspeed_rates.json` holds what DeepSpeed 0.19.8's classes set on two parameter groups before each
of 14 updates, as hexadecimal floats.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.neighbours.configs.deepspeed_config import read
from shoal.neighbours.configs.deepspeed_rates import DeepSpeedSchedule

CASES = json.loads((Path(__file__).parent / "deepspeed_rates.json").read_text())["updates"]


def groups_of_two(rates: tuple[Any, Any] = (3e-4, 1e-3)) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.AdamW(groups)


def schedule_of(
    optimizer: Any, name: str, params: dict[str, Any], era: str = ""
) -> DeepSpeedSchedule:
    scheduler = {"type": name, "params": params}
    config = {"train_batch_size": 8, "gradient_clipping": 0, "scheduler": scheduler}
    found = read(config, data_parallel=1, era=era)
    return DeepSpeedSchedule(optimizer, found.scheduler, found.scheduler_args)


@pytest.mark.parametrize(("name", "params", "rows"), CASES)
def test_every_update_has_deepspeeds_rate(
    name: str, params: dict[str, Any], rows: list[list[Any]]
) -> None:
    optimizer = groups_of_two()
    schedule = schedule_of(optimizer, name, params)
    for row in rows:
        rates = [group["lr"].hex() for group in optimizer.param_groups]
        assert rates == row[:2]
        assert [rate.hex() for rate in schedule.get_last_lr()] == row[:2]
        if row[2:]:
            first, second = optimizer.param_groups[0]["betas"]
            assert [first.hex(), second] == row[2:]
        schedule.step()


@pytest.mark.parametrize(("name", "params", "rows"), [one for one in CASES if one[1]])
def test_goes_on_where_it_was(name: str, params: dict[str, Any], rows: list[list[Any]]) -> None:
    first = schedule_of(groups_of_two(), name, params)
    for _ in range(5):
        first.step()
    optimizer = groups_of_two()
    second = schedule_of(optimizer, name, params)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.step()
    assert [rate.hex() for rate in second.get_last_lr()] == rows[6][:2]


def test_rates_that_are_tensors() -> None:
    optimizer = groups_of_two((torch.tensor(3e-4), torch.tensor(1e-3)))
    tensors = [group["lr"] for group in optimizer.param_groups]
    schedule = schedule_of(
        optimizer, "WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 4}
    )
    schedule.step(500)
    assert [group["lr"] for group in optimizer.param_groups] == tensors
    assert tensors[1].item() == pytest.approx(1e-7)


def test_the_peak_of_earlier_versions() -> None:
    """Before 0.19.4 WarmupLR rose to 0.001, whatever the optimizer's rate."""
    for era, peak in {"": 3e-4, "0.19.4": 3e-4, "0.19.3": 0.001, "0.16.9": 0.001}.items():
        schedule = schedule_of(groups_of_two(), "WarmupLR", {"warmup_num_steps": 2}, era)
        schedule.step(7)
        assert schedule.get_last_lr()[0] == peak


@pytest.mark.parametrize(
    ("name", "params", "line"),
    [
        ("WarmupLr", {}, "try: WarmupLR"),
        ("WarmupLR", {"warmup_steps": 4}, "try: warmup_num_steps"),
        ("WarmupLR", {"warmup_num_steps": 0}, "from 1 on"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, "only the trainer"),
        ("WarmupLR", {"warmup_type": "cosine"}, "try: log"),
        ("WarmupDecayLR", {}, "total_num_steps is not said"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "cycle_max_lr is not said"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "above 0"),
        ("LRRangeTest", {"lr_range_test_step_size": 0.5}, "whole number from 1 on"),
    ],
)
def test_what_no_schedule_takes(name: str, params: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as failure:
        schedule_of(groups_of_two(), name, params)
    assert line in str(failure.value)


def test_a_value_for_each_group() -> None:
    with pytest.raises(ConfigError, match="2 are wanted"):
        schedule_of(groups_of_two(), "WarmupLR", {"warmup_min_lr": [0.0, 0.1, 0.2]})
