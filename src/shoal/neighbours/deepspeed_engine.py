"""DeepSpeed's engine over a run of Shoal: the same calls, the same numbers, Shoal's layouts.

    engine, optimizer, loader, scheduler = initialize(model=…, model_parameters=…, config=…)
    loss = engine(batch)         forward, on any layout
    engine.backward(loss)        1 / accumulation of it; gradients are means over ranks
    engine.step()                every `gradient_accumulation_steps`-th call updates

Accumulation spans epochs: a window that an epoch's end leaves open goes on in the next. Schedules
step once per update, and not where fp16 overflowed. Source: deepspeed/runtime/engine.py, 0.19.8.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.fabric import World, start_world
from shoal.neighbours import deepspeed_checkpoints as checkpoints
from shoal.neighbours import module_stand_in
from shoal.neighbours.batch_duplicates import EqualBatchesCheck
from shoal.neighbours.configs.deepspeed_config import DeepSpeedSettings, LossScaleSettings, read
from shoal.neighbours.configs.deepspeed_rates import SCHEDULES, DeepSpeedSchedule
from shoal.neighbours.library_loop import LibraryLoop, ModelWrapper, start_library_run
from shoal.neighbours.outputs import final_saves
from shoal.neighbours.outputs.deepspeed_monitors import start_monitors
from shoal.trainer.run import Run
from shoal.trainer.step import loss_scale
from shoal.trainer.step.optimizer_step import StepTotals, UpdateResult

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
"""Shoal's strategy by ZeRO's stage."""
TOLD = {
    "train_batch_size": "batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "accumulate",
    "zero_optimization_stage": "stage",
    "gradient_clipping": "clip",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "dataloader_drop_last": "drop_last",
    "scheduler_name": "scheduler",
    "optimizer_name": "optimizer",
}
"""Methods of an engine that return a setting."""
DEALS = (
    "initialize(training_data=dataset), or DataLoader(dataset, sampler=DistributedSampler(dataset))"
)
"""Samplers that give each rank samples of its own."""
OFFLOAD = '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}'
INSTEAD = {
    **dict.fromkeys(("offload_states", "reload_states"), OFFLOAD),
    **dict.fromkeys(("train_batch", "eval_batch"), "engine(batch), backward and step"),
    **dict.fromkeys(("set_train_batch_size", "set_train_micro_batch_size"), "another initialize"),
    "random_ltd_scheduler": "the model as it is, without data_efficiency",
}
"""Names that an engine lacks → the replacement to suggest."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, Any, Any, Any]:
    """Return (an engine of a model, its optimizer, a loader of `training_data`, a schedule).

    Args:
        optimizer, lr_scheduler: or functions that make them, in place of the configuration's.
        model_parameters: parameters of the configuration's optimizer; default: the trainable ones.

    Raises:
        ConfigError: as `read`; mpu and mesh_param, whose layouts Shoal derives itself.
    """
    if model is None:
        raise ConfigError("deepspeed.initialize: model is missing")
    for name, value in {"mpu": mpu, "mesh_param": mesh_param}.items():
        if value is not None:
            raise ConfigError(
                f"deepspeed.initialize: {name} lays ranks out by hand, which Shoal derives; "
                f'try: shoal.parallelize(model, optimizer, loss, layout={{"tp": 2}}, sample=…)'
            )
    told = config if config is not None else config_params
    if told is None:
        told = getattr(args, "deepspeed_config", None)
    if told is None:
        raise ConfigError("deepspeed.initialize: config is missing: a dict, or a file's path")
    world = start_world()
    brought = {"optimizer": optimizer, "scheduler": lr_scheduler}
    settings = read(
        told,
        data_parallel=world.size,
        era=installed_version(),
        unsaid_clip=1.0,
        brought=[name for name, value in brought.items() if value is not None],
    )
    compute = _keep_master_weights(model, settings)
    run = start_library_run(
        model,
        _optimizer(settings, optimizer, model_parameters),
        layout=STRATEGIES[settings.stage] if world.size > 1 else "single",
        batch=settings.batch,
        micro_batch=settings.micro_batch,
        precision=compute,
        world=world,
        keep=checkpoints.KEEP_ALL,
        library="deepspeed",
        saves=checkpoints.SAVES,
        **_policies(settings),
    )
    for line in settings.told:
        run.recorder.notice(f"deepspeed: {line}")
    if settings.compute == "fp16":
        run.loss_scale = DeepSpeedLossScale(settings.loss_scale)
    schedule = _schedule(settings, lr_scheduler, run.optimizer)
    engine = Engine(run, settings, schedule)
    checkpoints.report_saves(run, engine)
    if training_data is not None:
        engine.training_dataloader = _loader(training_data, collate_fn, settings, world)
    return engine, engine.optimizer, engine.training_dataloader, schedule


