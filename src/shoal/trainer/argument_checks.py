"""Validate the arguments of `shoal.parallelize`; each error is one line with a suggestion.

    an unknown name                  lr=…            → the argument, or the call, that takes it
    a word outside a list            precision="fp8" → the nearest word
    a number out of range            clip=-1         → the nearest valid one

config/load.py checks the keys of the same names in run.toml, by their lists.
"""

from __future__ import annotations

import inspect
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shoal.base.errors import ConfigError, nearest_word, shorten
from shoal.base.layouts.layout import AXES, Layout
from shoal.base.layouts.policies import POLICIES, OptimizerPolicy, check_value, lists_as_tuples
from shoal.base.plans.plan import Plan
from shoal.fabric import World
from shoal.fabric.device import size_of_group
from shoal.fabric.rendezvous.process_info import read_process_info

DEFAULT_BATCH = 32
"""Samples per step if no argument sets them."""

COUNTS: Mapping[str, int] = {"batch": DEFAULT_BATCH, "micro_batch": 4}
"""Integers that may be None, and the value that an error suggests instead of an invalid one."""

OF_THE_OPTIMIZER = "torch.optim.AdamW(model.parameters(), lr=…) as the optimizer"

LEAVE_OUT = "leave it out"

ELSEWHERE = {
    **dict.fromkeys(("batch_size", "train_batch_size", "global_batch_size"), "batch"),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size"), "micro_batch"),
    **dict.fromkeys(
        ("lr", "learning_rate", "weight_decay", "betas", "momentum", "optim"), OF_THE_OPTIMIZER
    ),
    **dict.fromkeys(
        ("epochs", "num_epochs", "max_epochs", "num_train_epochs"), "for epoch in run.epochs(…)"
    ),
    **dict.fromkeys(
        ("num_workers", "workers", "shuffle", "collate_fn", "collate", "drop_last", "dataset",
         "data", "dataloader", "train_dataset", "train_loader", "sampler"),
        "run.loader(dataset, …)",
    ),
    **dict.fromkeys(
        ("eval_dataset", "val_loader", "validation", "eval_loader"), "run.evaluate(dataset)"
    ),
    **dict.fromkeys(("steps", "max_steps"), "total_steps, for a schedule; the loop is yours"),
    **dict.fromkeys(
        ("max_grad_norm", "gradient_clipping", "grad_clip", "clip_norm", "clip_grad_norm",
         "clip_grad", "gradient_clip_val", "max_norm"),
        "clip",
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum",
         "accumulation_steps", "accumulate"),
        "batch and micro_batch",
    ),
    **dict.fromkeys(
        ("mixed_precision", "dtype", "fp16", "bf16", "amp", "autocast", "half", "torch_dtype"),
        "precision",
    ),
    **dict.fromkeys(
        ("strategy", "parallel", "parallelism", "ddp", "fsdp", "zero", "tp", "pp",
         "tensor_parallel", "pipeline_parallel", "sharding", "mesh", "device_mesh"),
        'layout="fsdp", or layout={"tp": 2, "dp_shard": 2}',
    ),
    **dict.fromkeys(("criterion", "loss_fn", "loss_function", "objective"), "loss"),
    **dict.fromkeys(("ema", "ema_decay", "swa", "moving_average"), "average=0.999"),
    **dict.fromkeys(
        ("scheduler", "lr_scheduler", "lr_schedule"),
        "set the rate in the loop, or schedule=shoal.OptimizerPolicy(…) with total_steps",
    ),
    "warmup_steps": "schedule=shoal.OptimizerPolicy(schedule=…, warmup_steps=…) with total_steps",
    **dict.fromkeys(
        ("world_size", "nproc", "num_processes", "processes", "gpus", "num_gpus", "devices",
         "num_nodes", "nodes", "rank", "local_rank"),
        "torchrun --nproc-per-node N, which says how many processes there are",
    ),
    **dict.fromkeys(
        ("device", "backend", "accelerator"),
        f"{LEAVE_OUT}: a run uses the accelerator that is visible, else the CPU",
    ),
    **dict.fromkeys(
        ("checkpoint", "checkpoint_dir", "output_dir", "save_dir", "log_dir", "run_dir", "path",
         "logging_dir", "save_path", "ckpt", "ckpt_path", "checkpoint_path"),
        'folder="runs/x", then run.save() and run.restore()',
    ),
    **dict.fromkeys(
        ("resume", "resume_from_checkpoint", "resume_from", "load", "restore"),
        'run.restore(), with folder="runs/x"',
    ),
    **dict.fromkeys(
        ("save_every", "save_steps", "save_interval", "save_total_limit", "checkpoint_every"),
        "run.save() in the loop; keep=N keeps the newest N",
    ),
    **dict.fromkeys(
        ("wandb", "tensorboard", "logger", "loggers", "callbacks", "callback", "log", "report_to",
         "log_with", "tracker"),
        "run.add_callback(function), which gets each step's numbers",
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "checkpoint_activations",
         "remat"),
        "recompute",
    ),
    **dict.fromkeys(("cpu_offload", "offload_optimizer", "offload_params"), "offload"),
    **dict.fromkeys(("random_seed", "manual_seed", "seed_everything"), "seed"),
    **dict.fromkeys(("torch_compile", "compile_model", "jit"), "compile"),
    **dict.fromkeys(
        ("find_unused_parameters", "static_graph"), f"{LEAVE_OUT}: a run does this by itself"
    ),
    **dict.fromkeys(("sync_bn", "sync_batchnorm", "convert_sync_batchnorm"), "sync_batch_norm"),
    **dict.fromkeys(("net", "module", "network"), "model"),
}  # fmt: skip
"""Names that other libraries use for these arguments, or for settings that another call takes."""


