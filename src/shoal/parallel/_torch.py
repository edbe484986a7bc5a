"""Private names of torch that this package uses, and what 2.11 lacks; tested on 2.11 and 2.13."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shoal.fabric.device import device_generators

aten = torch.ops.aten

flash_cpu = aten._scaled_dot_product_flash_attention_for_cpu.default
flash_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
flash_device = aten._scaled_dot_product_flash_attention.default
flash_device_backward = aten._scaled_dot_product_flash_attention_backward.default

# Names and no functions of ours: each is called many times in a step.
version_counter: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Count of in-place writes into a tensor; writes through `.data` do not count."""
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that runs on this thread, from 0; −1: none runs."""
function_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack
"""The innermost transform of torch.func that runs (vmap, grad); None: none runs."""
function_modes: Callable[[], list[AbstractContextManager[object]]] = (
    _get_current_function_mode_stack
)
"""Active torch function modes, the outermost first (rounding to fp16)."""

__all__ = [
    "BatchNorm",
    "Convolution",
    "TorchDispatchMode",
    "UncompiledMode",
    "clear_forward_order",
    "disable_modes_and_hooks",
    "drop_process_groups",
    "enable_version_counter",
    "end_unit_backward",
    "flash_cpu",
    "flash_cpu_backward",
    "flash_device",
    "flash_device_backward",
    "function_modes",
    "function_transform",
    "get_compile_cache",
    "get_generators",
    "graph_task_id",
    "in_backward",
    "join_unit_forward",
    "keep_saved_tensors",
    "keep_version",
    "pytree",
    "reduce_unused_gradients",
    "set_post_forward_mesh",
    "start_unit_backward",
    "version_counter",
]


class UncompiledMode(TorchDispatchMode):
    """A dispatch mode that never runs under torch.compile.

    torch's own guard would import the compiler.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def get_generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that a pass on `device` draws from: the CPU's and the device's own."""
    return [torch.default_generator, *device_generators(device)]


def get_compile_cache() -> Path:
    """Return the folder where torch.compile keeps its generated code; imports the compiler."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def in_backward() -> bool:
    """Return whether autograd runs on this thread, so that a called module is being recomputed."""
    return graph_task_id() >= 0


def keep_saved_tensors() -> Callable[[], None]:
    """Keep the tensors that compiled code saves for a second backward pass; return the undo.

    By default a backward pass overwrites these buffers, and torch refuses `retain_graph`.
    """
    from torch._functorch import config

    settings = config.patch(donated_buffer=False)
    settings.__enter__()
    return lambda: settings.__exit__(None, None, None)


def enable_version_counter() -> AbstractContextManager[None]:
    """Return a guard under which in-place writes below autograd bump the version counter."""
    key = torch._C.DispatchKey.ADInplaceOrView
    return torch._C._SetExcludeDispatchKeyGuard(key, False)


def drop_process_groups(shard: Any) -> None:
    """Drop the process groups that FSDP keeps with a module that gathers no more."""
    state = shard._get_fsdp_state()  # 2.13 has several groups of parameters, earlier ones one
    kept = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for parameters in filter(None, kept):
        for info in filter(None, (parameters.mesh_info, parameters.post_forward_mesh_info)):
            for name in [name for name in vars(info) if name.endswith("process_group")]:
                setattr(info, name, None)


def clear_forward_order(shard: Any) -> None:
    """Make FSDP forget forward passes that no backward pass follows, as those of an evaluation.

    Otherwise the next backward pass prefetches their units without need. Under hsdp, where other
    replicas ran other units, FSDP then also sums zeros for them, and the other replicas wait.
    """
    state = shard._get_fsdp_state()
    order = getattr(state._comm_ctx, "post_forward_order", [])  # made in the first forward pass
    order.clear()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in filter(None, groups):
        group._post_forward_indices.clear()


@contextmanager
def disable_modes_and_hooks() -> Iterator[None]:
    """Hide what runs inside from every observer of the forward pass.

    No dispatch mode (selective recompute) and no saved-tensor hook (recompute, offload) sees it.
    The format of matrix products stays: autocast and function modes remain active.
    """
    with (
        _disable_current_modes(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        yield


def join_unit_forward(shard: Any) -> None:
    """Gather and reshard a `fully_shard` unit as its forward pass does, without a forward pass.

    Args:
        shard: one FSDPModule, inside of a forward pass of the root.
    """
    state = shard._get_fsdp_state()
    # FSDP reuses the tensors that it makes at the first gather, so none may be of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        state._pre_forward(shard, (), {})
        state._post_forward(shard, (), ())


def start_unit_backward(shard: Any, gradient: torch.Tensor) -> None:
    """Gather a `fully_shard` unit, and prefetch the one before it, as its backward pass does."""
    shard._get_fsdp_state()._pre_backward(gradient)


def end_unit_backward(shard: Any) -> bool:
    """Reduce a `fully_shard` unit's gradients, zeros for unused ones, and reshard it.

    Returns:
        Whether this was due: False if the hook of its inputs has done so before.
    """
    state = shard._get_fsdp_state()  # 2.13 has several groups of parameters, earlier ones one
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    due = [
        group
        for group in reversed([*filter(None, groups)])
        if group._training_state.name != "POST_BACKWARD"
    ]
    for group in due:
        group.post_backward()
    return bool(due)


def set_post_forward_mesh(unit: Any, mesh: DeviceMesh) -> None:
    """Let a unit of `fully_shard` stay sharded over the last of two mesh axes between its passes.

    Args:
        unit: wrapped with `reshard_after_forward`. torch would make new process groups for each
            unit if that argument were a number.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    state = unit._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        group.post_forward_mesh_info = info
        for held in group.fsdp_params:
            held.post_forward_mesh_info = info
            whole = torch.empty(held._orig_size, device="meta")
            held._init_sharded_post_forward_param_metadata(whole)


def reduce_unused_gradients(shard: Any) -> None:
    """Make a `fully_shard` unit send zeros for parameters that a backward pass left unused.

    Args:
        shard: one FSDPModule. torch 2.13 has a switch for this. On 2.11 the patched `post_backward`
            fills in zeros where FSDP would leave parameters out.
    """
    if hasattr(shard, "set_reduce_scatter_unused_params"):
        shard.set_reduce_scatter_unused_params(True, recurse=False)
        return
    group = shard._get_fsdp_state()._fsdp_param_group
    if group is None:  # no parameters of its own
        return
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        for held in group.fsdp_params if group.reduce_grads else ():
            whole = getattr(held, "_unsharded_param", None)
            if whole is None or not whole.requires_grad or whole.grad is not None:
                continue
            if held.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        reduce(*unused)

    group.post_backward = post_backward


def keep_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context that leaves a tensor's version counter as it was."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)
