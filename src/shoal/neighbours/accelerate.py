"""Facade of Accelerate: serve a script's `import accelerate` from runs of Shoal.

One line before the script's own enables it: `import shoal.neighbours.accelerate`. The script stays
as it is. Its numbers are Accelerate's: a loss divided by the accumulation, means of means over
ranks, batches distributed to processes in turn (the first samples again where the last ones do not
suffice), schedules that step once per process. Source: accelerate 1.15.0.
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain, product
from logging import LoggerAdapter, getLogger  # `accelerate.logging` takes the module's name
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from shoal.base.errors import ConfigError, shorten
from shoal.data.loading.epoch_order import decode_state, encode_state
from shoal.fabric import start_world
from shoal.neighbours import (
    module_stand_in,
    without_cuda,  # noqa: F401  # its import is its effect
)
from shoal.neighbours.accelerate_data import (
    RankDataLoader,
    apply_to_tensors,
    has_only_tensors,
    skip_first_batches,
)
from shoal.neighbours.accelerate_prepared import (
    SAVES,
    LocalSGD,
    PreparedModel,
    PreparedOptimizer,
    PreparedScheduler,
    report_saves,
)
from shoal.neighbours.accelerate_state import (
    HELD,
    NEAREST,
    ArgumentSettings,
    PartialState,
    delete_old_states,
    extract_model_from_parallel,
    find_nearest_state,
    list_state_numbers,
)
from shoal.neighbours.batch_duplicates import EqualBatchesCheck
from shoal.neighbours.configs.accelerate_config import PRECISIONS
from shoal.neighbours.library_loop import LibraryLoop, start_library_run
from shoal.neighbours.outputs import trackers
from shoal.neighbours.outputs.final_saves import write_pickle, write_tensors

__version__ = "1.15.0"


class Logger(LoggerAdapter):
    """Logger of `accelerate.logging`: lines of the first process, unless a call asks for all."""

    def log(self, level: int, msg: object, *args: Any, **named: Any) -> None:
        """Log a line; with `main_process_only=False` from every process."""
        named.pop("in_order", None)
        if not named.pop("main_process_only", True) or start_world().is_first:
            super().log(level, msg, *args, **named)


class Accelerator(PartialState, ArgumentSettings):
    """Accelerate's `Accelerator`, over runs of Shoal."""

    mixed_precision: Any
    gradient_accumulation_steps: Any
    project_dir: Any
    order = (
        "device_placement split_batches mixed_precision gradient_accumulation_steps cpu "
        "dataloader_config deepspeed_plugin fsdp_plugin torch_tp_plugin megatron_lm_plugin "
        "rng_types log_with project_dir project_config gradient_accumulation_plugin "
        "step_scheduler_with_optimizer kwargs_handlers dynamo_backend dynamo_plugin "
        "deepspeed_plugins parallelism_config"
    )

    def __init__(self, *values: Any, **named: Any) -> None:
        ArgumentSettings.__init__(self, *values, **named)
        super().__init__()
        said = self.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        self.mixed_precision = str(said)
        if self.mixed_precision not in PRECISIONS:
            raise ConfigError(f"mixed_precision = {said}: not one of no, bf16, fp16; try: bf16")
        steps = self.gradient_accumulation_steps
        plugin = self.gradient_accumulation_plugin or HELD["GradientAccumulationPlugin"](steps)
        deals = self.dataloader_config or HELD["DataLoaderConfiguration"](self.split_batches)
        vars(self).update(vars(plugin) | vars(deals))  # a script asks for these here, too
        steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", plugin.num_steps)
        self.gradient_accumulation_steps = int(steps)
        by_fsdp = self.fsdp_plugin or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        self.layout = "single" if self.world.size == 1 else "fsdp" if by_fsdp else "ddp"
        self.by_fsdp = self.layout == "fsdp"
        self.project_configuration = self.project_config or HELD["ProjectConfiguration"]()
        self.project_dir = self.project_dir or self.project_configuration.project_dir
        self.state = self.gradient_state = self
        self.sync_gradients, self.triggered, self.told = True, False, set[str]()
        self.custom: list[Any] = []
        self.saving, self.loading = OrderedDict[int, Any](), OrderedDict[int, Any]()
        self.trackers: list[Any] = []
        self.free_memory()
        handlers = self.kwargs_handlers or []
        self.handlers = [one for one in handlers if "Profile" in type(one).__name__]
        unread = {"rng_types": self.rng_types, "fsdp_plugin": self.fsdp_plugin}
        unread["kwargs_handlers"] = len(handlers) > len(self.handlers)
        for name, value in unread.items():
            if value:
                self._print_once(
                    f"{name}: what it sets is not read; layouts and formats are the plan's"
                )

    def prepare(self, *objects: Any, device_placement: Any = None, **_named: Any) -> Any:
        """Return each object as the script is to use it, in the order given."""
        made = [self._prepare_one(one) for one in objects]
        self._start_runs()
        return made[0] if len(made) == 1 else tuple(made)

    prepare_model = prepare_optimizer = prepare_data_loader = prepare_scheduler = prepare

    def _prepare_one(self, one: Any) -> Any:
        kinds: tuple[tuple[type, Any, list[Any]], ...] = (
            (nn.Module, PreparedModel, self.models),
            (torch.optim.Optimizer, PreparedOptimizer, self.optimizers),
            (DataLoader, RankDataLoader, self.loaders),
            (LRScheduler, PreparedScheduler, self.schedulers),
        )
        for kind, made, held in kinds:
            if isinstance(one, kind) and not isinstance(one, made):
                held.append(made(one, self))
                return held[-1]
        return one

    def _start_runs(self) -> None:
        """Start a run for each optimizer whose model was prepared too."""
        for one, model in product(self.optimizers, self.models):
            own = {id(p) for p in model.parameters() if p.requires_grad}
            if (
                one.loop is None
                and model.loop is None
                and not own.isdisjoint(map(id, one.own_parameters))
            ):
                run = start_library_run(
                    model.module,
                    one.optimizer,
                    layout=self.layout,
                    precision=PRECISIONS[self.mixed_precision],
                    clip=0.0,
                    world=self.world,
                    library="accelerate",
                    saves=SAVES,
                )
                model.module = run.model
                near = "accelerator.prepare(dataloader)"
                check = EqualBatchesCheck(run, near, lambda: bool(self.loaders))
                one.loop = model.loop = LibraryLoop(run, check, broadcasts=not self.by_fsdp)
                report_saves(run, self)

    def backward(self, loss: torch.Tensor, **named: Any) -> None:
        """Add gradients of a loss, divided by the accumulation, for every model that ran."""
        begun = [one.loop for one in self.models if one.loop and one.loop.begun]
        if not begun:
            raise ConfigError("accelerator.backward: no model of accelerator.prepare was called")
        waiting = [one for one in begun if one.awaits_backward] or begun[:1]
        share = 1.0 / self.gradient_accumulation_steps
        # Another may come, and the loss may be made by several models: a GAN's.
        waiting[0].backward(loss, share=share, last=False, others=waiting[1:], **named)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Enclose a micro-batch: sum gradients over ranks in every n-th, and in a loader's last."""
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.step, self.sync_gradients = 0, True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.gradient_accumulation_steps == 0
        with ExitStack() as stack:
            for one in () if self.sync_gradients else models:
                stack.enter_context(self.no_sync(one))
            yield

    @staticmethod
    def no_sync(model: Any) -> Any:
        """Enclose passes whose gradients need no all-reduce yet; the update reduces them."""
        return getattr(model, "no_sync", nullcontext)()

    trigger_sync_in_backward = nullcontext

    def join_uneven_inputs(self, _joinables: Any, even_batches: bool | None = None) -> Any:
        """Enclose steps of equally many batches on each process.

        Under DDP a process without batches answers the others' all-reduces with zeros; a run's
        ranks take the same steps.

        Raises:
            ConfigError: some processes have fewer batches.
        """
        even = self.even_batches if even_batches is None else even_batches
        if self.use_distributed and not even:
            raise ConfigError(
                "join_uneven_inputs: even_batches = False: every process steps as often as any "
                "other; try: even_batches=True"
            )
        return nullcontext()

    @property
    def active_dataloader(self) -> RankDataLoader | None:
        """The loader that started last among the unfinished ones; None without any."""
        return self.active[-1] if self.active else None

    @property
    def end_of_dataloader(self) -> bool:
        """Return whether the active loader has returned its last batch."""
        return bool(self.active) and self.active[-1].at_end

    @property
    def remainder(self) -> int:
        """Samples of the active loader's last step over all processes, if fewer; −1: no loader."""
        return self.active[-1].remainder if self.active else -1

    @property
    def num_steps(self) -> int:
        """Micro-batches per update."""
        return self.gradient_accumulation_steps

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Make the coming step clip its gradients to the norm over all ranks; return that norm.

        Args:
            parameters: of a prepared model; they select the run.
            max_norm: largest Euclidean norm of the mean gradient.
            norm_type: 2.

        Returns:
            the norm before clipping; None while gradients accumulate, or for parameters of no run.
        """
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_: norm_type = {norm_type}; try: 2")
        if not self.sync_gradients:
            self._print_once(
                "clip_grad_norm_ between updates is left out: a run clips the sum of all passes; "
                "try: if accelerator.sync_gradients: accelerator.clip_grad_norm_(…)"
            )
            return None
        wanted = {id(one) for one in parameters}
        for one in self.optimizers:
            loop = one.loop
            if loop is not None and loop.begun:
                held = chain(one.own_parameters, loop.run.model.parameters())
                if not wanted.isdisjoint(map(id, held)):
                    loop.clip(float(max_norm))
                    one.clipped = True
                    return torch.tensor(loop.norm())
        return None

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every element of the mean gradient in the update."""
        for one in self.optimizers:
            if one.loop is not None and self.sync_gradients:
                one.loop.run.adjust = partial(
                    nn.utils.clip_grad_value_, one.own_parameters, clip_value
                )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: gradients are unscaled in the update."""

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather without the duplicated samples of a loader's last batches."""
        plain = use_gather_object or not has_only_tensors(input_data)
        found = self.gather_object(input_data) if plain else self.gather(input_data)
        if not self.end_of_dataloader or self.remainder <= 0:
            return found
        return (
            found[: self.remainder]
            if plain
            else apply_to_tensors(found, lambda one: one[: self.remainder])
        )

    unwrap_model = staticmethod(extract_model_from_parallel)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole model's tensors, on every rank; every rank must call it."""
        if isinstance(model, PreparedModel) and model.loop is not None:
            return model.loop.state_dict()
        return dict(model.state_dict())

    def autocast(self, *_args: Any, **_named: Any) -> Any:
        """Return a context that computes in the run's dtype."""
        run = next((one.loop.run for one in self.models if one.loop), None)
        return nullcontext() if run is None else run.program.autocast()

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Start the trackers of `log_with` in the first process; print where `log` writes."""
        is_first, folder = self.world.is_first, self.logging_dir
        self.trackers, lines = trackers.start_trackers(
            self.log_with, project_name, folder, config, init_kwargs, is_first=is_first
        )
        for why, near in lines:
            self._print_once(
                f"log_with = {why}: values of log go to {self._log_file()}; try: {near}"
            )

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name; `unwrap`: its library's own object."""
        return trackers.find_tracker(self.trackers, name, unwrap=unwrap)

    def log(self, values: dict[str, Any], step: int | None = None, **_named: Any) -> None:
        """Add a line of JSON to a file, and the values to the trackers, from the first process."""
        if self.is_main_process:
            with self._log_file().open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}, default=float) + "\n")
        for one in self.trackers:
            one.log(values, step)

    @property
    def logging_dir(self) -> Any:
        """Folder of the logs."""
        return self.project_configuration.logging_dir or self.project_dir

    def _log_file(self) -> Path:
        folder = Path(self.logging_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        return folder / "log.jsonl"

    def _print_once(self, line: str) -> None:
        """Print a line for the user, once."""
        if self.is_main_process and line not in self.told:
            self.told.add(line)
            getLogger("shoal").warning("accelerate: %s", line)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save these with every state; they need `state_dict` and `load_state_dict`."""
        self.custom.extend(objects)

    def save_state(self, output_dir: Any = None, **_named: Any) -> str:
        """Write models, optimizers, schedules and generators; every rank must call it."""
        folder = Path(output_dir or self.project_dir or "checkpoint")
        told, place, limit = self.project_configuration, self._numbered_folder(), None
        if told.automatic_checkpoint_naming:
            limit = told.total_limit
            self.wait_for_everyone()
            if limit is not None and self.is_main_process:
                delete_old_states(place, max(1, limit - 1))
            number = max([told.iteration, *(one + 1 for one in list_state_numbers(place))])
            told.iteration = self.world.broadcast_json(number)
            folder = place / f"checkpoint_{told.iteration}"
            told.iteration += 1
        weights = [one.loop.state_dict() for one in self.models if one.loop] if self.saving else []
        if self.saving and self.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        for hook in self.saving.values():
            hook(list(self.models), weights, str(folder))
        places = [one.epoch.rank_state() for one in self.loaders]
        ranks = self.world.gather_json([encode_state(torch.get_rng_state()), places])
        extra = {"kept": self._list_stateful(), "step": self.step}
        extra |= {"draws": [one[0] for one in ranks], "places": [one[1] for one in ranks]}
        saved = [
            loop.save(folder / f"model_{number}", extra=extra)
            for number, loop in enumerate(self._loops())
        ]
        if limit is not None and None not in saved and self.is_main_process:
            delete_old_states(place, limit)
        return str(folder)

    def register_save_state_pre_hook(self, hook: Any) -> RemovableHandle:
        """Call `hook(models, weights, folder)` on every rank before `save_state` writes."""
        handle = RemovableHandle(self.saving)
        self.saving[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Any) -> RemovableHandle:
        """Call `hook(models, folder)` on every rank before `load_state` reads."""
        handle = RemovableHandle(self.loading)
        self.loading[handle.id] = hook
        return handle

    def _numbered_folder(self) -> Path:
        """Return the folder of numbered states."""
        return Path(self.project_dir or ".") / "checkpoints"

    @property
    def save_iteration(self) -> int:
        """Number of the next state."""
        return int(self.project_configuration.iteration)

    def load_state(self, input_dir: Any = None, **_named: Any) -> None:
        """Resume from a state of `save_state`, with loaders' order, which Accelerate loses."""
        folder = Path(input_dir or self.project_dir or "checkpoint")
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            folder = (
                self._numbered_folder()
                / f"checkpoint_{max(list_state_numbers(self._numbered_folder()), default=0)}"
            )
        for hook in self.loading.values():
            hook(list(self.models), str(folder))
        for place, loop in enumerate(self._loops()):
            path, world = folder / f"model_{place}", loop.run.world
            if world.all_true(not path.exists()) or not loop.run.restore(path):
                near = f"; try: {there}" if (there := find_nearest_state(folder)) else ""
                raise ConfigError(f"load_state: {folder} holds no state of save_state{near}")
        told = self._loops()[0].run.extra
        for one, state in zip(self._list_stateful(), told["kept"], strict=True):
            one.load_state_dict(state)
        self.step = told["step"]
        if len(told["draws"]) == self.num_processes:
            torch.set_rng_state(decode_state(told["draws"][self.process_index]))
            places = told.get("places", [()] * self.num_processes)[self.process_index]
            for loader, place in zip(self.loaders, places, strict=bool(places)):
                loader.epoch.load_rank_state(place)

    def _loops(self) -> list[LibraryLoop]:
        return [one.loop for one in self.models if one.loop is not None]

    def _list_stateful(self) -> list[Any]:
        """Return the other objects with a state."""
        return [*self.schedulers, *self.loaders, *self.custom]

    skip_first_batches = staticmethod(skip_first_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Release the prepared objects."""
        self.models: list[PreparedModel] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[RankDataLoader] = []
        self.active: list[RankDataLoader] = []
        self.step = 0
        return [None for _ in objects]

    clear = free_memory

    def set_trigger(self) -> None:
        """Set a flag that `check_trigger` sees on every process."""
        self.triggered = True

    def check_trigger(self) -> bool:
        """Return whether a process set its flag, and reset all; every rank must call it."""
        raised = not self.world.all_true(not self.triggered)
        self.triggered = False
        return raised

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether fp16 overflowed in the last update."""
        return any(one.step_was_skipped for one in self.optimizers)

    @contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[Any]:
        """Profile the enclosed code with torch's profiler; its trace goes to `output_trace_dir`."""
        named = dict(vars(profile_handler or next(iter(self.handlers), HELD["ProfileKwargs"]())))
        folder, schedule = named.pop("output_trace_dir", None), named.pop("schedule_option", None)
        kinds = torch.profiler.ProfilerActivity
        named["activities"] = [getattr(kinds, k.upper()) for k in named.get("activities") or []]
        named = {name: value for name, value in named.items() if value}
        if schedule is not None:
            named["schedule"] = torch.profiler.schedule(**schedule)
        with torch.profiler.profile(**named) as seen:
            yield seen
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            seen.export_chrome_trace(str(Path(folder) / f"profile_{self.process_index}.json"))

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object from the first process: its tensors and plain values, as a pickle.

        Args:
            obj: a state dict, or dicts and lists of tensors and plain values.
            f: path of the file.
            safe_serialization: write safetensors.
        """
        if not self.is_main_process:
            return
        if safe_serialization:
            write_tensors(Path(f), obj)
        elif lacks := write_pickle(Path(f), obj):
            self._print_once(
                f"save: left out of {f}, since a pickle of Shoal's holds tensors and plain values "
                f"alone: {shorten(', '.join(lacks))}"
            )

    def save_model(
        self,
        model: Any,
        save_directory: Any,
        max_shard_size: Any = None,
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights as `model.safetensors` or `pytorch_model.bin`, on every rank."""
        name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
        state = self.get_state_dict(model)
        self.save(state, Path(save_directory) / name, safe_serialization)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise module_stand_in.MissingNameError(f"Accelerator.{name}", NEAREST.get(name))

    def end_training(self) -> None:
        """End the trackers, and leave the process group."""
        for one in self.trackers:
            one.finish()
        for loop in self._loops():
            loop.run.close()


module_stand_in.register_facade(
    "accelerate",
    sys.modules[__name__],
    {
        **HELD,
        "Accelerator": Accelerator,
        "LocalSGD": LocalSGD,
        "get_logger": lambda name, log_level=None: Logger(getLogger(name), {}),
    },
    NEAREST,
)
