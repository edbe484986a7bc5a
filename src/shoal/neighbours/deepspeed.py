"""Answers a script's `import deepspeed` after one line, `import shoal.neighbours.deepspeed`.

The script stays as it is. Its engine is a run of Shoal (`deepspeed_engine.py`), its configuration
is read key by key (`deepspeed_config.py`); what DeepSpeed has beyond that is refused by name.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shoal.base.errors import ConfigError
from shoal.fabric import start_world
from shoal.neighbours import deepspeed_engine, stand_in
from shoal.neighbours import without_cuda as without_cuda
from shoal.neighbours.deepspeed_engine import Engine, installed

__version__ = installed() or "0.19.8"
logger = logging.getLogger("DeepSpeed")

NEAREST = {
    "PipelineModule": 'the module as it is, and shoal.parallelize(…, layout="pp", sample=…)',
    "init_inference": "run.predict(inputs), or a library that serves",
    "tp_model_init": 'shoal.parallelize(…, layout={"tp": 2}, sample=…)',
    "OnDevice": "a function that builds the model, handed to shoal.parallelize",
}


def init_distributed(dist_backend: str | None = None, *_args: Any, **_named: Any) -> None:
    """Meet the other processes, as Shoal does; a group that exists is adopted.

    DeepSpeed makes a group of one process, too, and scripts ask torch for it.
    """
    if start_world().size == 1 and not dist.is_initialized():
        vars(dist)[without_cuda.JOIN](store=dist.HashStore(), rank=0, world_size=1)


@functools.wraps(deepspeed_engine.initialize)
def initialize(*args: Any, **named: Any) -> tuple[Engine, Any, Any, Any]:
    """As `deepspeed_engine.initialize`, in a group of processes."""
    init_distributed()
    return deepspeed_engine.initialize(*args, **named)


class _Engines(type):
    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, Engine)


class DeepSpeedEngine(metaclass=_Engines):
    """The engine's class; called, as some texts print it, it is `initialize`."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """As `initialize`, with a line that says so."""
        made = initialize(*args, **named)
        said = (
            "DeepSpeedEngine(…) gives no four values to unpack; taken for deepspeed.initialize(…)"
        )
        made[0].run.recorder.notice(said)
        return made


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed, --deepspeed_config and --local_rank where a parser lacks them."""
    known = parser._option_string_actions
    if "--deepspeed" not in known:
        parser.add_argument("--deepspeed", action="store_true", help="use DeepSpeed's calls")
    if "--deepspeed_config" not in known:
        parser.add_argument("--deepspeed_config", help="a file of HJSON")
    return parser


class _Init:
    """`zero.Init`: weights are built whole, once per machine, and cut by `initialize`."""

    def __init__(self, *_args: Any, **_named: Any) -> None:
        """Takes what DeepSpeed takes: where and how to build, which Shoal decides by the plan."""

    def __enter__(self) -> _Init:
        return self

    def __exit__(self, *_what: object) -> None:
        """Nothing was changed."""


@contextmanager
def _gathered(params: Any, *_how: Any, **_named: Any) -> Iterator[None]:
    """`zero.GatheredParameters`, where weights are whole; the parts of stage 3 are refused."""
    held = [params] if isinstance(params, torch.Tensor) else list(params)
    if any(hasattr(one, "device_mesh") for one in held):
        raise ConfigError(
            "zero.GatheredParameters: after initialize a rank holds parts of stage 3's weights; "
            "nearest: before initialize, or engine.module_state_dict() to read them"
        )
    yield


class RepeatingLoader:
    """A loader that begins again where it ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def _named(device: torch.device, index: int | None = None) -> str:
    kind = device.type
    return kind if index is None or kind == "cpu" else f"{kind}:{index}"


class _Accelerator:
    """What scripts ask `get_accelerator()`."""

    def __getattr__(self, name: str) -> Any:
        if name in ("device_name", "current_device_name"):
            return functools.partial(_named, self.current_device())
        on_cpu = self.current_device().type == "cpu"
        places = (torch.cuda, torch.cpu) if on_cpu else (torch.accelerator, torch.cuda)
        for place in places:
            if not name.startswith("_") and hasattr(place, name):
                return getattr(place, name)
        raise stand_in.Lacking(f"get_accelerator().{name} is not answered by Shoal")

    def current_device(self) -> torch.device:
        """The device of this process."""
        return torch.accelerator.current_accelerator() or torch.device("cpu")

    def set_device(self, index: int) -> None:
        """Nothing: a process gets its device where the processes meet."""

    def communication_backend_name(self) -> str:
        """nccl on CUDA, else gloo."""
        return "nccl" if self.current_device().type == "cuda" else "gloo"

    def manual_seed_all(self, seed: int) -> None:
        """Seed this process's generators."""
        torch.manual_seed(seed)

    manual_seed = manual_seed_all

    def is_available(self) -> bool:
        """A CPU is always there."""
        return True


def _log_dist(message: str, ranks: Any = None, level: int = logging.INFO) -> None:
    """Log on some ranks; none and −1 mean all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or rank in ranks or -1 in ranks:
        logger.log(level, message)


def _adam(parameters: Any, decoupled: bool, bias_correction: bool, **named: Any) -> Any:
    if not bias_correction:
        raise ConfigError("bias_correction = False: torch's Adam always corrects; nearest: True")
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(parameters, **named)


def _cpu_adam(
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> Any:
    """`DeepSpeedCPUAdam`, in its order of arguments; states are always fp32 here."""
    named = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return _adam(model_params, adamw_mode, bias_correction, amsgrad=amsgrad, **named)


def _fused_adam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> Any:
    """`FusedAdam`, in its order of arguments."""
    named = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return _adam(params, adam_w_mode, bias_correction, amsgrad=amsgrad, **named)


def _see_memory(message: str, force: bool = False, ranks: Any = None) -> None:
    """`see_memory_usage`: a line where it is asked for by force."""
    if force:
        _log_dist(f"{message}: {torch.cuda.memory_allocated()} bytes on the device", ranks)


def _local_rank() -> int:
    return start_world().local_rank


_comm = {name: value for name, value in vars(dist).items() if not name.startswith("_")}
_comm |= {"init_distributed": init_distributed, "get_local_rank": _local_rank}
_zero = {"Init": _Init, "GatheredParameters": _gathered}
stand_in.answer(
    "deepspeed",
    sys.modules[__name__],
    {
        "zero": _zero,
        "runtime.zero": _zero,
        "runtime.utils": {"set_random_seed": torch.manual_seed, "see_memory_usage": _see_memory},
        "runtime.engine": {"DeepSpeedEngine": DeepSpeedEngine},
        "runtime.dataloader": {"RepeatingLoader": RepeatingLoader},
        "utils": {"logger": logger, "log_dist": _log_dist, "RepeatingLoader": RepeatingLoader},
        "utils.logging": {"logger": logger, "log_dist": _log_dist},
        "ops.adam": {"DeepSpeedCPUAdam": _cpu_adam, "FusedAdam": _fused_adam},
        "accelerator": {"get_accelerator": _Accelerator},
        "comm": _comm,
    },
    NEAREST,
)
get_accelerator = _Accelerator
log_dist = _log_dist
