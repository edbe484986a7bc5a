"""Turn a plain module into a run: decide the layout, build the plan, compose the program.

The same function serves the main job and the user's own loop, alone, under torchrun and under
Slurm: the environment says which processes there are.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal import __version__
from shoal.base.errors import ConfigError, ShoalError, UserError
from shoal.base.estimates.facts import read_machine_facts
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.policies import POLICIES, OptimizerPolicy
from shoal.base.operating_systems import untested_system_warning
from shoal.base.plans.batches import default_turn
from shoal.base.plans.plan import Plan
from shoal.base.text.units import count_text
from shoal.data.loading.sample_seeds import preserved_rng, seed_draws
from shoal.fabric import World, start_world
from shoal.fabric.collectives.json_messages import check_sums
from shoal.machine.process_memory import trim_heap
from shoal.optim.named_state import group_settings
from shoal.optim.optimizer_support import check_user_optimizer
from shoal.parallel import precision as formats
from shoal.parallel.compose import (
    SampleForward,
    materialise,
    offload_optimizer,
    place,
    prepare,
    wrap,
)
from shoal.parallel.program import trainable_parameters
from shoal.planning.gradient_buckets import plan_buckets
from shoal.planning.settle import (
    Words,
    layout_keys,
    leaves_layout_open,
    settle_batch,
    settle_plan,
    shards_model,
)
from shoal.trainer.argument_checks import (
    DEFAULT_BATCH,
    ELSEWHERE,
    check_arguments,
    plan_from_arguments,
    refuse_unknown,
    wants_proof,
)
from shoal.trainer.guards import reports
from shoal.trainer.guards.model_checks import (
    check_hooks,
    check_layers,
    list_hooked_weights,
    mark_in_run,
    refuse_unready,
    unlike_loss_notices,
)
from shoal.trainer.guards.optimizer_checks import ScheduleLength
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.process.excepthook import explain_refusals, install_excepthook, open_starts
from shoal.trainer.rebind_optimizer import plan_for_optimizer, shard_param_groups
from shoal.trainer.run import Run
from shoal.trainer.step.call_contract import (
    BuildOptimizer,
    Loss,
    Metric,
    default_loss,
    unwrap_model,
)
from shoal.wire.phases import phase

if TYPE_CHECKING:
    from shoal.trainer.autotune.share_fits import MicroBatchChooser
    from shoal.trainer.guards.tokenizer_match import TokenizerCheck


@explain_refusals
def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | BuildOptimizer,
    loss: Loss | None = None,
    layout: Words = "auto",
    *,
    plan: Plan | None = None,
    batch: int | None = None,
    micro_batch: int | None = None,
    precision: str = "auto",
    schedule: OptimizerPolicy | None = None,
    total_steps: int = 0,
    sample: Any = None,
    metrics: Mapping[str, Metric] | None = None,
    folder: str | Path | None = None,
    tokenizer: Any = None,
    world: World | None = None,
    prove: str = "auto",
    coupled: bool = False,
    **policies: Any,
) -> Run:
    """Prepare a model for training on all started processes; the result equals one process's.

    Args:
        model: an nn.Module, whose weights are kept, or a function without arguments that builds one
            (called under `torch.manual_seed(seed)`). A module inside DistributedDataParallel or
            DataParallel is taken out of it.
        optimizer: any torch.optim optimizer over the model's parameters, or `params -> optimizer`.
        loss: loss(outputs, targets) → (sum, count) or unreduced values; default: cross-entropy on
            integer targets, ignoring −100. (sum, count, {"ce": ce_sum, …}) reports its parts, as
            metrics.
        layout: "auto", a strategy, or degrees. "auto" is the planner's best layout if a `sample` is
            given and this machine was measured, else a rule by size. Strategies: "single", "dp",
            "ddp", "zero1", "zero2", "fsdp", "hsdp", "tp", "pp", "cp", "3d", a pipeline schedule.
            Degrees, say {"tp": 2, "dp_shard": 2}, may hold any other key of [layout]: zero,
            schedule, chunks, strict, split, blocks, …
        plan: one `shoal.Plan` in the place of all these words.
        batch: samples per optimizer step over all ranks, for `run.loader`; default: 32, or 8
            micro-batches if only `micro_batch` is given.
        micro_batch: samples per forward pass on one rank; default: a rank's whole share of `batch`,
            in a pipeline two passes for each stage. A batch of your own is split only if this is
            given.
        precision: auto, fp64, fp32, bf16, fp16: `compute` of [precision].
        schedule: a learning-rate schedule over `total_steps`; without it, you set the lr.
        total_steps: optimizer steps of the whole run, for `schedule`.
        sample: a batch of a few samples, or a function that returns one. Under tp, pp and cp the
            model runs it, which shows how its layers can be split and where it can be cut. Under
            fsdp it shows which blocks are called more than once.
        metrics: name → function(outputs, targets) with the same returns as a loss; each step's
            result has the means over all ranks.
        folder: folder for events, metrics and checkpoints.
        tokenizer: encoder of the data, of `tokenizers` or transformers
            (`open_data(…).tokenizer`). Every save keeps it in folder/hub, for `shoal checkpoint
            export` and `sample`.
        world: the processes, if tests make a `World` by hand; default: found in the environment.
        prove: "auto": on several processes, compare the layout with one process before the first
            step: two small steps in float64, on samples of the loader's dataset or of the first
            batch, once per model, loss, layout and versions. A difference raises a TrainingError.
            What takes more than 30 s or a quarter of the free memory is not proven, and a line
            says so. "off", or SHOAL_PROVE=off in the environment: not.
        coupled: the loss couples the samples of a micro-batch on purpose (a contrastive one), and
            no line says so.
        policies: every further key of a `shoal.Plan`, with its values in run.toml (docs of each:
            docs/reference/configuration.md): reduce, loss_scale, clip (here 0: none), average,
            seed, call, defer_sync, recompute, offload, compile, compress, skip_limit, keep, …

    Returns:
        A `Run`.

    Raises:
        PlanError: layout and processes do not fit, ranks built different models, or the optimizer
            holds parameters of another model.
        CheckpointError: another process uses the folder.
        ConfigError: any other invalid argument.

    References:
        design §5; the loss rule is design §6.
    """
    if wants_proof(prove, world):
        arguments = dict(locals())
        from shoal.trainer.first_batch_proof import parallelize_proven

        return parallelize_proven(parallelize, **arguments)
    install_excepthook()
    refuse_unknown(parallelize, policies.keys() - POLICIES.keys(), ELSEWHERE)
    check_arguments(locals())
    said: Words = layout
    if plan is not None:
        reports.start_report.refuse_plan_conflicts(
            plan, locals(), inspect.signature(parallelize).parameters
        )
        said, batch, micro_batch = layout_keys(plan.layout), plan.batch, plan.micro_batch
    else:
        plan = plan_from_arguments(precision, policies)
    if plan.trace or plan.remote or plan.statistics:
        from shoal.trainer.run_folder.folder_lease import check_folder_options

        check_folder_options(plan, folder)
    if metrics:
        from shoal.trainer.step.logged_values import check_metrics

        check_metrics(metrics, "shoal.parallelize")
    if tokenizer is not None:
        from shoal.trainer.run_folder.hub_files import check_tokenizer

        check_tokenizer(tokenizer)
    given = {"batch": batch, "micro_batch": micro_batch}
    run = start_run(
        model, optimizer, loss, replace(plan, batch=batch or 0, micro_batch=micro_batch or 0), said,
        given=[name for name, value in given.items() if value],
        length=ScheduleLength(schedule, total_steps), sample=sample,
        ranks_layouts=sample is not None,
        folder=Path(folder) if folder is not None else None, world=world,
    )  # fmt: skip
    install_excepthook().follow(run)
    run.metrics, run.coupled, run.guards.model.coupled = metrics or {}, coupled, coupled
    run.tokenizer = tokenizer
    if tokenizer is not None and run.tokenizer_check is not None:
        run.tokenizer_check.check_tokenizer(tokenizer)
    if world is None:
        _print_greeting(run, run.world.size > 1 and leaves_layout_open(plan, said))
    return run


def _print_greeting(run: Run, is_chosen: bool) -> None:
    """Print two lines about a run that starts: layout and batch, then why, or what is kept.

    Args:
        run: the run.
        is_chosen: Shoal chose the layout: the second line says why, and stays in events.jsonl.
    """
    folder = run.recorder.folder
    run.recorder.warn(f"{describe_run(run)}; run.loader gives {run.plan.arithmetic()}")
    if is_chosen:
        run.recorder.notice(run.plan.why)
    elif folder is not None:
        run.recorder.warn(f"{folder}: run.save() writes here, run.restore() resumes from here")
    else:
        run.recorder.warn(
            'no folder, so nothing is kept; try: shoal.parallelize(…, folder="runs/x")'
        )


def describe_run(run: Run) -> str:
    """Return version, layout, processes, parameters and format of a run, as part of a line."""
    plan, size = run.plan, run.world.size
    processes = f" on {size} processes" if size > 1 else ""
    parameters = f"{count_text(plan.parameters)} parameters in {plan.compute}"
    return f"{__version__}, {plan.layout.text()}{processes}, {parameters}"


def start_run(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | BuildOptimizer,
    loss: Loss | None,
    plan: Plan,
    said: Words | None,
    *,
    given: Collection[str],
    length: ScheduleLength,
    sample: Any = None,
    folder: Path | None = None,
    world: World | None = None,
    ranks_layouts: bool = False,
) -> Run:
    """Start a run under a plan, on every rank; both `parallelize` and `shoal train` call it.

    Args:
        model, optimizer, loss: as in `parallelize`.
        plan: settled, or with open fields if `said` is given.
        said: the layout in words, from which the plan is settled; None: it is settled.
        given: which of "batch" and "micro_batch" the user set. The run checks the user's own
            batches against them, and splits these batches; settling the plan ignores it.
        length: length of the run, and its learning-rate schedule.
        sample, folder, world: as in `parallelize`.
        ranks_layouts: the planner chooses an open layout by `sample`. False, one process, or a
            machine that was never measured: the layout is chosen by size.

    Raises:
        ShoalError: as in `parallelize`.
    """
    own, world = world is None, world or start_world()
    install_excepthook().world = world
    check_sums(world)
    beside = None
    if "SHOAL_STORE" not in os.environ and (world.size > 1 or folder is not None):
        from shoal.trainer.process.watchdog_client import start_watchdog

        beside = start_watchdog(world, folder, own=own)
    _check_equal_arguments(world, _compared_arguments(plan, said, length))
    plan = replace(plan, compute=formats.resolve_format(plan.compute, world.device))
    module, notices = _build_model(model, plan, said, world)
    loss = loss or default_loss(module)
    check_tokenizers = _prepare_tokenizer_check(module, plan)
    parameters = trainable_parameters(module)
    notices += narrow_weight_notices(parameters, plan.compute) + _auxiliary_loss_notices(
        module, loss
    )
    _refuse_untrainable(module, parameters, world)
    bound = check_user_optimizer(optimizer, module, parameters)
    _check_equal_arguments(world, {**describe_optimizer(bound), "loss": _describe_function(loss)})
    notices += unlike_loss_notices(world, loss, module, plan)
    unheld = _list_unheld_weights(module, parameters, bound)
    plan = _fill_batch_size(plan, parameters)
    share = None
    if said is not None:
        asked = sample if ranks_layouts else None
        plan, share = _choose_plan(module, bound, loss, plan, said, world, folder, sample=asked)
    hooks = list_hooked_weights(parameters)
    if not module.training:  # from_pretrained returns models in evaluation mode
        module.train()
    look = _make_sample_forward(sample, plan, world)
    program = prepare(module, plan, world)
    program, derived = place(program, None) if look is None else look.place(program)
    del look  # its samples are on the device
    trim_heap()  # passes over the whole model, and layers in float64, left free heap
    program = materialise(program, derived)
    _copy_mapped_tensors(module, plan.layout)
    buckets = plan_buckets(program.plan.placements, program.plan.layout, world.rank)
    program = program.but(buckets=buckets)
    plan, lines = plan_for_optimizer(bound, program)
    program = wrap(replace(program, plan=plan))
    notices += check_hooks(hooks, program)
    program.notices.extend(
        notices + lines + [line for line in (untested_system_warning(),) if line]
    )
    shard_param_groups(bound, parameters, program)
    del parameters, hooks  # under zero 3 the last reference to whole parameters deletes their files
    program = mark_in_run(module, program)
    program = offload_optimizer(program, bound)
    recorder = MetricsRecorder(folder, world, is_own_loop=bool(open_starts))
    ends: list[Callable[[], None]] = [] if beside is None else [beside.close]
    if (plan.trace or plan.remote) and folder is not None:
        from shoal.trainer.run_folder.folder_lease import start_folder_writers

        ends += start_folder_writers(plan, folder, recorder)
    program = replace(program, on_close=(*program.on_close, *ends))
    run = Run(program, bound, loss, recorder, length, given, unheld)
    if check_tokenizers is not None:
        run.tokenizer_check = check_tokenizers(recorder.notice)
        run.feed.check_dataset = run.tokenizer_check.check_dataset
    if share is not None:
        run.feed.choose = lambda *data: share().choose(run, *data)
    if beside is not None and own:  # `shoal train` does so with its first step
        beside.compare_collectives(world)
    if folder is not None:
        _attach_folder(folder, run, given)
    trim_heap()
    return run


def _prepare_tokenizer_check(
    module: nn.Module, plan: Plan
) -> Callable[[Callable[[str], None]], TokenizerCheck] | None:
    """Return the maker of the check of tokenizers, while the weights are whole; None without it."""
    if plan.guards == "off" or not any(isinstance(one, nn.Embedding) for one in module.modules()):
        return None
    from shoal.trainer.guards.tokenizer_match import TokenizerCheck, describe_vocabulary

    return functools.partial(TokenizerCheck, describe_vocabulary(module))


def _choose_plan(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    plan: Plan,
    said: Words,
    world: World,
    folder: Path | None,
    *,
    sample: Any,
) -> tuple[Plan, Callable[[], MicroBatchChooser] | None]:
    """Choose the layout of a plan that names it in words, and the micro-batch.

    Args:
        sample: as in `start_run`; None: the planner does not choose the layout.

    Returns:
        The plan, and a function that returns the check of its micro-batch for the first loader. It
        is None if the user set the micro-batch, an earlier start in the folder chose it, or it is
        an eighth of the batch at most.
    """
    chosen, kept = None, 0
    if sample is not None and world.size > 1 and leaves_layout_open(plan, said):
        from shoal.trainer.autotune.rank_layouts import choose_loop_layout

        chosen = choose_loop_layout(module, sample, loss, optimizer, plan, said, world)
    if not plan.micro_batch and folder is not None:
        from shoal.trainer.run_folder.resume_checks import read_saved_micro_batch

        kept = read_saved_micro_batch(folder, world)
    if kept and chosen:
        chosen = settle_batch(replace(chosen, micro_batch=0), kept)
    is_open = not (plan.micro_batch or kept or chosen)
    plan = chosen or settle_plan(
        plan, said, world.size, plan.parameters, read_machine_facts(), kept
    )
    if not is_open or plan.layout.pp > 1 or plan.micro_batch <= default_turn(plan.batch):
        return plan, None

    def make_chooser() -> MicroBatchChooser:
        from shoal.trainer.autotune.share_fits import MicroBatchChooser

        return MicroBatchChooser(module, optimizer, loss)

    if plan.layout.zero < 3 and not plan.layout.is_derived:
        return plan, make_chooser
    share = make_chooser()
    share.make_meta_copy()  # copy now: the module will be sharded
    return plan, lambda: share


def _fill_batch_size(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> Plan:
    """Fill in a missing batch size of a plan, and the number of trainable elements."""
    batch = plan.batch or (8 * plan.micro_batch if plan.micro_batch else DEFAULT_BATCH)
    return replace(plan, batch=batch, parameters=sum(p.numel() for p in parameters.values()))


def _auxiliary_loss_notices(module: nn.Module, loss: Loss) -> list[str]:
    """Return a notice about auxiliary losses of a transformers model that `loss` leaves out."""
    if "transformers" not in sys.modules:
        return []
    return reports.model_notices.auxiliary_loss_lines(module, loss)


def _list_unheld_weights(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[Collection[str], Collection[str]]:
    """Return names of trainable weights outside the optimizer, and of those that look forgotten."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    unheld = {name for name, p in parameters.items() if id(p) not in held}
    if not unheld:
        return (), ()
    return unheld, reports.model_notices.list_forgotten_weights(module, unheld)


