"""What Accelerate's scripts ask about processes, and the small things of `accelerate.utils`."""

from __future__ import annotations

import functools
import gc
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.fabric import start_world
from shoal.neighbours.accelerate_data import gathered


class DistributedType(StrEnum):
    """How processes work together, by Accelerate's names."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class DDPCommunicationHookType(StrEnum):
    """How gradients may travel under DDP; here only as they are."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class PartialState:
    """This process among the others: `PartialState`, and the greater part of an Accelerator."""

    by_fsdp = False

    @classmethod
    def _reset_state(cls, *_how: Any, **_named: Any) -> None:
        """Refuse what transformers' Trainer begins with. Errors: ConfigError."""
        raise ConfigError(
            "transformers.Trainer steps through Accelerate's inside, which Shoal does not have; "
            "nearest: a loop of your own with accelerator.prepare, or shoal.parallelize "
            "(docs/huggingface.md); without --as it runs as ever"
        )

    def __init__(self, *_where: Any, **_how: Any) -> None:
        self.world = start_world()
        self.device, self.num_processes = self.world.device, self.world.size
        self.process_index, self.local_process_index = self.world.rank, self.world.local_rank
        self.is_main_process = self.process_index == 0
        self.is_local_main_process = self.local_process_index == 0
        self.is_last_process = self.process_index == self.num_processes - 1
        self.use_distributed = self.num_processes > 1
        self.initialized = True

    @property
    def distributed_type(self) -> DistributedType:
        """As Accelerate would call this run."""
        if self.num_processes == 1:
            return DistributedType.NO
        if self.by_fsdp:
            return DistributedType.FSDP
        on_cpu = self.device.type == "cpu"
        return DistributedType.MULTI_CPU if on_cpu else DistributedType.MULTI_GPU

    def print(self, *values: object, **named: Any) -> None:
        """A line on standard output, from the first process of this machine."""
        if self.is_local_main_process:
            file, end = named.get("file") or sys.stdout, named.get("end", "\n")
            file.write(named.get("sep", " ").join(map(str, values)) + end)

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

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """A function that runs on one process alone."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            return function(*args, **named) if self.process_index == process_index else None

        return call

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs on the first process alone."""
        return self.on_process(function, 0)

    on_local_main_process = on_main_process

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs on the last process alone."""
        return self.on_process(function, self.num_processes - 1)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of a list, tensor or dict of lists; the first ones hold one more."""
        yield self._part(inputs, apply_padding)

    def _part(self, inputs: Any, padded: bool) -> Any:
        if isinstance(inputs, dict):
            return {name: self._part(value, padded) for name, value in inputs.items()}
        each, more = divmod(len(inputs), self.num_processes)
        begin = self.process_index * each + min(self.process_index, more)
        mine = inputs[begin : begin + each + (self.process_index < more)]
        if padded and more and self.process_index >= more:
            last = inputs[-1:]
            mine = torch.cat([mine, last]) if isinstance(mine, torch.Tensor) else mine + last
        return mine


class Settings:
    """Arguments kept as attributes: `ProjectConfiguration`, `DataLoaderConfiguration`, …"""

    def __init__(self, project_dir: Any = None, **named: Any) -> None:
        if named.get("comm_hook", "no") != "no":
            raise ConfigError(
                "DistributedDataParallelKwargs: comm_hook: gradients travel in the run's own way; "
                'nearest: shoal.parallelize(…, reduce="bf16")'
            )
        self.project_dir = project_dir
        self.__dict__.update(named)


class GradientAccumulationPlugin:
    """How gradients are accumulated."""

    def __init__(
        self, num_steps: int = 1, adjust_scheduler: bool = True, sync_with_dataloader: bool = True
    ) -> None:
        self.num_steps, self.adjust_scheduler = num_steps, adjust_scheduler
        self.sync_with_dataloader = sync_with_dataloader


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed random, numpy and torch."""
    seed += start_world().rank if device_specific else 0
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def find_executable_batch_size(
    function: Any = None, starting_batch_size: int = 128, reduce_batch_size_fn: Any = None
) -> Any:
    """A function called with a batch size, and with nine tenths of it while memory is short."""
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    def call(*args: Any, **named: Any) -> Any:
        size = starting_batch_size
        while size > 0:
            try:
                return function(size, *args, **named)
            except (torch.OutOfMemoryError, RuntimeError) as failure:
                if "out of memory" not in str(failure) and "can't allocate" not in str(failure):
                    raise
            gc.collect()
            size = reduce_batch_size_fn() if reduce_batch_size_fn else int(size * 0.9)
        raise RuntimeError("No executable batch size found, reached zero.")

    taken = list(inspect.signature(function).parameters)
    if not taken:
        raise TypeError(f"{function.__name__} takes no batch size")
    return functools.wraps(function)(call)


def extract_model_from_parallel(model: Any, *_how: Any, **_named: Any) -> nn.Module:
    """The user's own module."""
    return model.module if hasattr(model, "loop") else model


UTILS: dict[str, Any] = {
    "set_seed": set_seed,
    "DistributedType": DistributedType,
    "DDPCommunicationHookType": DDPCommunicationHookType,
    "GradientAccumulationPlugin": GradientAccumulationPlugin,
    "find_executable_batch_size": find_executable_batch_size,
    "extract_model_from_parallel": extract_model_from_parallel,
    "gather": lambda tensors: gathered(tensors, start_world()),
    "gather_object": lambda objects: gathered(objects, start_world()),
    "wait_for_everyone": lambda: start_world().barrier(),
    "release_memory": lambda *objects: [None for _ in objects],
}
for _name in (
    *("ProjectConfiguration", "DataLoaderConfiguration", "DistributedDataParallelKwargs"),
    *("AutocastKwargs", "GradScalerKwargs", "InitProcessGroupKwargs", "ProfileKwargs"),
    "FullyShardedDataParallelPlugin",
):
    UTILS[_name] = type(_name, (Settings,), {})
