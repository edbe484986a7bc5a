"""Compile: every block's forward and backward become fused kernels, made by torch.compile.

Element-wise work between matrix products (norms, activations, rotary turns, residual sums, casts)
is read and written once instead of once per operation. Blocks are compiled one by one: equal ones
share the code, what a layout hangs on a block (a new key for dropout, FSDP2's gather, recompute)
stays outside of it as ordinary Python; where one block cannot be compiled, others still are. Of a
block whose ranks talk to each other inside (tp, cp) what stands between the exchanges is compiled.
Random operations draw from torch's own generators (`fallback_random`), so that dropout is the same
as without. The first pass of every new shape takes seconds to a minute. The first block of every
kind is held against its own code (`compiled_parity.py`).

Sources  torch.compile, regional compilation (PyTorch recipes, 2024)
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.base.layouts.schedule_names import SPLIT_BACKWARD
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import replace_compiler_caches
from shoal.fabric.device import is_accelerator
from shoal.parallel._torch import code_cache, function_modes, keep_saved_tensors, pytree
from shoal.parallel.compiling.compile_cache import remove_half_written
from shoal.parallel.compiling.compiled_parity import refuse_wrong_code
from shoal.parallel.program import Program, own_blocks
from shoal.trace.find.blocks import is_single_layer
from shoal.trace.isolation.equal_layers import hooked_inside
from shoal.trace.isolation.replaced_forward import StandIn


def check(plan: Plan, device: torch.device) -> None:
    """Refuse what cannot be compiled here, before anything is cut or traced.

    Errors: PlanError where nothing here can compile
    """
    if plan.compile != "none":
        check_compiler(device)


def apply(program: Program) -> Program:
    """Compile every block of the program's module; before parameters split and blocks recompute.

    Raises:
        as `check`. While a step runs, PlanError for a block whose code the compiler refuses.
    """
    check(program.plan, program.world.device)
    if program.plan.compile == "none":
        return program
    found = {id(b): (n, b) for n, b in own_blocks(program) if not is_single_layer(b)}
    if not found:
        program.notices.append(
            "train.compile = blocks: nothing to compile: the model has no ModuleList or Sequential "
            "whose entries are blocks of several layers"
        )
        return program
    program.notices.extend(replace_compiler_caches())
    folder = code_cache()
    if removed := remove_half_written(folder):
        program.notices.append(
            f"train.compile = blocks: removed what a killed compiler left "
            f"half written in {folder}: {len(removed)} of its libraries"
        )
    # The halves of a split backward are two passes through one graph.
    halves = program.plan.layout.schedule in SPLIT_BACKWARD
    undo_saved = keep_saved_tensors() if halves else lambda: None
    checked: set[Hashable] = set()
    compiled = [
        _Compiled(name, block, checked)
        for name, block in found.values()
        if not _compiles_inside(name, block, program.notices)
        and not _is_hooked(name, block, program.notices)
    ]

    def undo() -> None:
        undo_saved()
        for block in compiled:
            block.take_away()

    return replace(program, on_close=(*program.on_close, undo))


def _is_hooked(name: str, block: nn.Module, notices: list[str]) -> bool:
    """Whether a block runs as it is: code of its class would be run without its hooks."""
    hooks = hooked_inside(block)
    if hooks:
        notices.append(f"train.compile = blocks: {name} has a hook inside ({hooks[0]}): as it is")
    return bool(hooks)


def check_compiler(device: torch.device) -> None:
    """Errors: PlanError where torch.compile has nothing to compile with."""
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


def _compiles_inside(name: str, block: nn.Module, notices: list[str]) -> bool:
    """Whether something stands in for the block, or for a part of it, that compiles by itself.

    Args:
        notices: takes a line where nothing is compiled after all.
    """
    plain = (
        "train.compile = blocks: fp16 is imitated here by rounding around every function, so "
        "blocks whose ranks talk to each other run as they are; for fused kernels: "
        "precision.compute=bf16"
    )

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        fast = _compile(function)

        def run(*args: Any) -> Any:
            if function_modes():  # which the compiler would follow through every exchange
                if plain not in notices:
                    notices.append(plain)
                return function(*args)
            with _in_one_line(name):
                return fast(*args)

        return run

    inside = [part.__dict__.get("forward") for part in block.modules()]
    return any([one.compile_inside(compiler) for one in inside if isinstance(one, StandIn)])


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    fast: Callable[..., Any] = torch.compile(function, options={"fallback_random": True})
    return fast


@contextmanager
def _in_one_line(name: str) -> Iterator[None]:
    """Errors: PlanError for code that the compiler refuses."""
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as failure:
        raise PlanError(
            f"train.compile = blocks: {name}: torch.compile cannot make code for it: "
            f"{str(failure).strip().splitlines()[0]}; try: train.compile=none"
        ) from failure


class _Compiled(StandIn):
    """A block's `forward` as compiled code; a copy compiles anew, which a cache makes short.

    Args:
        checked: kinds of blocks whose code was held against the block, shared by all of them.
    """

    def __init__(self, name: str, block: nn.Module, checked: set[Hashable]) -> None:
        self.fast: Callable[..., Any] | None = None
        self.checked = checked
        super().__init__(name, block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward pass. Shapes without data (counting) need no code."""
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
            return self.forward(*args, **kwargs)
        if self.fast is None:
            self.fast = _compile(self.forward)
        with _in_one_line(self.name):
            # fp16 that is imitated rounds around functions, of which compiled code has others.
            if torch.is_grad_enabled() and not function_modes():
                self._check(args, kwargs)
            return self.fast(*args, **kwargs)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Errors: PlanError where the first block of its kind computes something else compiled."""
        block, fast = self.block, self.fast
        held = [p for p in block.parameters() if not p.is_meta]
        kind = (type(block), tuple((p.shape, p.dtype) for p in held), block.training)
        if kind in self.checked or fast is None:
            return
        self.checked.add(kind)
        from torch.distributed.fsdp import FSDPModule  # half a second of imports

        # A part that ranks compute together, or that gathers by itself, would send once more.
        inside = [part for part in block.modules() if part is not block]
        if not any("forward" in p.__dict__ or isinstance(p, FSDPModule) for p in inside):
            refuse_wrong_code(self.name, block, self.forward, fast, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the compiled code, which belongs to this block."""
        return {**self.__dict__, "fast": None}
