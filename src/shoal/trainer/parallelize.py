"""From a plain module to a run: decide the layout, build the plan, compose the program.

The same function serves the main job and the user's own loop, alone, under torchrun and under
Slurm: which processes there are is found in the environment.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from shoal.base.batches import check_batch, default_micro_batch
from shoal.base.errors import ConfigError, ShoalError, UserError
from shoal.base.facts import MachineFacts, usable_cores
from shoal.base.frames import user_place
from shoal.base.layout import Layout
from shoal.base.phases import phase
from shoal.base.plan import Plan
from shoal.base.policies import OptimizerPolicy, TensorPolicy, check_compress
from shoal.base.systems import untried
from shoal.data.fetch import kept_draws, seed_draws
from shoal.fabric import World, start_world
from shoal.models.loss import token_loss
from shoal.optim.build import rebind
from shoal.parallel import precision as formats
from shoal.parallel.compose import compose, divide, facts
from shoal.parallel.program import Program, trainable
from shoal.planner.buckets import plan_buckets
from shoal.planner.guide import check_micro_batches, choose_layout
from shoal.trainer.arguments import DEFAULT_BATCH, ELSEWHERE, check_arguments, refuse_unknown
from shoal.trainer.contract import Loss
from shoal.trainer.excepthook import install
from shoal.trainer.gradient_hooks import check_hooks, hooked
from shoal.trainer.hand_over import cut_for, hand_over
from shoal.trainer.look import divides, look_at
from shoal.trainer.module_guard import enter_run, ready, refuse_unlike
from shoal.trainer.record import Recorder
from shoal.trainer.run import Run
from shoal.trainer.settings import BuildOptimizer, RunSettings
from shoal.trainer.whole_state import give_masters


def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | BuildOptimizer,
    loss: Loss | None = None,
    layout: str | Mapping[str, Any] = "auto",
    *,
    batch: int | None = None,
    micro_batch: int | None = None,
    precision: str = "auto",
    reduce: str = "auto",
    loss_scale: float = 0.0,
    average: float = 0.0,
    clip: float = 0.0,
    seed: int = 0,
    call: str = "single",
    schedule: OptimizerPolicy | None = None,
    total_steps: int = 0,
    defer_sync: bool = False,
    recompute: str = "none",
    offload: str = "none",
    compress: str = "none",
    compile: str = "none",
    skip_limit: int = 5,
    sample: Any = None,
    folder: str | Path | None = None,
    keep: int = 2,
    world: World | None = None,
    **unknown: Any,
) -> Run:
    """Make a module train on every process that was started, computing what one process computes.

    model        an nn.Module, whose weights are kept as they are, or a function without arguments
                 that builds one (it is called under `torch.manual_seed(seed)`); what is wrapped in
                 DistributedDataParallel or DataParallel is taken out of it
    optimizer    any torch.optim optimizer over the model's parameters, or `params -> optimizer`
    loss         loss(outputs, targets) → (sum, count) or unreduced values; default: cross-entropy
                 on integer targets, ignoring −100
    layout       "auto", a strategy ("single", "dp", "ddp", "zero1", "zero2", "fsdp", "hsdp", "tp",
                 "pp", "cp", "3d", a pipeline's schedule), or degrees, say {"tp": 2, "dp_shard": 2},
                 with whatever else [layout] may say: zero, schedule, chunks, strict, split, …
    batch        samples per optimizer step over all ranks, for `run.loader`; default: 32, or 8
                 micro-batches if only `micro_batch` is given
    micro_batch  samples per forward pass on one rank; default: an eighth of `batch`, so that it
                 does not depend on the layout; a batch of your own is cut only if this is given
    precision    auto, fp64, fp32, bf16, fp16 · clip  largest gradient norm, 0 for none
    reduce       auto, fp32, bf16: the format in which gradients travel
    loss_scale   for fp16: a fixed scale; 0 follows overflows by itself
    average      decay of an average of the weights, which `evaluate` then uses; 0 for none
    call         "single": model(inputs) · "kwargs": model(**inputs)
    schedule     a learning-rate schedule over `total_steps`; without it, lr is yours
    defer_sync   zero2, fsdp: sum gradients once a step, not per micro-batch; costs a full gradient
    compress     what gradients travel as: none, int8, powersgd:RANK, topk:SHARE
    recompute    none, selective, full: activations of blocks computed twice
    compile      none, blocks: fused kernels for every block by torch.compile
    offload      none, optimizer, parameters, activations: kept in the host's memory (GPUs)
    sample       tp, pp, cp: a batch of a few samples, or a function that gives one; what the model
                 does with it tells how its layers can be split and where it can be cut
    skip_limit   non-finite steps in a row before TrainingError · folder  where events, metrics and
                 checkpoints go · keep  newest checkpoints that stay
    world        the processes, if `World`s are made by hand (tests); default: found by itself
    unknown      refused, with the argument that was meant
    Gives        a `Run`
    Errors       PlanError: layout and processes do not fit, ranks built different models, the
                 optimizer holds foreign parameters · CheckpointError: another process has the
                 folder · ConfigError: anything else that is not legal
    Source       design §5; the loss rule is design §6
    """
    world = _begin(world, unknown, locals())
    compute = formats.resolve(precision, world.device)
    with _light_build() if divides(layout) else nullcontext():
        module, said = ready(build_module(model, seed))
        module = formats.convert(module, compute)
    module = module.to(world.device)
    parameters = trainable(module)
    said += narrow_weights(parameters, compute)
    _refuse_untrainable(module, parameters, world)
    samples = batch or (8 * micro_batch if micro_batch else DEFAULT_BATCH)
    bound = rebind(optimizer, module, parameters)
    _agree(world, {"optimizer": settings_of(bound), "loss": _place_of(loss or token_loss)})
    plan = _plan(module, layout, world, samples, micro_batch, compute)
    travels = "" if reduce == "auto" or compute == "fp64" else reduce
    check_compress(compress, plan.layout.data_strategy, compute, travels)
    plan = replace(
        plan,
        defer_sync=defer_sync,
        reduce=travels,
        compress=compress,
        recompute=recompute,
        offload=offload,
        compile=compile,
    )
    hooks = hooked(parameters)
    program = divide(module, plan, world, look_at(sample, plan, world, call))
    _settle(module, plan.layout)
    program = replace(program, plan=replace(plan, buckets=plan_buckets(facts(program))))
    plan, notices = cut_for(bound, program)
    program = compose(replace(program, plan=plan), seed=seed)
    said += check_hooks(hooks, program)
    program.notices.extend(said + notices + [line for line in (untried(),) if line])
    hand_over(bound, parameters, program)
    program = enter_run(module, give_masters(program))
    program = _streaming(program, bound)
    recorder = Recorder(Path(folder) if folder is not None else None, world)
    if not module.training:  # from_pretrained gives models in evaluation mode
        module.train()
    settings = RunSettings(
        clip=clip,
        seed=seed,
        call=call,
        batch=batch or 0,
        skip_limit=skip_limit,
        keep=keep,
        schedule=schedule,
        total_steps=total_steps,
        cut_own_batches=micro_batch is not None,
        loss_scale=loss_scale,
        average=average,
    )
    run = Run(program, bound, loss or token_loss, settings, recorder)
    if recorder.folder is not None:
        from shoal.trainer.own_folder import own
        from shoal.trainer.state import model_parts

        run.lease = own(recorder.folder, world)
        run.saving.prepare()
        model_parts(run)  # refuses now what the first save could not write
    return run


def _light_build() -> AbstractContextManager[None]:
    from shoal.parallel.light_build import light_build

    return light_build()


def _settle(module: nn.Module, layout: Layout) -> None:
    """Give what is left of a lightly built module to the process's own memory."""
    if layout.tp * layout.pp > 1:
        from shoal.parallel.light_build import settle

        settle(module)


def _streaming(program: Program, optimizer: torch.optim.Optimizer) -> Program:
    """Keep the optimizer's state in the host's memory, if the plan says so."""
    if program.plan.offload != "optimizer":
        return program
    from shoal.parallel.offload import stream_state

    undo = stream_state(optimizer, program.world.device)
    return replace(program, on_close=(*program.on_close, undo))


def _begin(world: World | None, unknown: Mapping[str, Any], given: Mapping[str, Any]) -> World:
    """Meet the other processes, which must have been given the same arguments."""
    install()
    refuse_unknown(parallelize, unknown, ELSEWHERE)
    check_arguments(given)
    world = world or start_world()
    install().world = world
    _agree(world, {name: given[name] for name in COMPARED})
    return world


COMPARED = (
    "layout", "batch", "micro_batch", "precision", "reduce", "loss_scale", "average", "clip",
    "seed", "call", "schedule", "total_steps", "defer_sync", "recompute", "offload", "compress",
    "compile", "skip_limit",
)  # fmt: skip
"""Arguments that must be the same on every rank; those that are objects are compared elsewhere."""


def _agree(world: World, said: Mapping[str, Any]) -> None:
    """Errors: ConfigError, the same on all ranks, for an argument that differs between ranks."""
    told = world.gather_json({name: str(value) for name, value in said.items()})
    for rank, other in enumerate(told):
        for name, value in told[0].items():
            if other[name] != value:
                raise ConfigError(
                    f"shoal.parallelize: {name} is {value} on rank 0 and {other[name]} on rank "
                    f"{rank}; every rank must say the same, and run.loader deals the samples"
                )


@phase("build")
def build_module(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module itself, or what a builder gives under this seed; nobody's generators move."""
    if isinstance(model, nn.Module):
        return model
    with kept_draws():  # the builder's seed must not become the user's
        seed_draws(seed, "model")  # for those that draw from numpy or random
        torch.manual_seed(seed)
        try:
            built = model()
        except ShoalError:
            raise
        except Exception as error:
            where = user_place(error.__traceback__)
            told = UserError(
                f"model: the builder raised {type(error).__name__}: {error}"
                f"{f' ({where})' if where else ''}"
            )
            told.add_note("".join(traceback.format_exception(error)))
            raise told from error
    if not isinstance(built, nn.Module):
        raise ConfigError(f"model: the builder gave {type(built).__name__}, an nn.Module is wanted")
    return built


def settings_of(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class and the numbers of its groups."""
    groups = [
        {k: v for k, v in group.items() if isinstance(v, int | float | str | tuple)}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {groups}"


def _place_of(function: Any) -> str:
    """A function's name, file and line; of what is none, its class."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__name__
    return f"{function.__qualname__} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def narrow_weights(parameters: Mapping[str, nn.Parameter], compute: str) -> list[str]:
    """A line on weights that are too narrow to be stepped."""
    narrow = [n for n, p in parameters.items() if p.dtype in (torch.float16, torch.bfloat16)]
    if not narrow:
        return []
    kind = str(parameters[narrow[0]].dtype).removeprefix("torch.")
    products = compute if compute in ("bf16", "fp16") else "bf16"
    return [
        f"model: {len(narrow)} of {len(parameters)} trainable tensors are {kind}, first: "
        f"{narrow[0]}; updates smaller than their rounding are lost; nearest: model.float() "
        f'before, and precision="{products}" for products in that format'
    ]


def _refuse_untrainable(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], world: World
) -> None:
    refuse_unlike(module, world)
    if not parameters:
        raise ConfigError("model: no parameter requires a gradient, so there is nothing to train")
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ConfigError(
                f"model: {name or 'the embedding'} gives sparse gradients (sparse=True), which are "
                f"neither clipped nor summed over ranks; nearest: sparse=False"
            )


def _plan(
    module: nn.Module,
    layout: str | Mapping[str, Any],
    world: World,
    batch: int,
    micro_batch: int | None,
    compute: str,
) -> Plan:
    parameters = sum(p.numel() for p in trainable(module).values())
    machine = MachineFacts(
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=torch.cuda.device_count(),
    )
    said: dict[str, Any] = {"strategy": layout} if isinstance(layout, str) else dict(layout)
    named = {key: said.pop(key) for key in ("zero", "threads", "schedule", "chunks") if key in said}
    tensor = TensorPolicy(
        said.pop("strict", False),
        said.pop("sequence_parallel", "auto"),
        tuple(said.pop("split", ())),
        said.pop("context", "auto"),
    )
    strategy = said.pop("strategy", "dp" if named.get("threads") else "auto")
    chosen, why = choose_layout(strategy, said, world.size, parameters, machine, **named)
    tensor.check(chosen.tp, chosen.cp)
    micro = micro_batch or default_micro_batch(batch)
    accumulate = check_batch(batch, micro, chosen.data_degree, derived=not micro_batch)
    check_micro_batches(chosen, batch, micro)
    return Plan(chosen, why, batch, micro, accumulate, compute, parameters, tensor=tensor)