def _attach_folder(folder: Path, run: Run, given: Collection[str]) -> None:
    """Attach the run to its folder: lease, folder guard, crash report, facts for checkpoints.

    Args:
        folder: the run folder.
        run: the run.
        given: which of "batch" and "micro_batch" the user set.
    """
    from shoal.trainer.run_folder.folder_lease import acquire_folder
    from shoal.trainer.run_folder.start_files import write_loop_plan, write_rank_list
    from shoal.trainer.state.replaced_folder import RunFolderGuard
    from shoal.trainer.state.run_state import collect_model_shards

    run.lease = acquire_folder(folder, run.world, run.recorder.notice)
    if run.recorder.owner is not None:
        run.recorder.owner.record_with_owner()
    run.guards.add(RunFolderGuard(run))
    install_excepthook().recorded = run.recorder, run.lease
    if beside := sys.modules.get("shoal.trainer.process.watchdog_client"):
        beside.report_own_disk(run.world)
    if run.world.ranks[0] == 0:  # else servers, whose workers are in the list too
        write_rank_list(folder, run.world, writes=run.world.writes_files)
    total = run.rate.length.total_steps
    write_loop_plan(run.plan, total, folder, run.world, knows_batch=bool(given))
    run.feed.on_first_open = lambda: write_loop_plan(run.plan, total, folder, run.world)
    run.checkpoint_saver.prepare()
    collect_model_shards(run)  # refuses now what the first save could not write
    from shoal.trainer.run_folder.resume_checks import CHOSEN, collect_run_facts

    run.extra_record[CHOSEN] = "micro_batch" not in given
    if run.world.is_first:
        run.extra_record |= collect_run_facts(run)


