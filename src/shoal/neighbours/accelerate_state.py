"""What Accelerate's scripts ask about processes, and the small things of `accelerate.utils`."""

from __future__ import annotations

import functools
import gc
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.fabric import start_world
from shoal.neighbours.accelerate_data import gathered, moved, padded, reduced

_made: Any = Enum  # of names that mypy need not read
KINDS = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"),
    *("MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM"),
)
DistributedType = _made("DistributedType", {name: name for name in KINDS}, type=str)
"""How processes work together, by Accelerate's names."""
HOOKS = ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")
DDPCommunicationHookType = _made(
    "DDPCommunicationHookType", {name.upper(): name for name in HOOKS}, type=str
)
"""How gradients may travel under DDP; here only as they are."""


class PartialState:
    """This process among the others: `PartialState`, and the greater part of an Accelerator."""

    by_fsdp = debug = fork_launched = False
    deepspeed_plugin = fsdp_plugin = megatron_lm_plugin = dynamo_plugin = parallelism_config = None

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
        self.use_distributed = self.multi_device = self.num_processes > 1
        self.initialized = True

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type.value}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )

    @property
    def distributed_type(self) -> Any:
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

    def gather(self, tensors: Any) -> Any:
        """All processes' tensors, one after another along dim 0; of plain values, one list."""
        return gathered(tensors, self.world)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors summed over processes; or their mean, or the largest."""
        return reduced(tensor, self.world, reduction)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Tensors as long along a dim as the longest of all processes, so that they gather."""
        return padded(tensor, self.world, dim, pad_index, pad_first)

    def broadcast_object_list(self, object_list: list[Any], from_process: int = 0) -> list[Any]:
        """One process's plain values in the place of all others'."""
        object_list[:] = self.world.broadcast_json(object_list, from_process)
        return object_list

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

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """A function that runs on one process of every machine."""
        own = local_process_index == self.local_process_index
        return self.on_process(function, self.process_index if own else -1)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs on the first process alone."""
        return self.on_process(function, 0)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs on the first process of every machine."""
        return self.on_local_process(function, 0)

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


REFUSED = {
    "comm_hook": 'gradients travel as the plan says; nearest: shoal.parallelize(…, reduce="bf16")',
    "dispatch_batches": "every process reads its own batches; nearest: False",
    "use_stateful_dataloader": "save_state keeps an epoch's order, not the place in it; nearest: "
    "accelerator.skip_first_batches",
}
"""Arguments whose numbers would be others here."""


class Settings:
    """Arguments kept as attributes: `ProjectConfiguration`, `DataLoaderConfiguration`, …

    defaults   by name, in the order in which arguments may come without one
    """

    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, *values: Any, **named: Any) -> None:
        said = {**dict(zip(self.defaults, values, strict=False)), **named}
        for name, why in REFUSED.items():
            if said.get(name, "no") not in (None, False, "no"):
                raise ConfigError(f"{type(self).__name__}: {name} = {said[name]}: {why}")
        self.__dict__.update(self.defaults | said)


class HfDeepSpeedConfig:
    """What transformers' own class inherits from where DeepSpeed is installed, and seldom makes."""

    def __init__(self, *_config: Any) -> None:
        raise ConfigError(
            "accelerate.utils.deepspeed.HfDeepSpeedConfig is not answered by Shoal; nearest: "
            "import shoal.neighbours.deepspeed, and DeepSpeed's own calls"
        )


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


def progress(*args: Any, main_process_only: bool = True, **named: Any) -> Any:
    """`tqdm`, on the first process of a machine alone."""
    from tqdm.auto import tqdm

    return tqdm(*args, **named, disable=main_process_only and start_world().local_rank != 0)


def _of_state(method: str) -> Callable[..., Any]:
    """A function of `accelerate.utils` that is a method of `PartialState` here."""
    return lambda *args, **named: getattr(PartialState(), method)(*args, **named)


UTILS: dict[str, Any] = {
    "set_seed": set_seed,
    "DistributedType": DistributedType,
    "DDPCommunicationHookType": DDPCommunicationHookType,
    "find_executable_batch_size": find_executable_batch_size,
    "extract_model_from_parallel": extract_model_from_parallel,
    "tqdm": progress,
    "send_to_device": lambda tensor, device, *_how, **_named: moved(tensor, device),
    "reduce": lambda tensor, reduction="mean", scale=1.0: _of_state("reduce")(tensor, reduction),
    "gather_object": _of_state("gather"),
    **{name: _of_state(name) for name in ("gather", "pad_across_processes", "wait_for_everyone")},
    "broadcast_object_list": _of_state("broadcast_object_list"),
    "release_memory": lambda *objects: [None for _ in objects],
    "is_bf16_available": lambda *_how: True,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "GradientAccumulationPlugin": {
        "num_steps": 1,
        "adjust_scheduler": True,
        "sync_with_dataloader": True,
        "sync_each_batch": False,
    },
    "ProjectConfiguration": {
        "project_dir": None,
        "logging_dir": None,
        "automatic_checkpoint_naming": False,
        "total_limit": None,
        "iteration": 0,
    },
    "DataLoaderConfiguration": {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": False,
        "data_seed": None,
    },
}
"""Classes that keep their arguments → these, with what holds where nobody says them."""
for _name in (
    *("DistributedDataParallelKwargs", "AutocastKwargs", "GradScalerKwargs", "ProfileKwargs"),
    *("InitProcessGroupKwargs", "FullyShardedDataParallelPlugin", *ARGUMENTS),
):
    UTILS[_name] = type(_name, (Settings,), {"defaults": ARGUMENTS.get(_name, {})})