def installed_version() -> str:
    """Return the installed version of DeepSpeed; "" for none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return ""


def _keep_master_weights(model: nn.Module, settings: DeepSpeedSettings) -> str:
    """Keep fp32 master weights for weights of a narrow dtype, as DeepSpeed does.

    At stage 0 without a format DeepSpeed steps such weights themselves.

    Returns:
        The dtype to compute in: the configuration's, or if that names none, bf16 weights'.
    """
    kinds = (torch.bfloat16, *([torch.float16] if settings.compute != "fp32" else []))
    narrow = [p for p in model.parameters() if p.requires_grad and p.dtype in kinds]
    if not narrow or (settings.compute == "fp32" and not settings.stage):
        return settings.compute
    for one in narrow:
        one.data = one.data.float()
    return "bf16" if settings.compute == "fp32" else settings.compute


def _policies(settings: DeepSpeedSettings) -> dict[str, Any]:
    """Return the other arguments of `parallelize`."""
    told: dict[str, Any] = {"clip": settings.clip}
    if settings.offload_parameters or settings.offload_optimizer:
        # Where parameters are offloaded, the optimizer's states are too.
        told["offload"] = "parameters" if settings.offload_parameters else "optimizer"
        told["offload_to"] = settings.offload_to
    if settings.reduce:
        told["reduce"] = settings.reduce
    return told


def _optimizer(settings: DeepSpeedSettings, brought: Any, parameters: Any) -> Any:
    """Return the optimizer, or the function parameters → optimizer, for `parallelize`."""
    if isinstance(brought, torch.optim.Optimizer):
        return brought
    chosen = list(parameters) if parameters is not None else None
    if brought is not None:
        return lambda trains: brought(chosen if chosen is not None else trains)
    if not settings.optimizer:
        raise ConfigError(
            "deepspeed.initialize: no optimizer: neither the call nor the configuration has one; "
            'try: "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}'
        )
    made: Any = getattr(torch.optim, settings.optimizer, None)
    if settings.optimizer == "Lion":
        from shoal.optim.lion import Lion as made
    if made is None:
        raise ConfigError(
            f"optimizer.type: {settings.optimizer} is not in torch.optim of {torch.__version__}; "
            f"try: AdamW"
        )
    args = dict(settings.optimizer_args)
    if settings.optimizer in ("Adam", "AdamW"):
        args.setdefault("fused", True)  # one pass over the weights, as DeepSpeed's own is
    return lambda trains: made(chosen if chosen is not None else trains, **args)


def _schedule(settings: DeepSpeedSettings, brought: Any, optimizer: torch.optim.Optimizer) -> Any:
    if brought is not None:
        is_function = callable(brought) and not hasattr(brought, "step")
        return brought(optimizer) if is_function else brought
    if not settings.scheduler:
        return None
    stock = getattr(torch.optim.lr_scheduler, settings.scheduler, None)
    if stock is not None and settings.scheduler not in SCHEDULES:
        return stock(optimizer, **settings.scheduler_args)
    return DeepSpeedSchedule(optimizer, settings.scheduler, settings.scheduler_args)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_plain_backward = torch.Tensor.backward


def live_engines() -> list[Engine]:
    """List the engines of this process."""
    return list(_engines)


def _backward(loss: torch.Tensor, gradient: Any = None, *args: Any, **named: Any) -> None:
    """Call the active engine's `backward`: serve a script's `loss.backward()`."""
    begun = [one for one in _engines if one.loop.awaits_backward]
    if gradient is None and len(begun) == 1 and not loss.dim():
        begun[0].backward(loss, **named)
    else:
        _plain_backward(loss, gradient, *args, **named)


class Engine(ModelWrapper):
    """Engine that `initialize` returns: a module with `backward`, `step` and DeepSpeed's queries.

    module   the user's · optimizer  torch's, over this rank's parts · global_steps  updates until
    now, skipped ones included · micro_steps  calls of `step` until now
    """

    loop: LibraryLoop

    def __init__(self, run: Run, settings: DeepSpeedSettings, schedule: Any) -> None:
        check = EqualBatchesCheck(run, DEALS, lambda: self.training_dataloader is not None)
        super().__init__(run.model, LibraryLoop(run, check))
        self.run, self.settings, self.lr_scheduler = run, settings, schedule
        self.optimizer = run.optimizer
        self.training_dataloader: Any = None
        self.monitors = start_monitors(settings, run)
        self.micro_steps = self.skipped_steps = 0
        self._boundary: bool | None = None
        _engines.add(self)
        torch.Tensor.backward = _backward  # type: ignore[assignment,method-assign]
        world = run.world
        self.device, self.global_rank, self.world_size = world.device, world.rank, world.size
        self.local_rank, self.dp_world_size = world.local_rank, world.size
        self.mp_world_size = 1
        self.tput_timer = SimpleNamespace(update_epoch_count=lambda: None)  # steps print times

    def __getattr__(self, name: str) -> Any:
        if name in TOLD:
            return partial(getattr, self.settings, TOLD[name])
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            raise module_stand_in.MissingNameError(
                f"deepspeed: engine.{name}", INSTEAD.get(name)
            ) from None

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Add gradients of a loss, divided by the accumulation; return the loss so divided."""
        share = 1.0 / self.settings.accumulate if scale_wrt_gas else 1.0
        # Losses of several engines may come in any number: gradients are reduced in `step` then.
        last = self.is_gradient_accumulation_boundary() and len(_engines) == 1
        self.loop.backward(loss, share=share, last=last, retain_graph=retain_graph)
        return loss.detach() * share

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.settings.accumulate == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set by hand whether the next `step` updates."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: Any = None) -> None:
        """Update the weights, at the end of an accumulation; else count."""
        if self.is_gradient_accumulation_boundary():
            done = self.loop.update()
            if done.skipped:
                self.skipped_steps += 1
            elif self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            scale = {"Train/Samples/loss_scale": self.loss_scale} if self.fp16_enabled() else {}
            for one in self.monitors:
                one.log({"Train/Samples/lr": self.get_lr()[0], **scale}, self.global_samples)
            every = self.settings.steps_per_print
            if every and done.step % every == 0:
                self.run.recorder.notice(
                    f"step={done.step}, skipped={self.skipped_steps}, lr={self.get_lr()}, "
                    f"loss={done.loss:.4g}"
                )
        self.micro_steps += 1

    @property
    def global_steps(self) -> int:
        """Updates until now, skipped ones included."""
        return self.run.step_count

    @property
    def global_samples(self) -> int:
        """Samples until now, over all ranks."""
        return self.run.step_count * self.settings.batch

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a step begins without gradients."""

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the last update's gradient norm before clipping; None before the first."""
        return None if self.loop.last is None else self.loop.last.grad_norm

    def was_step_applied(self) -> bool:
        """Return whether the last update changed the weights."""
        return self.loop.last is not None and not self.loop.last.skipped

    def zero_optimization(self) -> bool:
        """Return whether any state is sharded."""
        return self.settings.stage > 0

    def fp16_enabled(self) -> bool:
        """Return whether matrix products run in fp16."""
        return self.settings.compute == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return whether matrix products run in bf16."""
        return self.settings.compute == "bf16"

    @property
    def loss_scale(self) -> float:
        """Factor of losses before backward."""
        return self.run.scale

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the whole model's tensors by name, on every rank; every rank must call it."""
        told = self.loop.state_dict()
        frozen = self.run.program.frozen if exclude_frozen_parameters else {}
        return {name: value for name, value in told.items() if name not in frozen}

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint of Shoal's in `save_dir`; every rank must call it.

        Args:
            save_dir: holds all tags of a training.
            tag: names the checkpoint; None: global_stepN.
            client_state: rank 0's, which `load_checkpoint` returns; a part that is no plain value,
                tensor, array or namespace is left out, with a line.
            save_latest: let `load_checkpoint` without a tag take this one.
            exclude_frozen_parameters: not read: a checkpoint is whole.

        Returns:
            Whether it was written.
        """
        named = f"global_step{self.global_steps}" if tag is None else str(tag)
        scheduler, folder = self.lr_scheduler, Path(save_dir)
        extra = {
            "client_state": checkpoints.to_plain_state(self.run, client_state or {}),
            "micro_steps": self.micro_steps,
            "skipped_steps": self.skipped_steps,
            "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
            "save_latest": save_latest,
        }
        named = checkpoints.agree_on_tag(self.run, named, "save_checkpoint")
        saved = self.loop.save(folder / checkpoints.folder_name(named), extra=extra)
        if saved is not None:
            checkpoints.keep_one_step(self.run, saved)
            if self.settings.stage:
                checkpoints.write_recovery_script(self.run, folder)
            if save_latest:
                checkpoints.write_latest(self.run, folder, named)
        return saved is not None

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint of `save_checkpoint`; every rank must call it.

        Args:
            load_dir: the folder of `save_checkpoint`.
            tag: of the checkpoint; None: the one in `load_dir/latest`.
            load_module_strict: refuse tensors that only one of model and checkpoint has.
            load_optimizer_states: False: the optimizer stays as it is.
            load_lr_scheduler_states: False: the schedule stays as it is.
            load_module_only: the weights alone: counters stay as they are, too.
            custom_load_fn: refused.

        Returns:
            (DeepSpeed's path of the checkpoint, client_state); (None, None), and a line, if there
            is neither a tag nor a file `latest`.

        Raises:
            ConfigError: there is no checkpoint of that tag.
            CheckpointError: its tensors are not those of this model.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint: custom_load_fn reads a pickle; try: load_module_strict=False, or "
                "model.load_state_dict before initialize"
            )
        run, folder = self.run, Path(load_dir)
        if tag is None:
            chosen = checkpoints.find_latest(run, folder)
            if chosen is None:
                return None, None
        else:
            chosen = checkpoints.agree_on_tag(run, str(tag), "load_checkpoint")
        there = checkpoints.gather_tags(run.world, folder)
        place = checkpoints.find_checkpoint(folder, chosen, there)
        if load_module_only or not load_optimizer_states:
            extra = checkpoints.load_weights(run, place, strict=load_module_strict)
            if not load_module_only:
                run.step_count = extra["step"]
        else:
            older = checkpoints.list_older(place, folder, there) if tag is None else []
            checkpoints.load_whole(run, [place, *older], strict=load_module_strict)
            extra = run.extra
        if not load_module_only:
            self.micro_steps = 0  # as DeepSpeed: passes of an open window are lost, it starts anew
            self.skipped_steps = extra["skipped_steps"]
            if self.lr_scheduler is not None and load_lr_scheduler_states and extra["lr_scheduler"]:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        name = "zero_pp_rank_0_mp_rank_00" if self.settings.stage == 3 else "mp_rank_00"
        loaded = folder / chosen / f"{name}_model_states.pt"  # as DeepSpeed calls it
        return str(loaded), checkpoints.unpack_state(extra["client_state"])

    def compile(self, *_how: Any, **_named: Any) -> None:
        """Do nothing: the run's own key, compile.mode, compiles blocks."""
        self.run.recorder.notice(
            'deepspeed: engine.compile() changes nothing; try: parallelize(compile="blocks")'
        )

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model's weights, a pickle of tensors; every rank must call it.

        Args:
            save_dir: made where it is missing.
            save_filename: `.safetensors` at its end writes that format.
            exclude_frozen_parameters: leave these out.

        Returns:
            True: unlike DeepSpeed's, stage 3 needs no key for it.
        """
        state = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        path = Path(save_dir) / save_filename
        if self.run.world.is_first:
            is_safe = path.suffix == ".safetensors"
            (final_saves.write_tensors if is_safe else final_saves.write_pickle)(path, state)
        self.run.world.barrier()
        return True

    save_fp16_model = save_16bit_model

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor]:
        """Gather the whole model in the run's format, on every rank; every rank must call it."""
        state = self.module_state_dict(exclude_frozen_parameters)
        kind = dict(fp16=torch.float16, bf16=torch.bfloat16).get(self.settings.compute)
        if kind is None:
            return state
        return {name: t.to(kind) if t.is_floating_point() else t for name, t in state.items()}

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def destroy(self) -> None:
        """Leave the process group."""
        for one in self.monitors:
            one.finish()
        self.run.close()


