"""Answers a script's `import accelerate` after one line, `import shoal.neighbours.accelerate`.

The script stays as it is. Its numbers are Accelerate's: a loss divided by the accumulation, means
of means over ranks, batches dealt to processes in turn with the first samples again where the last
ones do not suffice, schedules that step once per process. Source: accelerate 1.15.0.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import getLogger  # `accelerate.logging` takes the module's name
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from shoal.base.errors import ConfigError
from shoal.fabric import start_world
from shoal.neighbours import stand_in, without_cuda  # noqa: F401  # its import is its effect
from shoal.neighbours.accelerate_data import (
    DealtLoader,
    gathered,
    skip_first_batches,
    tensor_of,
    text_of,
)
from shoal.neighbours.free_loop import FreeLoop
from shoal.trainer.parallelize import parallelize

__version__ = "1.15.0"
PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
ELSEWHERE = {
    "megatron_lm_plugin": 'shoal.parallelize(…, layout={"tp": 2}, sample=…)',
    "torch_tp_plugin": 'shoal.parallelize(…, layout={"tp": 2}, sample=…)',
    "parallelism_config": 'shoal.parallelize(…, layout={"dp_shard": 2, "tp": 2}, sample=…)',
    "deepspeed_plugin": "import shoal.neighbours.deepspeed, and DeepSpeed's own calls",
    "deepspeed_plugins": "import shoal.neighbours.deepspeed, and DeepSpeed's own calls",
    "dynamo_plugin": 'shoal.parallelize(…, compile="blocks")',
    "dynamo_backend": 'shoal.parallelize(…, compile="blocks")',
}
"""What `Accelerator` takes and Shoal says otherwise."""


class Prepared(nn.Module):
    """A model in training, called as before; `module` is the user's own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.loop: FreeLoop | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's outputs."""
        if self.loop is None:  # no optimizer steps it: nothing is summed
            return self.module(*inputs, **named)
        return self.loop.forward(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["module"], name)

    def state_dict(self, *args: Any, **named: Any) -> Any:
        """The user's module's own."""
        return self.module.state_dict(*args, **named)


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step ends a step of the run, at the end of an accumulation.

    Groups, state and defaults are those of the script's own; torch's schedules take it as one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> None:
        self.optimizer, self.accelerator = optimizer, accelerator
        self.loop: FreeLoop | None = None
        self.clipped = self.step_was_skipped = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def state_dict(self) -> dict[str, Any]:
        """As the script's own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """As the script's own."""
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        """Update the weights, where gradients are summed now."""
        if closure is not None:
            raise ConfigError("optimizer.step(closure): the run calls no closure; nearest: AdamW")
        if self.loop is None:
            raise ConfigError("optimizer.step: its model was not given to accelerator.prepare")
        if not self.accelerator.sync_gradients:
            return
        if not self.clipped:
            self.loop.clip(0.0)
        done = self.loop.update()
        self.loop.run.adjust = None
        self.clipped, self.step_was_skipped = False, done.skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that no update used."""
        if self.loop is not None and self.accelerator.sync_gradients:
            self.loop.drop()


class PreparedScheduler:
    """A schedule that steps with the optimizer, once per process, or once for split batches."""

    def __init__(self, scheduler: Any, accelerator: Accelerator) -> None:
        self.scheduler, self.accelerator = scheduler, accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)

    def step(self, *args: Any, **named: Any) -> None:
        """Step, unless the optimizer did not."""
        told = self.accelerator
        if not told.step_scheduler_with_optimizer:
            self.scheduler.step(*args, **named)
            return
        if not told.sync_gradients:
            if told.adjusts_scheduler:
                self.scheduler._step_count += 1
            return
        if any(one.step_was_skipped for one in told.optimizers_of(self.scheduler)):
            return
        for _ in range(1 if told.split_batches else told.num_processes):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or told.split_batches or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **named)


