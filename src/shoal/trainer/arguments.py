"""Refuses arguments of `shoal.parallelize` that mean nothing, each in one line.

    a name that there is none of     lr=…            → the argument, or the place, that is meant
    a word outside a list            precision="fp8" → the nearest word
    a number that no run could have  clip=-1         → the nearest one

run.toml's keys of the same names are checked where they are read (config/load.py), by their lists.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shoal.base.errors import ConfigError, nearest, one_of, short
from shoal.base.layout import AXES
from shoal.base.policies import (
    COMPILE,
    OFFLOAD,
    OTHER_FORMATS,
    PRECISIONS,
    RECOMPUTE,
    REDUCTIONS,
    OptimizerPolicy,
)

WORDS: Mapping[str, tuple[str, ...]] = {
    "precision": PRECISIONS,
    "reduce": REDUCTIONS,
    "recompute": RECOMPUTE,
    "offload": OFFLOAD,
    "compile": COMPILE,
    "call": ("single", "kwargs"),
}
"""Arguments that are one of a few words."""

OTHER_WORDS: Mapping[str, Mapping[str, str]] = {
    "precision": {**OTHER_FORMATS, **{f"torch.{k}": v for k, v in OTHER_FORMATS.items()}},
    "reduce": {**OTHER_FORMATS, **{f"torch.{k}": v for k, v in OTHER_FORMATS.items()}},
    "recompute": {"true": "full", "false": "none"},
    "offload": {"true": "optimizer", "false": "none", "cpu": "optimizer"},
    "compile": {"true": "blocks", "false": "none"},
    "call": {"args": "single", "dict": "kwargs"},
}
"""What others say, or a switch where a word is wanted."""

DEFAULT_BATCH = 32
"""Samples per step where nobody says how many."""

COUNTS: Mapping[str, tuple[int, int]] = {
    "batch": (1, DEFAULT_BATCH),
    "micro_batch": (1, 4),
    "seed": (0, 0),
    "total_steps": (0, 0),
    "skip_limit": (1, 5),
    "keep": (1, 2),
}
"""Whole numbers: the least, and what is proposed in the place of one that means nothing."""

SIZES: Mapping[str, float] = {"clip": 1.0, "loss_scale": 0.0, "average": 0.999}
"""Numbers that are at least 0, which switches them off, and what is proposed."""

UNSAID = ("batch", "micro_batch")
"""Counts that may be None: found by the run."""

OF_THE_OPTIMIZER = "torch.optim.AdamW(model.parameters(), lr=…) as the optimizer"

ELSEWHERE = {
    "batch_size": "batch",
    "train_batch_size": "batch",
    **dict.fromkeys(("lr", "learning_rate", "weight_decay"), OF_THE_OPTIMIZER),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs"), "for epoch in run.epochs(…)"),
    **dict.fromkeys(("num_workers", "workers", "shuffle"), "run.loader(dataset, …)"),
    **dict.fromkeys(("steps", "max_steps"), "total_steps, for a schedule; the loop is yours"),
    **dict.fromkeys(("max_grad_norm", "gradient_clipping", "grad_clip", "clip_norm"), "clip"),
    "gradient_accumulation_steps": "batch and micro_batch",
    **dict.fromkeys(("mixed_precision", "dtype", "fp16", "bf16"), "precision"),
    "strategy": "layout",
}
"""Names that other libraries have for arguments, or for what is said elsewhere."""


OF_A_LOADER = {
    **dict.fromkeys(("batch_size", "batch"), "shoal.parallelize(…, batch=…)"),
    "num_workers": "workers",
    "collate_fn": "collate",
    **dict.fromkeys(("shuffle", "sampler", "generator"), "the order is drawn anew every epoch, by "
                    "the seed of shoal.parallelize"),
    "drop_last": "nothing is dropped: the last step is smaller, and weighed by its count",
}  # fmt: skip
"""What a DataLoader takes, and where it is said here."""


NO_ARGUMENT = ("self", "unknown")
"""Of a signature: what nobody gives by name."""


def refuse_unknown(
    function: Callable[..., Any], unknown: Iterable[str], elsewhere: Mapping[str, str]
) -> None:
    """Errors: ConfigError for an argument that there is none of, with the nearest."""
    names = [name for name in inspect.signature(function).parameters if name not in NO_ARGUMENT]
    where = (
        "shoal.parallelize" if function.__name__ == "parallelize" else f"run.{function.__name__}"
    )
    for name in unknown:
        close = elsewhere.get(name) or nearest(name, names)
        hint = f"nearest: {close}" if close else f"there are {', '.join(names)}"
        raise ConfigError(f"{where} has no argument {name}; {hint}")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Errors: ConfigError for a word or a number that means nothing, with the nearest.

    given   the arguments of `parallelize` by name; those of which nothing is known here pass
    """
    _check_layout(given["layout"])
    if given["loss"] is not None and not callable(given["loss"]):
        wanted = "a function (outputs, targets) → (sum, count) or unreduced values"
        _refuse("loss", given["loss"], wanted, 'torch.nn.CrossEntropyLoss(reduction="none")')
    for name, words in WORDS.items():
        if given[name] not in words:
            raise ConfigError(one_of(name, given[name], words, OTHER_WORDS[name]))
    for name, (least, usual) in COUNTS.items():
        value = given[name]
        if value is None and name in UNSAID:
            continue
        if not _is(value, numbers.Integral) or value < least:
            _refuse(name, value, f"a whole number of at least {least}", usual)
    for name, usual_size in SIZES.items():
        value = given[name]
        if not _is(value, numbers.Real) or not 0 <= value < math.inf:
            _refuse(name, value, "a number of at least 0", usual_size)
    if given["loss_scale"] and given["precision"] != "fp16":
        raise ConfigError(
            f"loss_scale = {given['loss_scale']}: only fp16 has a loss scale, precision = "
            f'{given["precision"]}; nearest: precision="fp16"'
        )
    if not isinstance(given["schedule"], OptimizerPolicy | None):
        usual_line = 'shoal.OptimizerPolicy(schedule="cosine") with total_steps'
        _refuse("schedule", given["schedule"], "an OptimizerPolicy, or None", usual_line)


def _check_layout(layout: Any) -> None:
    if not isinstance(layout, str | Mapping):
        near = '"auto"' if layout is None else '{"tp": 2}'
        _refuse("layout", layout, "the name of a layout, or its degrees,", near)
    if isinstance(layout, Mapping):
        for axis in (*AXES, "ep"):
            if not _is(layout.get(axis, 1), numbers.Integral):
                _refuse(f"layout.{axis}", layout[axis], "a whole number", 2)


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _refuse(name: str, value: Any, wanted: str, usual: object) -> None:
    raise ConfigError(f"{name} = {short(str(value))}: {wanted} is wanted; nearest: {name}={usual}")