def _loader(dataset: Any, collate: Any, settings: DeepSpeedSettings, world: World) -> Any:
    """Return a loader of this rank's batches, split as by DeepSpeed, in the order of epoch 0."""
    from torch.utils.data import DataLoader, DistributedSampler

    sampler: Any = DistributedSampler(dataset, num_replicas=world.size, rank=world.rank)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=settings.micro_batch,
        sampler=sampler,
        collate_fn=collate,
        drop_last=settings.drop_last,
    )
    vars(loader)["data_sampler"] = sampler
    return loader


class DeepSpeedLossScale(loss_scale.LossScale):
    """Loss scaler of fp16 with DeepSpeed's rules, in place of Shoal's; `left`: overflows to go."""

    def __init__(self, settings: LossScaleSettings) -> None:
        super().__init__(settings.fixed)
        self.settings, self.left = settings, settings.hysteresis
        self.value = settings.fixed or settings.initial

    def update(self, done: UpdateResult, tally: StepTotals) -> bool:
        """Adapt the scale after an update; return whether the update overflowed.

        Raises:
            ConfigError: as `lower`.
        """
        if not done.skipped:
            self.handle_clean_step()
            return False
        if tally.loss_broken or self.fixed:
            return False
        self.lower()
        return True

    def lower(self) -> None:
        """Halve the scale after an overflow, or ignore the overflow while hysteresis lasts.

        Raises:
            ConfigError: the scale overflows at its least, as DeepSpeed ends there.
        """
        self.clean = 0
        if self.left > 1:
            self.left -= 1
        elif self.value <= self.settings.least and self.settings.stops:
            raise ConfigError(
                f"fp16: gradients overflow at the least loss scale, {self.value:g}; try: "
                f'"bf16": {{"enabled": true}}, or a smaller optimizer.lr'
            )
        else:
            self.value = max(self.value / 2, self.settings.least)

    def handle_clean_step(self) -> None:
        """Count a step without overflow, and double the scale when due."""
        self.clean += 1
        if self.fixed:
            return
        if self.settings.doubles(self.clean):
            self.value, self.left = self.value * 2, self.settings.hysteresis
        elif self.settings.consecutive_hysteresis:
            self.left = self.settings.hysteresis

    def state(self) -> dict[str, float]:
        """Return the state for the checkpoint's record."""
        return {**super().state(), "left": self.left}

    def load(self, record: dict[str, Any]) -> None:
        """Restore the state of a record."""
        super().load(record)
        self.left = int(record.get("left", self.settings.hysteresis))
