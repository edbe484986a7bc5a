"""DeepSpeed's learning-rate schedules: its curves to the bit, with the interface of torch's.

A schedule maps a group's own rate and k, the calls of `step` less one, to the group's rate. The
engine calls it after every update that was not skipped: update 1 runs at k = −1, update 2 at 0.
With N steps of warm-up, at least 2, and T in all:

    WarmupLR        lo + (hi − lo)·γ, γ = ln(k+1) / ln N (or linear: k / N), then hi
    WarmupDecayLR   the same, then γ = (T − k) / (T − N) down to 0
    WarmupCosineLR  the group's own rate times such a γ, then half a cosine to cos_min_ratio
    OneCycle        from lo to hi and back, momentum the other way; then lo / (1 + decay)
    LRRangeTest     lo · (1 + step_rate · (k+1) / step_size)

Surprising, and kept: γ is 0 at k = −1 and 0, so the first two updates run at `lo`, usually
0. WarmupDecayLR's default hi is 0.001, WarmupLR's the optimizer's own. WarmupCosineLR
never reaches its peak: the first k after its warm-up is one step down. OneCycle makes the second
beta 0.99. Source: deepspeed/runtime/lr_schedules.py, whose curves are the same in 0.19.4 to 0.19.8;
arguments and defaults stand in deepspeed_keys.txt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal.base.errors import ConfigError

Arguments = Mapping[str, Any]


def warmup_lr(own: Any, k: int, args: Arguments) -> Any:
    """Return the learning rate at k under WarmupLR.

    >>> args = {"warmup_min_lr": 0.0, "warmup_max_lr": None}
    >>> args |= {"warmup_num_steps": 4, "warmup_type": "log"}
    >>> [round(warmup_lr(1.0, k, args), 4) for k in range(-1, 5)]
    [0.0, 0.0, 0.5, 0.7925, 1.0, 1.0]
    """
    high, low = args["warmup_max_lr"], args["warmup_min_lr"]
    done = _warmup_share(k, args)
    span = (own if high is None else high) - low
    return low if k < 0 else low + span * (1.0 if done is None else done)


def warmup_decay_lr(own: Any, k: int, args: Arguments) -> Any:
    """Return the learning rate at k under WarmupDecayLR."""
    done, steps = _warmup_share(k, args), args["total_num_steps"]
    if done is None:
        falling = float(max(1.0, steps - max(2, args["warmup_num_steps"])))
        done = max(0.0, float(steps - k) / falling)
    low = args["warmup_min_lr"]
    return low if k < 0 else low + (args["warmup_max_lr"] - low) * done


def warmup_cosine_lr(own: Any, k: int, args: Arguments) -> Any:
    """Return the learning rate at k under WarmupCosineLR."""
    done, rise = _warmup_share(k, args), max(2, args["warmup_num_steps"])
    if k < 0:
        return 0.0
    if done is not None:
        low = args["warmup_min_ratio"]
        return own * (low + done * (1.0 - low))
    low = args["cos_min_ratio"]
    fallen = min(1.0, (k - rise + 1) / max(1, args["total_num_steps"] - rise))
    return own * max(0.0, low + (1.0 - low) * ((1 + math.cos(math.pi * fallen)) / 2))


def lr_range_test(own: Any, k: int, args: Arguments) -> Any:
    """Return the learning rate at k under LRRangeTest."""
    low, done = args["lr_range_test_min_lr"], float(k + 1) / args["lr_range_test_step_size"]
    if args["lr_range_test_staircase"]:
        done = math.floor(done)
    return low * (1 + args["lr_range_test_step_rate"] * done) if k >= 0 else low


def one_cycle(own: Any, k: int, args: Arguments, what: str = "lr") -> Any:
    """Return the rate at k under OneCycle; what = "mom": the first beta, which moves inversely."""
    first, second = float(args["cycle_first_step_size"]), args["cycle_second_step_size"]
    second = first if second is None else float(second)
    if first <= 0 or second < 0:
        raise ConfigError(f"cycle_first_step_size = {first}: a number above 0 is wanted")
    low, high, rate = (
        args[f"cycle_min_{what}"],
        args[f"cycle_max_{what}"],
        args[f"decay_{what}_rate"],
    )
    momentum, whole, size = what == "mom", first + second, args["decay_step_size"]
    if k < 0:
        return low
    if k < whole:
        height = (high - low) * _cycle_share(k + 1, first, second, args)
        return high - height if momentum else low + height
    if math.isclose(size, 0) or math.isclose(rate, 0):
        return high if momentum else low
    factor = 1 + rate * ((k - whole + 1) / size)
    return high * factor if momentum else low / factor


def _warmup_share(k: int, args: Arguments) -> float | None:
    """Return the completed share of a warm-up at k; None after it."""
    steps, kind = max(2, args["warmup_num_steps"]), args["warmup_type"]
    if kind not in ("log", "linear"):
        raise ConfigError(f"warmup_type = {kind}: not one of log, linear; try: log")
    if k < 0 or k >= steps:
        return 0.0 if k < 0 else None
    return 1.0 / math.log(steps) * math.log(k + 1) if kind == "log" else k / steps


def _cycle_share(now: int, first: float, second: float, args: Arguments) -> float:
    """Return the share of the way up at one batch of a cycle, in stairs if configured."""
    whole, bend = first + second, first / (first + second)
    x = 1.0 + now / whole - math.floor(1 + now / whole)
    count, down = args["cycle_first_stair_count"], args["cycle_second_stair_count"]
    if x > bend and down is not None:
        count = down
    if count <= 0:
        return x / bend if x <= bend else (x - 1) / (bend - 1)
    place = now % whole
    stairs = place * count / first if place <= first else (whole - place) * count / second
    return math.floor(stairs) / count


SCHEDULES: Mapping[str, Callable[[Any, int, Arguments], Any]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "OneCycle": one_cycle,
    "LRRangeTest": lr_range_test,
}


class DeepSpeedSchedule:
    """A schedule of DeepSpeed's on an optimizer: `step`, `get_last_lr`, `state_dict`, as torch's.

    The constructor sets the groups' rates (and betas, under OneCycle) for update 1.

    Args:
        optimizer: any object with `param_groups` and `defaults`.
        name: of SCHEDULES.
        args: all its arguments, as `Settings.scheduler_args` has them; a list has one value for
            each group.

    Raises:
        ConfigError: a list has another number of values.
    """

    def __init__(self, optimizer: Any, name: str, args: Arguments) -> None:
        groups = optimizer.param_groups
        for key, value in args.items():
            if isinstance(value, list | tuple) and len(value) != len(groups):
                raise ConfigError(f"scheduler.params.{key} = {value}: {len(groups)} are wanted")
        self.optimizer, self._curve, self._args = optimizer, SCHEDULES[name], args
        self._own = [group["lr"] * 1.0 for group in groups]  # a tensor is copied
        cycles = name == "OneCycle" and args["cycle_momentum"]
        self._cycles_betas = cycles and "betas" in optimizer.defaults
        self.last_batch_iteration = -1
        self.step(-1)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next update, or of the one after `last_batch_iteration`."""
        k = last_batch_iteration
        self.last_batch_iteration = self.last_batch_iteration + 1 if k is None else k
        groups = self.optimizer.param_groups
        for place, (group, rate) in enumerate(zip(groups, self.get_lr(), strict=True)):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            if self._cycles_betas:
                first = one_cycle(0.0, self.last_batch_iteration, self._of(place), "mom")
                group["betas"] = (first, 0.99)
        self._last = [group["lr"] for group in groups]

    def get_lr(self) -> list[Any]:
        """Compute the rates, one for each parameter group."""
        own = enumerate(self._own)
        return [self._curve(one, self.last_batch_iteration, self._of(place)) for place, one in own]

    def get_last_lr(self) -> list[Any]:
        """Return the rates that were set last."""
        return self._last

    def state_dict(self) -> dict[str, int]:
        """Return the state that `load_state_dict` takes."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a state; the current rates are the optimizer's until the next `step`."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _of(self, place: int) -> Arguments:
        many = self._args.items()
        return {key: v[place] if isinstance(v, list | tuple) else v for key, v in many}