def _build_model(
    model: nn.Module | Callable[[], nn.Module], plan: Plan, said: Words | None, world: World
) -> tuple[nn.Module, list[str]]:
    """Build the module in its compute format; return (module, lines for the user).

    If ranks will hold only parts of the model, its builder runs once per machine.
    """
    lines: list[str] = []

    def build() -> nn.Module:
        if torch.get_default_device().type == "meta":  # another rank sends its weights
            from shoal.parallel.build.pretrained import pretrained_shapes

            with pretrained_shapes():
                module, lines[:] = unwrap_model(build_module(model, plan.seed))
        else:
            module, lines[:] = unwrap_model(build_module(model, plan.seed))
            refuse_unready(module)
        return formats.convert_weights(module, plan.compute)

    shares = shards_model(plan, said)
    if isinstance(model, nn.Module) or not (shares or plan.builds_in_files):
        return build(), lines
    if not shares:
        from shoal.parallel.build.mmap_init import mmap_init

        with mmap_init():
            return build(), lines
    from shoal.parallel.build.shared_build import build_once

    module, more = build_once(world, build)
    if "transformers" not in sys.modules:  # only transformers records a model's files
        return module, lines + more
    from shoal.parallel.build.pretrained import checkpoint_files_notice, checkpoint_folder

    return module, lines + more + checkpoint_files_notice(module, checkpoint_folder(module))


