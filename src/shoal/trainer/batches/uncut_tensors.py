"""Refuse tensors of a batch that no micro-batch can be cut of: nested, sparse, or with a graph."""

from __future__ import annotations

from typing import Any

import torch

from shoal.base.errors import ConfigError
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_split import batch_length
from shoal.trainer.batches.batch_values import Readings


def refuse_uncut_tensors(batch: Any) -> None:
    """Raise ConfigError for a nested or a sparse tensor, of which no micro-batch can be cut."""
    for leaf in pytree.tree_leaves(batch):
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.is_nested:
            raise ConfigError(
                "batch: a nested tensor (torch.nested): micro-batches cannot be cut of it; try: "
                "tensor.to_padded_tensor(0.0) with a mask beside it, or a list of its rows "
                "(tensor.unbind())"
            )
        if leaf.layout != torch.strided:
            raise ConfigError(
                f"batch: a tensor {list(leaf.shape)} of layout {leaf.layout}: micro-batches cannot "
                f"be cut of it; try: tensor.to_dense(), or a batch of a class whose slices are "
                f"sparse tensors"
            )


def check_graphs(batch: Any, readings: Readings, micro_batch: int) -> str:
    """Return the line on a tensor of a batch that has a graph behind it; "" if none has.

    Args:
        batch: the user's own.
        readings: how its lists and tensors are read.
        micro_batch: samples of a micro-batch.

    Raises:
        ConfigError: several micro-batches would share the graph; or as `refuse_uncut_tensors`.
    """
    refuse_uncut_tensors(batch)
    leaves = [one for one in pytree.tree_leaves(batch) if isinstance(one, torch.Tensor)]
    found = next((one for one in leaves if one.grad_fn is not None), None)
    if found is None:
        return ""
    if batch_length(batch, readings) > micro_batch:
        raise ConfigError(graph_line(found))
    return graph_line(found)


def graph_line(tensor: Any) -> str:
    """Return the line on a batch that was computed from weights, with gradients.

    Args:
        tensor: of the batch.
    """
    return (
        f"batch: a tensor {list(tensor.shape)} of it has a graph behind it "
        f"({tensor.grad_fn.name()}): the first micro-batch frees that graph, and weights in it "
        f"are none of the run, so their gradient is neither summed over ranks nor divided by the "
        f"step's count; try: tensor.detach(), or the layer that made it as a part of the model"
    )
