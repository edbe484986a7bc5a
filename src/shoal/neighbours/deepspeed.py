"""Facade of DeepSpeed: serve a script's `import deepspeed` from runs of Shoal.

One line before the script's own enables it: `import shoal.neighbours.deepspeed`. The script stays
as it is. Its engine is a run of Shoal (`deepspeed_engine.py`), its configuration is read key by key
(`deepspeed_config.py`); other names of DeepSpeed are refused.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.base.errors import ConfigError
from shoal.fabric import start_world
from shoal.neighbours import deepspeed_engine, module_stand_in
from shoal.neighbours import without_cuda as without_cuda
from shoal.neighbours.configs.deepspeed_config import read
from shoal.neighbours.configs.deepspeed_rates import SCHEDULES, DeepSpeedSchedule
from shoal.neighbours.configs.written_config import load_written, read_table
from shoal.neighbours.deepspeed_checkpoints import read_whole
from shoal.neighbours.deepspeed_engine import Engine, installed_version
from shoal.neighbours.deepspeed_gathering import gather_parameters
from shoal.neighbours.outputs.final_saves import write_pickle, write_tensors

__version__ = installed_version() or "0.19.8"
logger = logging.getLogger("DeepSpeed")

NEAREST = {
    "PipelineModule": 'the module as it is, and shoal.parallelize(…, layout="pp", sample=…)',
    "init_inference": "run.predict(inputs), or a library that serves",
    "tp_model_init": 'shoal.parallelize(…, layout={"tp": 2}, sample=…)',
    "OnDevice": "a function that builds the model, handed to shoal.parallelize",
    "MiCS_Init": 'shoal.parallelize(…, layout={"dp_replicate": 2, "dp_shard": 2, "zero": 3})',
    "MoE": 'shoal.parallelize(…, layout={"ep": 2}, sample=…)',
    **dict.fromkeys(
        ("OffloadDeviceEnum", "OffloadStateTypeEnum"),
        '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
    ),
}


def init_distributed(dist_backend: str | None = None, *_args: Any, **_named: Any) -> None:
    """Join the process group, as Shoal does; use a group that exists.

    DeepSpeed makes a group of one process, too, and scripts ask torch for it.
    """
    if start_world().size == 1 and not dist.is_initialized():
        vars(dist)[without_cuda.JOIN](store=dist.HashStore(), rank=0, world_size=1)


@functools.wraps(deepspeed_engine.initialize)
def initialize(*args: Any, **named: Any) -> tuple[Engine, Any, Any, Any]:
    """Return `deepspeed_engine.initialize`'s result, after joining the process group."""
    init_distributed()
    return deepspeed_engine.initialize(*args, **named)


class _Engines(type):
    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, Engine)


class DeepSpeedEngine(metaclass=_Engines):
    """Class of the engine; calling it, as some tutorials do, is `initialize`."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """Call `initialize`, and print a line about it."""
        made = initialize(*args, **named)
        said = (
            "DeepSpeedEngine(…) gives no four values to unpack; taken for deepspeed.initialize(…)"
        )
        made[0].run.recorder.notice(said)
        return made


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config where a parser lacks them."""
    known = parser._option_string_actions
    if "--deepspeed" not in known:
        parser.add_argument("--deepspeed", action="store_true", help="use DeepSpeed's calls")
    if "--deepspeed_config" not in known:
        parser.add_argument("--deepspeed_config", help="a file of HJSON")
    return parser


class _Init:
    """Context `zero.Init`: weights are built whole, once per machine, and sharded by `initialize`.

    Unless its configuration asks for a narrow dtype, tensors made inside are fp32, as in DeepSpeed:
    a model of transformers may ask for bf16 itself.
    """

    def __init__(
        self, *_args: Any, config_dict_or_path: Any = None, enabled: bool = True, **_named: Any
    ) -> None:
        self.was: dict[str, Any] = {}
        told = config_dict_or_path if enabled and config_dict_or_path is not None else None
        config = {} if told is None else load_written(told, "zero.Init")
        narrow = [config.get(name) or {} for name in ("fp16", "bf16", "bfloat16")]
        self.wide = told is not None and not any(one.get("enabled") is True for one in narrow)

    def __enter__(self) -> _Init:
        for name in MADE_WIDE if self.wide else ():
            self.was[name] = getattr(torch, name)
            setattr(torch, name, _force_fp32(self.was[name]))
        return self

    def __exit__(self, *_what: object) -> None:
        """Restore torch's own functions."""
        for name, make in self.was.items():
            setattr(torch, name, make)