def _make_sample_forward(sample: Any, plan: Plan, world: World) -> SampleForward | None:
    """Return a forward pass on a few samples if a technique traces the model with it, else None.

    zero 3 works without a sample: it then assumes that each block is called once.
    """
    if not plan.layout.is_derived and (plan.layout.zero < 3 or sample is None):
        return None
    from shoal.trainer.autotune.sample_forward import build_sample_forward

    return build_sample_forward(sample, plan, world)


def _copy_mapped_tensors(module: nn.Module, layout: Layout) -> None:
    """Copy the module's memory-mapped tensors to the process's own memory.

    Layouts without tp, pp, ep and zero 3 need no copy. Under zero 3 parameters stay in their files
    until the rank reads its rows.
    """
    if layout.tp * layout.pp * layout.ep > 1 or layout.zero == 3:
        from shoal.parallel.build.mmap_init import copy_to_memory

        copy_to_memory(module.buffers())
        if layout.zero < 3 or layout.ep > 1:
            copy_to_memory(module.parameters())


def _compared_arguments(plan: Plan, said: Words | None, length: ScheduleLength) -> dict[str, Any]:
    """Return the values, by argument name, that must be equal on all ranks; objects come later."""
    told = {"precision": plan.compute, "batch": plan.batch, "micro_batch": plan.micro_batch}
    told |= {key: getattr(plan, key) for key in POLICIES if key != "compute"}
    layout = plan.layout.text() if said is None else said
    return {"layout": layout, **told, **vars(length)}


