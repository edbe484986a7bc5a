"""Process state of Accelerate's scripts, and the small functions of `accelerate.utils`."""

from __future__ import annotations

import functools
import gc
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from shoal.base.errors import ConfigError, check_choice, format_choice_error, shorten
from shoal.fabric import start_world
from shoal.neighbours.accelerate_data import (
    apply_to_tensors,
    has_only_tensors,
    move_batch,
    skip_first_batches,
)
from shoal.neighbours.library_loop import ModelWrapper
from shoal.neighbours.module_stand_in import MissingNameError
from shoal.trainer.jobs.out_of_memory import is_out_of_memory
from shoal.trainer.run_folder.extra_state import decode_value, encode_value

_made: Any = Enum  # of names that mypy need not read
KINDS = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"),
    *("MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM"),
)
DistributedType = _made("DistributedType", {name: name for name in KINDS}, type=str)
"""Kinds of process groups, by Accelerate's names."""
HOOKS = {name.upper(): name for name in ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")}
DDPCommunicationHookType = _made("DDPCommunicationHookType", HOOKS, type=str)
"""Compression of gradients under DDP; Shoal's facade supports none."""


class PartialState:
    """Accelerate's `PartialState`, and the base class of `Accelerator`."""

    by_fsdp = debug = fork_launched = False
    initialized = True
    deepspeed_plugin = fsdp_plugin = megatron_lm_plugin = dynamo_plugin = parallelism_config = None

    @classmethod
    def _reset_state(cls, *_how: Any, **_named: Any) -> None:
        """Refuse the first call of transformers' Trainer.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "transformers.Trainer steps through Accelerate's inside, which Shoal does not have; "
            "try: a loop of your own with accelerator.prepare, or shoal.parallelize "
            "(docs/start/huggingface.md); without --as it runs as ever"
        )

    def __init__(self, *_where: Any, **_how: Any) -> None:
        self.world = start_world()
        self.device, self.num_processes = self.world.device, self.world.size
        self.process_index, self.local_process_index = self.world.rank, self.world.local_rank
        self.is_main_process = self.process_index == 0
        self.is_local_main_process = self.local_process_index == 0
        self.is_last_process = self.process_index == self.num_processes - 1
        self.use_distributed = self.multi_device = self.num_processes > 1

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type.value}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )

    @property
    def distributed_type(self) -> Any:
        """Accelerate's name for this kind of run."""
        many = "FSDP" if self.by_fsdp else f"MULTI_{'CPU' if self.device.type == 'cpu' else 'GPU'}"
        return DistributedType[many if self.use_distributed else "NO"]

    def print(self, *values: object, **named: Any) -> None:
        """Print a line from the first process of this machine."""
        if self.is_local_main_process:
            print(*values, **named)  # noqa: T201  # what the script asked for

    def wait_for_everyone(self) -> None:
        """Wait at a barrier."""
        self.world.barrier()

    def gather(self, tensors: Any) -> Any:
        """Concatenate all processes' tensors along dim 0; plain values become one list."""
        if not has_only_tensors(tensors):
            return self.gather_object(tensors)
        return apply_to_tensors(tensors, lambda one: self._rows(one).flatten(0, 1))

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of each process."""
        own = tensor.detach()  # a loss is reported, not differentiated
        return self.world.all_gather(own.reshape(1) if not own.dim() else own.contiguous())

    def gather_object(self, objects: Any) -> list[Any]:
        """Concatenate all processes' lists of plain values."""
        own = objects if isinstance(objects, list) else [objects]
        told = self.world.gather_json(encode_value(own, "gather_object"))
        return [one for part in told for one in decode_value(part)]

    def broadcast_object_list(self, object_list: list[Any], from_process: int = 0) -> list[Any]:
        """Overwrite the list with one process's plain values, on all."""
        own = object_list if self.process_index == from_process else None
        told = self.world.broadcast_json(encode_value(own, "broadcast_object_list"), from_process)
        object_list[:] = decode_value(told)
        return object_list

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """All-reduce tensors by sum, mean or max; "none" returns each process's own."""
        check_choice("reduction", reduction, ("sum", "mean", "max", "none"))

        def total(one: torch.Tensor) -> torch.Tensor:
            made = one.detach().clone().to(self.device)
            if reduction == "max":
                return self._rows(made).amax(0).reshape(one.shape)
            if reduction != "none":
                self.world.all_reduce(made)
            return made / self.num_processes if reduction == "mean" else made

        return apply_to_tensors(tensor, total)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad tensors along a dim to the longest of all processes, so that they gather."""

        def filled(one: torch.Tensor) -> torch.Tensor:
            if not -one.dim() <= dim < one.dim():
                return one
            short = self.world.all_reduce_max(one.shape[dim]) - one.shape[dim]
            ends = [0, 0] * (one.dim() - 1 - dim % one.dim())  # of dims, from the last one on
            ends += [short, 0] if pad_first else [0, short]
            return functional.pad(one, ends, value=pad_index)

        return apply_to_tensors(tensor, filled)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the enclosed code on the first process before the others."""
        if not self.is_main_process:
            self.world.barrier()
        yield
        if self.is_main_process:
            self.world.barrier()

    local_main_process_first = main_process_first

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Return a function that runs on one process alone; −1: on the last."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        mine = process_index in (self.process_index, self.process_index - self.num_processes)

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            return function(*args, **named) if mine else None

        return call

    on_main_process = functools.partialmethod(on_process, process_index=0)
    on_last_process = functools.partialmethod(on_process, process_index=-1)

    def on_local_process(self, function: Any = None, local_process_index: int = 0) -> Any:
        """Return `function` made to run only on one process of every machine.

        Args:
            local_process_index: the process among those of its machine.
        """
        own = local_process_index == self.local_process_index
        return self.on_process(function, self.process_index if own else None)

    on_local_main_process = on_local_process

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's part of a list, tensor or dict; the first get one more."""
        yield self._select_own_items(inputs, apply_padding)

    def _select_own_items(self, inputs: Any, padded: bool) -> Any:
        if isinstance(inputs, dict):
            return {name: self._select_own_items(value, padded) for name, value in inputs.items()}
        each, more = divmod(len(inputs), self.num_processes)
        begin = self.process_index * each + min(self.process_index, more)
        mine = inputs[begin : begin + each + (self.process_index < more)]
        if padded and more and self.process_index >= more:
            last = inputs[-1:]
            mine = torch.cat([mine, last]) if isinstance(mine, torch.Tensor) else mine + last
        return mine


DIVIDED = 'shoal.parallelize(…, layout={"dp_shard": 2, "tp": 2}, sample=…)'
DEEPSPEED = "import shoal.neighbours.deepspeed, and DeepSpeed's own calls"
COMPILED = 'shoal.parallelize(…, compile="blocks")'
REFUSED = {
    **dict.fromkeys(("megatron_lm_plugin", "torch_tp_plugin", "parallelism_config"), DIVIDED),
    **dict.fromkeys(("deepspeed_plugin", "deepspeed_plugins"), DEEPSPEED),
    **dict.fromkeys(("dynamo_plugin", "dynamo_backend"), COMPILED),
    "comm_hook": 'shoal.parallelize(…, reduce="bf16"); gradients travel as the plan says',
    "dispatch_batches": "False; every process reads its own batches",
    "use_stateful_dataloader": "accelerator.skip_first_batches; save_state keeps an epoch's order, "
    "not the place in it",
}
"""Refused arguments, whose setting or numbers differ in Shoal → the nearest setting."""
NEAREST = {
    "init_empty_weights": "a function that builds the model, handed to shoal.parallelize",
    **dict.fromkeys(("DeepSpeedPlugin", "DummyOptim", "DummyScheduler"), DEEPSPEED),
    **dict.fromkeys(("MegatronLMDummyScheduler", "ParallelismConfig"), DIVIDED),
    **dict.fromkeys(("maybe_context_parallel", "torch_device_mesh"), DIVIDED),
    "TorchDynamoPlugin": COMPILED,
    "prepare_pippy": 'shoal.parallelize(…, layout="pp", sample=…)',
    "notebook_launcher": "shoal run --as accelerate --processes N -- script.py",
    "GeneralTracker": "accelerator.log(values, step=…)",
}
"""Last names of refused objects → the nearest replacement."""
ARGUMENTS = {
    "DataLoaderConfiguration": "split_batches dispatch_batches even_batches use_seedable_sampler "
    "data_seed non_blocking use_stateful_dataloader custom_classes",
    "GradientAccumulationPlugin": "num_steps adjust_scheduler sync_with_dataloader sync_each_batch",
    "ProjectConfiguration": "project_dir logging_dir automatic_checkpoint_naming total_limit "
    "iteration save_on_each_node",
}
"""Classes → their positional arguments, in order."""
DEFAULTS = {
    **dict.fromkeys(("num_steps", "gradient_accumulation_steps"), 1),
    **dict.fromkeys(("adjust_scheduler", "sync_with_dataloader", "even_batches"), True),
    **dict.fromkeys(("device_placement", "step_scheduler_with_optimizer"), True),
    "iteration": 0,
}
"""Defaults of arguments; of all others None."""


class ArgumentSettings:
    """Arguments as attributes, as of an `Accelerator` or a `ProjectConfiguration`."""

    order = ""

    def __init__(self, *values: Any, **named: Any) -> None:
        kind, known = type(self).__name__, self.order.split()
        said = {**dict(zip(known, values, strict=False)), **named}
        for name, value in said.items():
            if known and name not in known:
                raise ConfigError(f"{kind}: {format_choice_error('an argument', name, known)}")
            if name in REFUSED and value not in (None, False, "no", "NO"):
                raise ConfigError(f"{kind}: {name} = {shorten(str(value))}: try: {REFUSED[name]}")
        self.__dict__.update({name: DEFAULTS.get(name) for name in known} | said)


class HfDeepSpeedConfig:
    """Base of transformers' own class where DeepSpeed is installed; seldom instantiated."""

    def __init__(self, *_config: Any) -> None:
        raise MissingNameError("accelerate.utils.deepspeed.HfDeepSpeedConfig", DEEPSPEED)


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
    """Wrap a function of a batch size: retry with nine tenths of it while out of memory."""
    if function is None:
        more = (starting_batch_size, reduce_batch_size_fn)
        return lambda one: find_executable_batch_size(one, *more)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        size = starting_batch_size
        while size > 0:
            try:
                return function(size, *args, **named)
            except (RuntimeError, MemoryError) as failure:
                if not is_out_of_memory(failure):
                    raise
            gc.collect()
            size = reduce_batch_size_fn() if reduce_batch_size_fn else int(size * 0.9)
        raise RuntimeError("No executable batch size found, reached zero.")

    return call


def list_state_numbers(place: Path) -> list[int]:
    """List the numbers of the states in a folder, ascending.

    >>> list_state_numbers(Path("nowhere"))
    []
    """
    names = [one.name.rpartition("_") for one in place.glob("checkpoint_*")]
    return sorted(int(number) for _, _, number in names if number.isdigit())


def delete_old_states(place: Path, limit: int) -> None:
    """Delete all states of a folder but the `limit` newest."""
    for number in list_state_numbers(place)[:-limit]:
        shutil.rmtree(place / f"checkpoint_{number}")


def find_nearest_state(folder: Path) -> str:
    """Return a folder beside or in `folder` that holds a state of `save_state`; "" without."""
    places = [folder, folder / "checkpoints", folder.parent]
    found = [
        place / f"checkpoint_{number}" for place in places for number in list_state_numbers(place)
    ]
    return str(found[-1]) if found else ""


def extract_model_from_parallel(model: Any, *_how: Any, **_named: Any) -> nn.Module:
    """Return the user's own module."""
    return model.module if isinstance(model, ModelWrapper) else model


def progress(*args: Any, main_process_only: bool = True, **named: Any) -> Any:
    """Return a `tqdm` that shows on the first process of a machine alone."""
    from tqdm.auto import tqdm

    return tqdm(*args, **named, disable=main_process_only and start_world().local_rank != 0)


def _bind_state_method(method: str) -> Callable[..., Any]:
    """Return a function of `accelerate.utils` that is a method of `PartialState` here."""
    return lambda *args, **named: getattr(PartialState(), method)(*args, **named)


HELD: dict[str, Any] = {
    **dict.fromkeys(("AcceleratorState", "PartialState"), PartialState),
    "HfDeepSpeedConfig": HfDeepSpeedConfig,
    "skip_first_batches": skip_first_batches,
    "set_seed": set_seed,
    "DistributedType": DistributedType,
    "DDPCommunicationHookType": DDPCommunicationHookType,
    "find_executable_batch_size": find_executable_batch_size,
    "extract_model_from_parallel": extract_model_from_parallel,
    "tqdm": progress,
    "send_to_device": lambda tensor, device, *_how, **_named: move_batch(tensor, device),
    "reduce": lambda tensor, reduction="mean", scale=1.0: _bind_state_method("reduce")(
        tensor, reduction
    ),
    **{
        name: _bind_state_method(name)
        for name in ("gather", "pad_across_processes", "wait_for_everyone")
    },
    **{name: _bind_state_method(name) for name in ("gather_object", "broadcast_object_list")},
    "SAFE_WEIGHTS_NAME": "model.safetensors",
    "release_memory": lambda *objects: [None for _ in objects],
    "is_bf16_available": lambda *_how: True,
}
"""Objects that scripts import beside an Accelerator, by name."""
for _name in (
    *("DistributedDataParallelKwargs", "AutocastKwargs", "GradScalerKwargs", "ProfileKwargs"),
    *("InitProcessGroupKwargs", "FullyShardedDataParallelPlugin", *ARGUMENTS),
):
    HELD[_name] = type(_name, (ArgumentSettings,), {"order": ARGUMENTS.get(_name, "")})