MADE_WIDE = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")


def _force_fp32(make: Any) -> Any:
    """Wrap a tensor factory so that floating-point tensors are fp32."""

    @functools.wraps(make)
    def made(*args: Any, **named: Any) -> torch.Tensor:
        one: torch.Tensor = make(*args, **named)
        return one.float() if one.is_floating_point() else one

    return made


@contextmanager
def _gathered(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Serve `zero.GatheredParameters`: whole weights of stage 3; the other stages have them."""
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    held: list[Any] = [one for one in listed if enabled and hasattr(one, "device_mesh")]
    with ExitStack() as stack:
        for run in [engine.run for engine in deepspeed_engine.live_engines()]:
            known = set(map(id, run.model.parameters()))
            own = [one for one in held if id(one) in known]
            if own:
                stack.enter_context(gather_parameters(own, run, modifier_rank))
        yield


class RepeatingLoader:
    """Loader that starts again at its end."""

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
    """Object that `get_accelerator()` returns to scripts."""

    def __getattr__(self, name: str) -> Any:
        device = self.current_device()
        if name in ("device_name", "current_device_name"):
            return functools.partial(_named, device)
        known = {
            "is_available": True,
            "is_bf16_supported": device.type == "cpu" or torch.cuda.is_bf16_supported(),
            "is_synchronized_device": device.type == "cpu",
            "communication_backend_name": "nccl" if device.type == "cuda" else "gloo",
            "set_device": None,  # a process gets its device when it joins the group
        }
        if name in known:
            return lambda *_args: known[name]
        on_cpu = device.type == "cpu"
        places = (torch.cpu, torch.cuda) if on_cpu else (torch.accelerator, torch.cuda)
        for place in places:
            if not name.startswith("_") and hasattr(place, name):
                return getattr(place, name)
        raise module_stand_in.MissingNameError(f"get_accelerator().{name}", None)

    def current_device(self) -> torch.device:
        """Return the device of this process."""
        return torch.accelerator.current_accelerator() or torch.device("cpu")

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this kind of device."""
        return tensor.device.type == self.current_device().type

    def pin_memory(self, tensor: torch.Tensor, *_how: Any) -> torch.Tensor:
        """Return the tensor in pinned memory."""
        return tensor if self.current_device().type == "cpu" else tensor.pin_memory()

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)


def _log_dist(message: str, ranks: Any = None, level: int = logging.INFO) -> None:
    """Log on some ranks; none and −1 mean all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or rank in ranks or -1 in ranks:
        logger.log(level, message)


ADAMS = {
    "DeepSpeedCPUAdam": "lr bias_correction betas eps weight_decay amsgrad adamw_mode fp32_states",
    "FusedAdam": "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
}
"""DeepSpeed's own Adams, and their arguments in order; states are always fp32 in Shoal."""


def _adam(name: str, parameters: Any, *values: Any, **named: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer with DeepSpeed's defaults.

    Raises:
        ConfigError: bias correction is off.
    """
    said = {**dict(zip(ADAMS[name].split(), values, strict=False)), **named}
    decoupled = said.pop("adamw_mode", said.pop("adam_w_mode", True))
    for unread in ("fp32_states", "fp32_optimizer_states", "set_grad_none"):
        said.pop(unread, None)
    if not said.pop("bias_correction", True):
        raise ConfigError("bias_correction = False: torch's Adam always corrects; try: True")
    made = torch.optim.AdamW if decoupled else torch.optim.Adam
    return made(parameters, **{"weight_decay": 0.0, **said})


def _checkpoint(function: Any, *inputs: Any) -> Any:
    """Serve `checkpointing.checkpoint`: recompute a function's activations in the backward pass."""
    return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)


