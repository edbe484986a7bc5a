"""Compile: torch.compile turns every block's forward and backward into fused kernels.

Element-wise work between matrix products (norms, activations, rotary turns, residual sums, casts)
is read and written once instead of once per operation. Blocks are compiled one by one, and equal
ones share the code. Hooks that a layout adds to a block (a new key for dropout, FSDP2's gather,
recompute) stay outside of it as ordinary Python. If one block cannot be compiled, others still are.
In a block whose ranks communicate inside (tp, cp) the code between the collectives is compiled.
Random operations draw from torch's own generators (`fallback_random`), so that dropout is the same
as without. The first pass of every new shape takes seconds to a minute. The first block of every
kind is compared with its uncompiled code (`compiled_parity.py`).

Sources  torch.compile, regional compilation (PyTorch recipes, 2024)
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.base.layouts.schedule_names import SPLIT_BACKWARD
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import replace_compiler_caches
from shoal.fabric.device import is_accelerator
from shoal.parallel._torch import function_modes, get_compile_cache, keep_saved_tensors, pytree
from shoal.parallel.compiling.compile_cache import remove_truncated_libraries
from shoal.parallel.compiling.compiled_parity import refuse_wrong_code
from shoal.parallel.program import Program, layered_blocks
from shoal.trace.isolation.equal_layers import list_inner_hooks
from shoal.trace.isolation.replaced_forward import ReplacedForward, restore_all


def check(plan: Plan, device: torch.device) -> None:
    """Refuse a plan that cannot be compiled here, before anything is cut or traced.

    Raises:
        PlanError: torch.compile has no compiler on this machine.
    """
    if plan.compile != "none":
        check_compiler(device)


def apply(program: Program) -> Program:
    """Compile every block of the program's module, before parameters split and blocks recompute.

    Raises:
        PlanError: as `check`; during a step, for a block that the compiler refuses.
    """
    check(program.plan, program.world.device)
    if program.plan.compile == "none":
        return program
    found = layered_blocks(program)
    if not found:
        program.notices.append(
            "train.compile = blocks: nothing to compile: the model has no ModuleList or Sequential "
            "whose entries are blocks of several layers"
        )
        return program
    program.notices.extend(replace_compiler_caches())
    folder = get_compile_cache()
    if removed := remove_truncated_libraries(folder):
        program.notices.append(
            f"train.compile = blocks: removed what a killed compiler left "
            f"half written in {folder}: {len(removed)} of its libraries"
        )
    # A split backward (zero bubble) passes through one graph twice.
    halves = program.plan.layout.schedule in SPLIT_BACKWARD
    undo = [keep_saved_tensors()] if halves else []
    checked: set[Hashable] = set()
    compiled = [
        _CompiledForward(name, block, checked)
        for name, block in found
        if not _compile_replaced_forwards(name, block, program.notices)
        and not _is_hooked(name, block, program.notices)
    ]
    undo.append(partial(restore_all, compiled))
    return replace(program, on_close=(*program.on_close, *undo))


def _is_hooked(name: str, block: nn.Module, notices: list[str]) -> bool:
    """Return whether a block stays uncompiled because compiled code would skip its inner hooks."""
    hooks = list_inner_hooks(block)
    if hooks:
        notices.append(f"train.compile = blocks: {name} has a hook inside ({hooks[0]}): as it is")
    return bool(hooks)


def check_compiler(device: torch.device) -> None:
    """Raise an error if torch.compile has no compiler on this machine.

    Raises:
        PlanError: Triton is missing on a GPU, or a C++ compiler on a CPU.
    """
    if is_accelerator(device) and importlib.util.find_spec("triton") is None:
        raise PlanError(
            "train.compile = blocks: on a GPU torch.compile needs Triton, which is not installed "
            "here; try: pip install triton, or train.compile=none"
        )
    if device.type != "cpu":
        return
    wanted = os.environ.get("CXX", "")
    if not any(shutil.which(name) for name in (wanted, "g++", "clang++", "c++") if name):
        raise PlanError(
            "train.compile = blocks: on a CPU torch.compile needs a C++ compiler and this machine "
            "has none (g++, clang++, or what CXX names); try: train.compile=none"
        )


def _compile_replaced_forwards(name: str, block: nn.Module, notices: list[str]) -> bool:
    """Compile the replaced forwards (tp, cp, …) in a block; return True if one compiles itself.

    Args:
        name: name of the block, for error messages.
        notices: receives a line if a call runs uncompiled after all.

    Returns:
        True: `torch.compile` must leave the block itself as it is.
    """
    plain = (
        "train.compile = blocks: fp16 is imitated here by rounding around every function, so "
        "blocks whose ranks talk to each other run as they are; for fused kernels: "
        "precision.compute=bf16"
    )

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        fast = _compile(function)

        def run(*args: Any) -> Any:
            if function_modes():  # the compiler would trace them through every collective
                if plain not in notices:
                    notices.append(plain)
                return function(*args)
            with _shorten_compiler_errors(name):
                return fast(*args)

        return run

    inside = [part.__dict__.get("forward") for part in block.modules()]
    return any([one.compile_inside(compiler) for one in inside if isinstance(one, ReplacedForward)])


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, options={"fallback_random": True})


@contextmanager
def _shorten_compiler_errors(name: str) -> Iterator[None]:
    """Turn a compiler failure into one line.

    Raises:
        PlanError: the compiler refuses the code.
    """
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as failure:
        raise PlanError(
            f"train.compile = blocks: {name}: torch.compile cannot make code for it: "
            f"{str(failure).strip().splitlines()[0]}; try: train.compile=none"
        ) from failure


class _CompiledForward(ReplacedForward):
    """A block's `forward` as compiled code; a copy compiles again, fast thanks to the cache.

    Args:
        checked: kinds of blocks whose code was compared with the block, shared by all of them.
    """

    def __init__(self, name: str, block: nn.Module, checked: set[Hashable]) -> None:
        self.fast: Callable[..., Any] | None = None
        self.checked = checked
        super().__init__(name, block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward pass; meta tensors (counting) run uncompiled."""
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
            return self.forward(*args, **kwargs)
        if self.fast is None:
            self.fast = _compile(self.forward)
        with _shorten_compiler_errors(self.name):
            # Emulated fp16 rounds around torch functions, and compiled code has other functions.
            if torch.is_grad_enabled() and not function_modes():
                self._check(args, kwargs)
            return self.fast(*args, **kwargs)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the first block of its kind with its compiled code.

        Raises:
            PlanError: the compiled code computes something else.
        """
        block, fast = self.block, self.fast
        held = [p for p in block.parameters() if not p.is_meta]
        kind = (type(block), tuple((p.shape, p.dtype) for p in held), block.training)
        if kind in self.checked or fast is None:
            return
        self.checked.add(kind)
        from torch.distributed.fsdp import FSDPModule  # half a second of imports

        # A part that communicates (tp, cp, fsdp) would send once more.
        inside = [part for part in block.modules() if part is not block]
        if not any("forward" in p.__dict__ or isinstance(p, FSDPModule) for p in inside):
            refuse_wrong_code(self.name, block, self.forward, fast, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the compiled code, which belongs to this block."""
        return {**self.__dict__, "fast": None}
