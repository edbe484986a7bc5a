"""Check compiled code against the block it was made of, on the first training inputs.

    the block's own forward and backward  ┐ same inputs, same random numbers, same gradient of the
    the compiled ones                     ┘ outputs → outputs, gradients of inputs and parameters

torch.compile has computed wrong gradients silently more than once: a reduction that is rebound
instead of written (pytorch #193061, since 2.10); tensors that an autograd.Function saves after
in-place operations, on a CPU (2.11, seen here: gradients of norms off by their own size, the loss
of the first step equal to the last bit). The check costs one block's step per kind of block, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.base.errors import PlanError
from shoal.parallel._torch import UncompiledMode, pytree
from shoal.trace.isolation.preserve_state import preserve_state

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference, relative to a tensor's norm, that rounding and another order of sums explain,
by the narrowest dtype of the block: many models compute norms in float32 inside float64."""

NARROW_BOUND = 0.1
"""The same bound for bf16 and fp16: compiled code keeps more digits between operations."""

SMALL = 1e-2
"""Share of all gradients' norm; a smaller gradient, maybe mere rounding, is compared with this."""

PLAIN = (Tensor, int, float, str, type(None), torch.dtype, torch.device)
"""Types of inputs that no pass changes, or of which each pass gets a copy."""

Forward = Callable[..., Any]


def refuse_wrong_code(
    name: str,
    block: nn.Module,
    plain: Forward,
    fast: Forward,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Run a block uncompiled and compiled, and compare outputs and gradients.

    Args:
        name: of the block, whose own forward is `plain` and whose code is `fast`; its buffers,
            attributes and random generators are unchanged afterwards.

    Raises:
        PlanError: they differ by more than rounding explains.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    if not all(isinstance(leaf, PLAIN) for leaf in leaves):
        return  # an object that a second pass would change again, say a cache
    # New leaves: no hook and no graph of the real inputs sees these passes.
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), (args, dict(kwargs))
    )
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    held = [p for p in block.parameters() if not p.is_meta]
    wanted = [t for t in (*held, *inputs) if t.requires_grad]
    if not wanted:
        return
    runs = []
    formats = _DtypeRecorder()
    # Saved-tensor hooks of others (recompute, offload) are switched off.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        for forward, watching in ((plain, formats), (fast, nullcontext())):
            with preserve_state(block), watching:  # both draw the same random numbers
                runs.append(_run_block(forward, args, kwargs, wanted))
    (outputs, gradients), (fast_outputs, fast_gradients) = runs
    bound = max(BOUNDS.get(one, NARROW_BOUND) for one in formats.seen)
    whole = torch.stack([g.double().norm().cpu() for g in gradients]).norm()
    for what, pairs, least in (
        ("outputs", zip(outputs, fast_outputs, strict=True), 0.0),
        ("gradients", zip(gradients, fast_gradients, strict=True), SMALL * float(whole)),
    ):
        apart = max((_relative_difference(a, b, least) for a, b in pairs), default=0.0)
        if not apart <= bound:
            raise PlanError(
                f"train.compile = blocks: {name}: the {what} of its compiled code differ by "
                f"{apart:.0e} of their norm from those of the block itself: torch "
                f"{torch.__version__} makes wrong code of it; try: train.compile=none"
            )


def _run_block(
    forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any], wanted: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (outputs, gradients of `wanted`), with zeros for missing gradients."""
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, dict(kwargs)))
    leaves = pytree.tree_leaves(forward(*args, **kwargs))
    outputs = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
    moving = [t for t in outputs if t.requires_grad]
    draw = torch.Generator().manual_seed(1)
    pulls = [torch.randn(t.shape, generator=draw, dtype=t.dtype).to(t.device) for t in moving]
    none = [None] * len(wanted)
    found = torch.autograd.grad(moving, wanted, pulls, allow_unused=True) if moving else none
    zeros = (torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True))
    return [t.detach() for t in outputs], [g.detach() for g in zeros]


class _DtypeRecorder(UncompiledMode):
    """Dispatch mode that records the floating dtypes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(results):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.seen.add(one.dtype)
        return results


def _relative_difference(one: Tensor, other: Tensor, least: float) -> float:
    norm = max(float(one.double().norm()), least)
    apart = float((one.double() - other.double()).norm())
    return apart / norm if norm else apart