def _leaves(model: Any, *_which: Any, **_how: Any) -> list[Any]:
    """Serve `set_z3_leaf_modules`: do nothing, since blocks are gathered whole."""
    return []


def _schedule(name: str, optimizer: Any, *values: Any, **named: Any) -> DeepSpeedSchedule:
    """Return one of DeepSpeed's schedules for a script; arguments and defaults as in a file."""
    rows = [one for one in read_table("deepspeed_keys") if one.startswith(f"args.{name}.")]
    order = [one.rpartition(".")[2] for one in rows]
    named.pop("last_batch_iteration", None)
    params = {**dict(zip(order, values, strict=False)), **named}
    said = {"scheduler": {"type": name, "params": params}, "train_batch_size": 1}
    read_as = read({**said, "gradient_clipping": 0.0}, data_parallel=1, era=installed_version())
    return DeepSpeedSchedule(optimizer, name, read_as.scheduler_args)


def _see_memory(message: str, force: bool = False, ranks: Any = None) -> None:
    """Serve `see_memory_usage`: log a line if `force` is set."""
    if force:
        _log_dist(f"{message}: {torch.cuda.memory_allocated()} bytes on the device", ranks)


def _zero_to_fp32(
    checkpoint_dir: Any, tag: Any = None, *_how: Any, **_named: Any
) -> dict[str, torch.Tensor]:
    """Serve `get_fp32_state_dict_from_zero_checkpoint`: return whole fp32 weights on the CPU."""
    state = read_whole(checkpoint_dir, tag)
    return {name: one.float() if one.is_floating_point() else one for name, one in state.items()}


def _load_fp32(model: torch.nn.Module, checkpoint_dir: Any, tag: Any = None) -> torch.nn.Module:
    """Serve `load_state_dict_from_zero_checkpoint`: load those weights into a model, on the CPU."""
    model = model.cpu()
    model.load_state_dict(_zero_to_fp32(checkpoint_dir, tag), strict=False)
    return model


def _convert(
    checkpoint_dir: Any,
    output_dir: Any,
    max_shard_size: Any = None,
    safe_serialization: bool = False,
    tag: Any = None,
    **_how: Any,
) -> None:
    """Serve `convert_zero_checkpoint_to_fp32_state_dict`: write one file in `output_dir`."""
    state = _zero_to_fp32(checkpoint_dir, tag)
    if safe_serialization:
        write_tensors(Path(output_dir) / "model.safetensors", state)
    else:
        write_pickle(Path(output_dir) / "pytorch_model.bin", state)


def _local_rank() -> int:
    return start_world().local_rank


_quiet: dict[str, Any] = {"configure": lambda *_a, **_n: None, "is_configured": lambda: True}
_comm = {name: value for name, value in vars(dist).items() if not name.startswith("_")}
_comm |= {"init_distributed": init_distributed, "get_local_rank": _local_rank}
module_stand_in.register_facade(
    "deepspeed",
    sys.modules[__name__],
    {
        "DeepSpeedEngine": DeepSpeedEngine,
        "GatheredParameters": _gathered,
        "Init": _Init,
        "RepeatingLoader": RepeatingLoader,
        "get_accelerator": _Accelerator,
        "convert_zero_checkpoint_to_fp32_state_dict": _convert,
        "get_fp32_state_dict_from_zero_checkpoint": _zero_to_fp32,
        "load_state_dict_from_zero_checkpoint": _load_fp32,
        "log_dist": _log_dist,
        "logger": logger,
        "see_memory_usage": _see_memory,
        "set_random_seed": torch.manual_seed,
        "set_z3_leaf_modules": _leaves,
        **{name: functools.partial(_adam, name) for name in ADAMS},
        **{name: functools.partial(_schedule, name) for name in SCHEDULES},
    },
    NEAREST,
    {
        "runtime.zero": {},
        "checkpointing": {"checkpoint": _checkpoint, **_quiet},
        "comm": _comm,
        "comm.mori": {"is_enabled": lambda: False},
    },
)
