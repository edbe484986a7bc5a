"""Weights split by tp or ep, and by fsdp inside of that: user code sees the full tensors.

    the whole weight     [16, 6]
    cut by tp            [8, 6] on tp rank 0 · [8, 6] on tp rank 1      torch's DTensor ends here
    rows of fsdp         [4, 6] on each of the two ranks of a part

A norm of a DTensor is that of its part, another number on each tp rank. So operations of user code
run on the gathered whole, but for attributes and for writes that change each element by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shoal.base.plans.placement import DimCut
from shoal.fabric.axis_worlds import axis_world
from shoal.parallel._torch import pytree
from shoal.parallel.build.mmap_init import copy_part
from shoal.parallel.program import Program


@dataclass(frozen=True)
class InnerCut:
    """Split of a weight by tp or ep, whose parts fsdp shards by rows.

    Attributes:
        name: of the weight.
        shape: of the whole.
        extract: returns this rank's part of a whole tensor.
        gather: returns the whole of this rank's part; a collective of the ranks of tp or ep.
    """

    name: str
    shape: torch.Size
    extract: Callable[[torch.Tensor], torch.Tensor]
    gather: Callable[[torch.Tensor], torch.Tensor]


INNER_CUTS: dict[int, InnerCut] = {}
"""By id of a weight in the hands of user code: its cut; an attribute would be saved with it."""
ALIASES = frozenset(
    {"detach", "detach_", "requires_grad_", "register_hook", "backward", "data_ptr", "dim"}
    | {"ndimension", "element_size", "stride", "storage_offset", "is_contiguous", "get_device"}
    | {"untyped_storage", "is_floating_point", "is_complex", "retain_grad", "__repr__", "__hash__"}
    | {"__deepcopy__", "__reduce_ex__", "register_post_accumulate_grad_hook"}
)
"""Functions that return their tensor, or read no number of it."""
BY_ELEMENT = frozenset(
    {"add_", "sub_", "mul_", "div_", "true_divide_", "copy_", "fill_", "zero_", "lerp_", "neg_"}
    | {"addcmul_", "addcdiv_", "clamp_", "clamp_min_", "clamp_max_", "sign_", "sqrt_", "pow_"}
    | {"abs_", "nan_to_num_", "masked_fill_"}
)
"""Writes that change each element by itself."""
TURNED = [getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")]
"""Attributes that are views of another shape."""


def find_inner_cut(tensor: Any) -> InnerCut | None:
    """Return the cut of a weight of fsdp, of its gradient or of an alias of one of them."""
    return INNER_CUTS.get(id(tensor)) or vars(tensor).get("inner_cut")


def set_inner_cut(tensor: Any, cut: InnerCut | None) -> None:
    """Mark a DTensor as one of the size of a part."""
    if cut is not None:
        vars(tensor)["inner_cut"] = cut


def open_inner_cuts(program: Program, sharded: Mapping[str, Any]) -> dict[int, InnerCut]:
    """Note the cuts of weights while user code has them in its hands; return them by id.

    Args:
        program: the run's.
        sharded: its weights of fsdp, by name.
    """
    found = {}
    for name, p in sharded.items():
        if (cut := program.cuts.get(name)) is not None:
            extract = partial(copy_part, cut=cut, rank=program.at[cut.axis])
            shape = torch.Size(program.rows[name].shape)
            found[id(p)] = InnerCut(name, shape, extract, partial(_gather_part, program, name, cut))
    INNER_CUTS.update(found)
    return found


def close_inner_cuts(found: Mapping[int, InnerCut]) -> None:
    """Forget the cuts of a run's weights."""
    for key in found:
        INNER_CUTS.pop(key, None)


def _gather_part(program: Program, name: str, cut: DimCut, part: torch.Tensor) -> torch.Tensor:
    """Gather the full weight or gradient; the ranks of the cut's axis call it together."""
    row, ranks = program.rows[name], program.tensor
    if row.is_expert:
        ranks = axis_world(program.world, program.plan.layout.expert_degrees, ["ep"])
    shapes = [row.local_shape({cut.axis: rank}) for rank in range(ranks.size)]
    message = part.new_zeros(max(map(math.prod, shapes)))
    message[: part.numel()] = part.detach().reshape(-1)
    whole = part.new_zeros(row.shape)
    for rank, sent in enumerate(ranks.all_gather(message)):
        piece, at = sent[: math.prod(shapes[rank])].view(shapes[rank]), 0
        for start, stop in cut.spans(rank):
            length = stop - start
            whole.narrow(cut.dim, start, length).copy_(piece.narrow(cut.dim, at, length))
            at += length
    return whole


def extract_operands(
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    note_operand: Callable[[torch.Tensor], None],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with which a function may run on each rank's rows.

    Args:
        func: of torch.
        name: its name.
        args, kwargs: the function's arguments.
        note_operand: called with each plain tensor of the size of a whole.

    Returns:
        The arguments, in which plain tensors are replaced by this rank's rows of them; None: the
        function needs the whole tensors.
    """
    if name == "__get__" or name in ALIASES:
        return None if func in TURNED else (args, kwargs)
    first: Any = args[0] if args else None
    cut = find_inner_cut(first) if isinstance(first, DTensor) else None
    if cut is None:
        return None
    leaves = pytree.tree_leaves((args, kwargs))
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        for one in leaves:
            if isinstance(one, torch.Tensor) and not isinstance(one, DTensor) and one.ndim:
                note_operand(one)
    if name not in BY_ELEMENT or not all(_fits(one, cut) for one in leaves):
        return None

    def extract(leaf: torch.Tensor) -> torch.Tensor:
        if isinstance(leaf, DTensor) or not leaf.ndim:
            return leaf
        mesh, places = first.device_mesh, first.placements
        return distribute_tensor(cut.extract(leaf), mesh, places, src_data_rank=None)

    found: tuple[tuple[Any, ...], dict[str, Any]]
    found = pytree.tree_map_only(torch.Tensor, extract, (args, kwargs))
    return found


def _fits(tensor: Any, cut: InnerCut) -> bool:
    """Return whether an argument is one number, or of the size of the whole or of the part."""
    if not isinstance(tensor, torch.Tensor) or not tensor.ndim:
        return True
    if not isinstance(tensor, DTensor):
        return tensor.shape == cut.shape
    other = find_inner_cut(tensor)
    return other is not None and other.name == cut.name


def gather_whole(tensor: Any) -> torch.Tensor:
    """Return the full tensor of a DTensor, with other parts of tp or ep; a collective."""
    part, cut = tensor.detach().full_tensor(), find_inner_cut(tensor)
    return part if cut is None else cut.gather(part)


def replicate(tensor: torch.Tensor, like: Any) -> DTensor:
    """Return a tensor that all ranks hold as a DTensor on the mesh of another one."""
    places: Sequence[Any] = [Replicate()] * like.device_mesh.ndim
    return DTensor.from_local(tensor, like.device_mesh, places, run_check=False)