OF_A_LOADER = {
    **dict.fromkeys(("batch_size", "batch"), "shoal.parallelize(…, batch=…)"),
    "num_workers": "workers",
    "collate_fn": "collate",
    **dict.fromkeys(("shuffle", "sampler", "generator"), f"{LEAVE_OUT}: the order is drawn "
                    "anew every epoch, by the seed of shoal.parallelize"),
    "drop_last": f"{LEAVE_OUT}: nothing is dropped, the last step weighs by its own count",
}  # fmt: skip
"""Arguments of a DataLoader, and how the user sets each of them in Shoal."""


NO_ARGUMENT = ("self", "unknown", "policies")
"""Parameters of a signature that no caller passes by name."""


def refuse_unknown(
    function: Callable[..., Any], unknown: Iterable[str], elsewhere: Mapping[str, str]
) -> None:
    """Raise ConfigError for an unknown keyword argument, with the nearest known one.

    Args:
        function: the function or `Run` method that was called.
        unknown: names of the unknown arguments.
        elsewhere: name in other libraries → the argument or call that Shoal has for it.

    Raises:
        ConfigError: `unknown` is not empty.
    """
    names = [name for name in inspect.signature(function).parameters if name not in NO_ARGUMENT]
    if function.__name__ in ("parallelize", "plan"):
        where, names = f"shoal.{function.__name__}", list(dict.fromkeys([*names, *POLICIES]))
    else:
        where = f"run.{function.__name__}"
    for name in unknown:
        close = elsewhere.get(name) or nearest_word(name, names)
        hint = f"try: {close}" if close else f"there are {', '.join(names)}"
        hint = close if close and close.startswith(LEAVE_OUT) else hint
        raise ConfigError(f"{where} has no argument {name}; {hint}")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an invalid argument of `parallelize`, with the nearest valid one.

    Args:
        given: the arguments of `parallelize` by name; unknown names are ignored here.

    Raises:
        ConfigError: a word or a number is invalid.
    """
    check_layout(given["layout"])
    if given["loss"] is not None and not callable(given["loss"]):
        wanted = "a function (outputs, targets) → (sum, count) or unreduced values"
        _refuse("loss", given["loss"], wanted, 'torch.nn.CrossEntropyLoss(reduction="none")')
    for name, usual in COUNTS.items():
        if given[name] is not None:
            check_integer(name, given[name], 1, usual)
    check_integer("total_steps", given["total_steps"], 0, 0)
    if not isinstance(given["coupled"], bool):
        _refuse("coupled", given["coupled"], "True or False", True)
    if not isinstance(given["metrics"], Mapping | None):
        named = "a dict of name → function (outputs, targets) → (sum, count)"
        _refuse("metrics", given["metrics"], named, '{"accuracy": accuracy}')
    if not isinstance(given["folder"], str | os.PathLike | None):
        _refuse("folder", given["folder"], "a path", '"runs/x"')
    if not isinstance(given["schedule"], OptimizerPolicy | None):
        usual_line = 'shoal.OptimizerPolicy(schedule="cosine") with total_steps'
        _refuse("schedule", given["schedule"], "an OptimizerPolicy, or None", usual_line)


def wants_proof(prove: str, world: World | None) -> bool:
    """Return whether a run is to be proven at its first batch: one of several processes.

    SHOAL_PROVE=off in the environment switches the proof off for a whole script.

    Args:
        prove, world: of `parallelize`. An unknown word counts as "auto"; the proof refuses it.
    """
    if "off" in (prove, os.environ.get("SHOAL_PROVE")):
        return False
    size = (
        world.size if world is not None else size_of_group() or read_process_info(os.environ).size
    )
    return prove != "auto" or size > 1


def plan_from_arguments(precision: str, policies: Mapping[str, Any]) -> Plan:
    """Build the plan of keyword arguments, without its layout.

    Raises:
        ConfigError: a value is invalid.
    """
    names = {} if "compute" in policies else {"compute": "precision"}
    told = {"compute": precision, **policies}
    plan = Plan(Layout(), **lists_as_tuples(told))
    check_policies(plan, names)
    return plan


def check_policies(plan: Plan, names: Mapping[str, str]) -> None:
    """Raise ConfigError for an invalid policy value, with the nearest valid one.

    Args:
        plan: the plan to check.
        names: key → the argument that set it, where their names differ.

    Raises:
        ConfigError: a value is out of its range or has another type.
    """
    for key, declared in POLICIES.items():
        name, value = names.get(key, key), getattr(plan, key)
        kind, said = type(declared.default), declared.metadata
        if kind is int:
            check_integer(name, value, said["least"], said["usual"])
        elif kind is float and not _is_number(value, numbers.Real):
            _refuse(name, value, f"a number of at least {said['least']}", said["usual"])
        elif kind is bool and not isinstance(value, bool):
            _refuse(name, value, "True or False", declared.default)
        check_value(name, declared, value)
    plan.check_residual("residual", names.get("compute", "compute"), '"bf16"')
    plan.check_loss_scale("loss_scale", names.get("compute", "compute"), '"fp16"')


def check_integer(name: str, value: Any, least: int, usual: int) -> None:
    """Raise ConfigError unless a value is an integer of at least `least`."""
    if not _is_number(value, numbers.Integral) or value < least:
        _refuse(name, value, f"a whole number of at least {least}", usual)


def check_layout(layout: Any) -> None:
    """Raise ConfigError unless a layout is a strategy name or a mapping of degrees."""
    if not isinstance(layout, str | Mapping):
        near = '"auto"' if layout is None else '{"tp": 2}'
        _refuse("layout", layout, "the name of a layout, or its degrees,", near)
    if isinstance(layout, Mapping):
        for axis in (*AXES, "ep"):
            if not _is_number(layout.get(axis, 1), numbers.Integral):
                _refuse(f"layout.{axis}", layout[axis], "a whole number", 2)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _refuse(name: str, value: Any, wanted: str, usual: object) -> None:
    """Raise ConfigError with the value as code writes it, and its type if it is no number.

    >>> _refuse("clip", "1.0", "a number of at least 0", 1.0)
    Traceback (most recent call last):
    shoal.base.errors.ConfigError: clip = '1.0': a number of at least 0 is wanted, got str; \
try: clip=1.0
    """
    plain = value is None or isinstance(value, bool | int | float)
    got = "" if plain else f", got {type(value).__name__}"
    raise ConfigError(
        f"{name} = {shorten(repr(value))}: {wanted} is wanted{got}; try: {name}={usual}"
    )