class Accelerator:
    """The object that a script of Accelerate's asks for everything."""

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        fsdp_plugin: Any = None,
        rng_types: Any = None,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Any = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if name not in ELSEWHERE:
                raise ConfigError(f"Accelerator: {name} is no argument of accelerate 1.15")
            if value is not None:
                raise ConfigError(f"Accelerator: {name}: nearest: {ELSEWHERE[name]}")
        self.world = start_world()
        said = str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        if said not in PRECISIONS:
            raise ConfigError(f"mixed_precision = {said}: not one of no, bf16, fp16; nearest: bf16")
        self.mixed_precision = said
        plugin = gradient_accumulation_plugin
        asked = plugin.num_steps if plugin is not None else gradient_accumulation_steps
        self.gradient_accumulation_steps = int(
            os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", asked)
        )
        self.adjusts_scheduler = getattr(plugin, "adjust_scheduler", True)
        self.sync_with_dataloader = getattr(plugin, "sync_with_dataloader", True)
        self.split_batches = getattr(dataloader_config, "split_batches", split_batches)
        self.even_batches = getattr(dataloader_config, "even_batches", True)
        self.seedable = getattr(dataloader_config, "use_seedable_sampler", False)
        self.data_seed = getattr(dataloader_config, "data_seed", None)
        by_fsdp = fsdp_plugin or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        self.layout = "single" if self.world.size == 1 else "fsdp" if by_fsdp else "ddp"
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.project_dir = project_dir or getattr(project_config, "project_dir", None)
        self.sync_gradients, self.step = True, 0
        self.models: list[Prepared] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[DealtLoader] = []
        self.custom: list[Any] = []
        self.trackers: list[Any] = []
        self.log_with = log_with
        self.device, self.num_processes = self.world.device, self.world.size
        self.process_index, self.local_process_index = self.world.rank, self.world.local_rank
        self.is_main_process = self.process_index == 0
        self.is_local_main_process = self.local_process_index == 0
        self.is_last_process = self.process_index == self.num_processes - 1
        self.use_distributed = self.num_processes > 1
        self.state = self
        unread = {"kwargs_handlers": kwargs_handlers, "rng_types": rng_types}
        unread["fsdp_plugin"] = fsdp_plugin
        for name, value in unread.items():
            if value:
                self._tell(f"{name}: what it sets is not read; layouts and formats are the plan's")

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Each object as the script is to use it, in the order given."""
        made = [self._prepared(one) for one in objects]
        self._begin_runs()
        return made[0] if len(made) == 1 else tuple(made)

    prepare_model = prepare_optimizer = prepare_data_loader = prepare_scheduler = prepare

    def _prepared(self, one: Any) -> Any:
        if isinstance(one, Prepared | PreparedOptimizer | PreparedScheduler | DealtLoader):
            return one
        if isinstance(one, nn.Module):
            self.models.append(Prepared(one.to(self.device)))
            return self.models[-1]
        if isinstance(one, torch.optim.Optimizer):
            self.optimizers.append(PreparedOptimizer(one, self))
            return self.optimizers[-1]
        if isinstance(one, DataLoader):
            self.loaders.append(DealtLoader(one, self))
            return self.loaders[-1]
        if hasattr(one, "step") and hasattr(one, "state_dict"):
            self.schedulers.append(PreparedScheduler(one, self))
            return self.schedulers[-1]
        return one

    def _begin_runs(self) -> None:
        """A run for each optimizer whose model is here."""
        for one in self.optimizers:
            held = {id(p) for group in one.optimizer.param_groups for p in group["params"]}
            for model in self.models:
                own = {id(p) for p in model.module.parameters() if p.requires_grad}
                if one.loop is None and model.loop is None and held & own:
                    run = parallelize(
                        model.module,
                        one.optimizer,
                        layout=self.layout,
                        precision=PRECISIONS[self.mixed_precision],
                        clip=0.0,
                        world=self.world,
                    )
                    model.module = run.model
                    one.loop = model.loop = FreeLoop(run)

    def optimizers_of(self, scheduler: Any) -> list[PreparedOptimizer]:
        """Those whose rate a schedule sets; all, where that is not known."""
        its = getattr(scheduler, "optimizer", None)
        own = [one for one in self.optimizers if its in (one, one.optimizer)]
        return own or self.optimizers

    def backward(self, loss: torch.Tensor, **named: Any) -> None:
        """Gradients of a loss, divided by the accumulation, for every model that ran."""
        begun = [one.loop for one in self.models if one.loop and one.loop.run.free is not None]
        if not begun:
            raise ConfigError("accelerator.backward: no model of accelerator.prepare was called")
        if len(begun) > 1:
            raise ConfigError(
                "accelerator.backward: one loss of two prepared models: their runs cannot tell "
                "whose pass it is; nearest: both in one nn.ModuleList, prepared with one optimizer"
            )
        share = 1.0 / self.gradient_accumulation_steps
        begun[0].backward(loss, share=share, last=False, **named)  # another may come

    @contextmanager
    def accumulate(self, *_models: Any) -> Iterator[None]:
        """Around a micro-batch: gradients are summed in every n-th, and in the last of a loader."""
        if self.sync_with_dataloader and any(one.at_end for one in self.loaders):
            self.step, self.sync_gradients = 0, True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.gradient_accumulation_steps == 0
        yield

    @contextmanager
    def no_sync(self, _model: Any = None) -> Iterator[None]:
        """Around passes whose gradients need not travel yet."""
        yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Have the update clip by the true global norm, and give that norm."""
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_: norm_type = {norm_type}; nearest: 2")
        held = {id(one) for one in parameters}
        for one in self.optimizers:
            own = [p for group in one.optimizer.param_groups for p in group["params"]]
            loop, mine = one.loop, {id(p) for p in own}
            if loop is None or not self.sync_gradients or loop.run.free is None:
                continue
            if not held & (mine | {id(p) for p in loop.run.model.parameters()}):
                continue
            loop.clip(float(max_norm))
            one.clipped = True
            return torch.tensor(loop.norm())
        return None

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Have the update clip every element of the mean gradient."""
        for one in self.optimizers:
            if one.loop is not None and self.sync_gradients:
                own = [p for group in one.optimizer.param_groups for p in group["params"]]
                clip = torch.nn.utils.clip_grad_value_
                one.loop.run.adjust = functools.partial(clip, own, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing: gradients are unscaled in the update."""

    def gather(self, tensors: Any) -> Any:
        """All ranks' tensors, one after another along dim 0."""
        return gathered(tensors, self.world)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The same without the samples that were dealt twice in a loader's last batches."""
        found = self.gather(input_data)
        left = next((one.remainder for one in self.loaders if one.at_end), 0)
        return gathered(found, None, left) if left > 0 else found

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum over ranks, or the mean."""
        total = tensor.detach().clone().to(self.device)
        self.world.all_reduce(total)
        return total / self.num_processes if reduction == "mean" else total

    def print(self, *values: object, **named: Any) -> None:
        """A line on standard output, from the first process of this machine."""
        if self.is_local_main_process:
            file, end = named.get("file") or sys.stdout, named.get("end", "\n")
            file.write(named.get("sep", " ").join(map(str, values)) + end)

    def unwrap_model(self, model: Any, *_args: Any, **_named: Any) -> nn.Module:
        """The user's own module."""
        return model.module if isinstance(model, Prepared) else model

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """The whole model's tensors, on every rank; every rank must call it."""
        if isinstance(model, Prepared) and model.loop is not None:
            return model.loop.run.state_dict()
        return dict(model.state_dict())

    @contextmanager
    def autocast(self, *_args: Any, **_named: Any) -> Iterator[None]:
        """Around code in the run's format."""
        run = next((one.loop.run for one in self.models if one.loop), None)
        if run is None:
            yield
            return
        with run.program.autocast():
            yield

    def wait_for_everyone(self) -> None:
        """A barrier."""
        self.world.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The first process runs what is inside before the others do."""
        if not self.is_main_process:
            self.world.barrier()
        yield
        if self.is_main_process:
            self.world.barrier()

    local_main_process_first = main_process_first

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs on the first process alone."""

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            return function(*args, **named) if self.is_main_process else None

        return call

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Tell where the values of `log` go."""
        self._tell(f"log_with = {self.log_with}: values of log go to {self._log_file()}")

    def log(self, values: dict[str, Any], step: int | None = None, **_named: Any) -> None:
        """Add a line of JSON to a file, from the first process."""
        if self.is_main_process:
            with self._log_file().open("a") as file:
                file.write(json.dumps({"step": step, **values}, default=float) + "\n")

    def _log_file(self) -> Path:
        folder = Path(self.project_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        return folder / "log.jsonl"

    def _tell(self, line: str) -> None:
        if self.is_main_process:
            getLogger("shoal").warning("accelerate: %s", line)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save these with every state: what has `state_dict` and `load_state_dict`."""
        self.custom.extend(objects)

    def save_state(self, output_dir: Any = None, **_named: Any) -> str:
        """Write models, optimizers, schedules and generators; every rank must call it."""
        folder = Path(output_dir or self.project_dir or "checkpoint")
        draws = text_of(torch.get_rng_state())
        extra = {
            "schedulers": [one.scheduler.state_dict() for one in self.schedulers],
            "custom": [one.state_dict() for one in self.custom],
            "step": self.step,
            "loaders": [one.state() for one in self.loaders],
            "draws": self.world.gather_json(draws),
        }
        for place, loop in enumerate(self._loops()):
            loop.run.save(folder / f"model_{place}", extra=extra)
        return str(folder)

    def load_state(self, input_dir: Any = None, **_named: Any) -> None:
        """Go on from what `save_state` wrote: also in a loader's order, which Accelerate loses."""
        folder = Path(input_dir or self.project_dir or "checkpoint")
        for place, loop in enumerate(self._loops()):
            if not loop.run.restore(folder / f"model_{place}"):
                raise ConfigError(f"load_state: {folder / f'model_{place}'} holds no checkpoint")
        told = self._loops()[0].run.extra
        for one, state in zip(self.schedulers, told["schedulers"], strict=True):
            one.scheduler.load_state_dict(state)
        for one, state in zip(self.custom, told["custom"], strict=True):
            one.load_state_dict(state)
        self.step = told["step"]
        for loader, state in zip(self.loaders, told["loaders"], strict=True):
            loader.go_on(state)
        if len(told["draws"]) == self.num_processes:
            torch.set_rng_state(tensor_of(told["draws"][self.process_index]))

    def _loops(self) -> list[FreeLoop]:
        return [one.loop for one in self.models if one.loop is not None]

    def skip_first_batches(self, loader: Any, num_batches: int = 0) -> Any:
        """The same loader without its first batches."""
        return skip_first_batches(loader, num_batches)

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        """Let go of what was prepared."""
        self.models, self.optimizers, self.schedulers, self.loaders = [], [], [], []
        return (None,) * len(objects)

    def end_training(self) -> None:
        """Leave the other processes."""
        for loop in self._loops():
            loop.run.close()


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed random, numpy and torch."""
    seed += start_world().rank if device_specific else 0
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


class _Settings:
    """Arguments kept as attributes: `ProjectConfiguration`, `DataLoaderConfiguration`, …"""

    def __init__(self, project_dir: Any = None, **named: Any) -> None:
        self.project_dir = project_dir
        self.__dict__.update(named)


class GradientAccumulationPlugin:
    """How gradients are accumulated."""

    def __init__(
        self, num_steps: int = 1, adjust_scheduler: bool = True, sync_with_dataloader: bool = True
    ) -> None:
        self.num_steps, self.adjust_scheduler = num_steps, adjust_scheduler
        self.sync_with_dataloader = sync_with_dataloader


DataLoaderConfiguration = ProjectConfiguration = _Settings
_utils = {
    "set_seed": set_seed,
    "ProjectConfiguration": _Settings,
    "DataLoaderConfiguration": _Settings,
    "GradientAccumulationPlugin": GradientAccumulationPlugin,
}
stand_in.answer(
    "accelerate",
    sys.modules[__name__],
    {
        "utils": _utils,
        "logging": {"get_logger": lambda name, log_level=None: getLogger(name)},
        "data_loader": {"skip_first_batches": skip_first_batches},
    },
)