def _check_equal_arguments(world: World, said: Mapping[str, Any]) -> None:
    """Raise ConfigError, the same on all ranks, for an argument that differs between ranks."""
    unlike = world.find_differing_rank({name: str(value) for name, value in said.items()})
    if unlike is None:
        return
    rank, first, other = unlike
    for name, value in first.items():
        if other.get(name) != value:
            raise ConfigError(
                f"shoal.parallelize: {name} is {value} on rank 0 and {other.get(name)} on rank "
                f"{rank}; every rank must say the same, and run.loader deals the samples"
            )


@phase("build")
def build_module(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the module, or call its builder under a seed; restore the generators afterwards.

    Raises:
        ConfigError: the builder returned no module.
        UserError: the builder raised an exception.
    """
    if isinstance(model, nn.Module):
        return model
    with preserved_rng():  # the builder's seed must not become the user's
        seed_draws(seed, "model")  # for builders that draw from numpy or random
        torch.manual_seed(seed)
        try:
            built = model()
        except ShoalError:
            raise
        except Exception as error:
            from shoal.base.text.user_frames import (
                user_line,  # imported only for an error
            )

            where = user_line(error.__traceback__)
            told = UserError(
                f"model: the builder raised {type(error).__name__}: {error}"
                f"{f' ({where})' if where else ''}"
            )
            told.add_note("".join(traceback.format_exception(error)))
            raise told from error
    if not isinstance(built, nn.Module):
        raise ConfigError(f"model: the builder gave {type(built).__name__}, an nn.Module is wanted")
    return built


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the optimizer's class, and each setting of its groups, by what a message calls it."""
    settings = {
        f"optimizer group {number}: {key}": str(value)
        for number, group in enumerate(group_settings(optimizer))
        for key, value in group.items()
    }
    return {"optimizer": type(optimizer).__name__, **settings}


def _describe_function(function: Any) -> str:
    """Return a function's name, file and line; for another object, its class."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__name__
    return f"{function.__qualname__} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def narrow_weight_notices(parameters: Mapping[str, nn.Parameter], compute: str) -> list[str]:
    """Return a notice about weights whose dtype is too narrow for updates, if there are any."""
    narrow = [n for n, p in parameters.items() if p.dtype in (torch.float16, torch.bfloat16)]
    if not narrow:
        return []
    return [reports.model_notices.narrow_line(narrow, parameters, compute)]


def _refuse_untrainable(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], world: World
) -> None:
    check_layers(module, world)
    if not parameters:
        raise ConfigError("model: no parameter requires a gradient, so there is nothing to train")
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ConfigError(
                f"model: {name or 'the embedding'} gives sparse gradients (sparse=True), which are "
                f"neither clipped nor summed over ranks; try: sparse=False"
            )
