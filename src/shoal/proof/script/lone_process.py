"""The one process of a proof, seen by the script as rank 0 of the layout's processes.

The script reads rank and size as before, so that its loops have the same length. A broadcast from
rank 0 and a barrier do nothing. Any other collective of the script's own needs the other ranks'
numbers, so the script ends there, and the report names the call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from shoal.base.attribute_patch import patch_attribute
from shoal.fabric import World
from shoal.proof.script.script_end import ScriptEnd
from shoal.proof.script.script_frames import calling_line, is_called_by_library

REFUSED = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "batch_isend_irecv", "gather",
    "gather_object", "irecv", "isend", "new_group", "new_subgroups", "recv", "recv_object_list",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list",
    "send", "send_object_list",
)  # fmt: skip
WITHOUT_EFFECT = (
    "barrier", "broadcast", "broadcast_object_list", "destroy_process_group",
    "init_process_group", "monitored_barrier",
)  # fmt: skip
OF_A_WORLD = (
    "all_reduce", "all_reduce_max", "all_reduce_min", "all_gather", "gather", "gather_json",
)  # fmt: skip


@contextmanager
def answer_alone(processes: int) -> Iterator[None]:
    """Show the script rank 0 of some processes, and end it at a collective, while it is open."""
    shown = {"RANK": "0", "LOCAL_RANK": "0"}
    shown |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    before = {name: os.environ.get(name) for name in shown}
    answers = {"get_rank": 0, "get_world_size": processes, "is_initialized": True}
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch_attribute(dist, name, _answered(name, answer)))
        for name in (*REFUSED, *WITHOUT_EFFECT):
            if hasattr(dist, name):
                does_nothing = name in WITHOUT_EFFECT
                method = _refused(getattr(dist, name), f"torch.distributed.{name}", does_nothing)
                stack.enter_context(patch_attribute(dist, name, method))
        for name in OF_A_WORLD:
            method = _refused(getattr(World, name), f"World.{name}", False)
            stack.enter_context(patch_attribute(World, name, method))
        os.environ.update(shown)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def _answered(name: str, answer: Any) -> Callable[..., Any]:
    right = getattr(dist, name)

    def reply(*values: Any, **named: Any) -> Any:
        return answer if calling_line() else right(*values, **named)

    return reply


def _refused(right: Callable[..., Any], name: str, does_nothing: bool) -> Callable[..., Any]:
    def refuse(*values: Any, **named: Any) -> Any:
        line = calling_line()
        if not line:
            return right(*values, **named)
        if name.endswith("init_process_group") and is_called_by_library():
            raise ScriptEnd(
                f"{line} joins a process group for a library, as Lightning's Trainer does, and one "
                f"process has no other ranks for it; try: the module in a loop of your own, or "
                f"--layouts of `shoal prove` on the model"
            )
        if does_nothing:
            return None
        raise ScriptEnd(
            f"{line} calls {name}, for which one process has no other ranks; try: run.total for "
            f"counts, or the sum inside of the model or the loss"
        )

    return refuse
