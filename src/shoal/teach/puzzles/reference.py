"""The author's solutions of the eight puzzles, for these rules; their scores are the oracle.

They free the same tensors at the same time as the author's programs; Shoal's programs save memory
by earlier frees (teach/puzzles/ours.py).
Source: the author's notebook, github.com/srush/LLM-Training-Puzzles (MIT), by Sasha Rush.
"""

from __future__ import annotations

from shoal.teach.puzzles.model import PuzzleRank


async def standard(m: PuzzleRank) -> None:
    """Solve puzzle 0: all batches at once on one rank."""
    for layer in range(m.layers):
        m.load(layer)
    m.input(range(m.batches), 0)
    for layer in range(m.layers):
        m.forward(layer, layer, layer + 1, layer)
    m.loss(m.layers, m.layers)
    m.free("activations", m.layers)
    for layer in reversed(range(m.layers)):
        m.backward(layer, layer, layer + 1, layer, layer, layer)
        m.free("grads", layer + 1)
        m.free("activations", layer)
    m.free("grads", 0)
    for layer in range(m.layers):
        m.update(layer, layer, layer)


async def accumulate(m: PuzzleRank) -> None:
    """Solve puzzle 1: one batch element after the other; gradients are summed."""
    for layer in range(m.layers):
        m.load(layer)
    for j in range(m.batches):
        m.input([j], 0)
        for layer in range(m.layers):
            m.forward(layer, layer, layer + 1, layer)
        m.loss(m.layers, m.layers)
        m.free("activations", m.layers)
        for layer in reversed(range(m.layers)):
            new = (layer, j) if j else layer
            m.backward(layer, layer, layer + 1, layer, new, layer)
            if j:
                m.add(layer, new)
                m.free("weight_grads", new)
            m.free("grads", layer + 1)
            m.free("activations", layer)
        m.free("grads", 0)
    for layer in range(m.layers):
        m.update(layer, layer, layer)


async def ddp(m: PuzzleRank) -> None:
    """Solve puzzle 2: the whole model and one batch element per rank; all-reduce at the end."""
    m.input([m.rank], 0)
    for layer in range(m.layers):
        m.load(layer)
    for layer in range(m.layers):
        m.forward(layer, layer, layer + 1, layer)
    m.loss(m.layers, m.layers)
    for layer in reversed(range(m.layers)):
        m.backward(layer, layer, layer + 1, layer, layer, layer)
        m.free("grads", layer + 1)
        m.free("activations", layer)
    for layer in range(m.layers):
        await m.all_reduce(layer)
        m.update(layer, layer, layer)


async def weight_sharded(m: PuzzleRank) -> None:
    """Solve puzzle 3: weights and states in shards, gathered per layer; all-reduce at the end."""
    m.input([m.rank], 0)
    for layer in range(m.layers):
        m.load(layer, shard=m.rank, total=m.ranks)
    for layer in range(m.layers):
        await m.all_gather(layer, "whole")
        m.forward(layer, layer, layer + 1, "whole")
        m.free("weights", "whole")
    m.loss(m.layers, m.layers)
    for layer in reversed(range(m.layers)):
        await m.all_gather(layer, "whole")
        m.backward(layer, layer, layer + 1, layer, layer, "whole")
        m.free("grads", layer + 1)
        m.free("activations", layer)
        m.free("weights", "whole")
    for layer in range(m.layers):
        await m.all_reduce(layer)
        m.update(layer, layer, layer)


async def fsdp(m: PuzzleRank) -> None:
    """Solve puzzle 4: gradients in shards too, reduce-scattered layer by layer."""
    m.input([m.rank], 0)
    for layer in range(m.layers):
        m.load(layer, shard=m.rank, total=m.ranks)
    for layer in range(m.layers):
        await m.all_gather(layer, "whole")
        m.forward(layer, layer, layer + 1, "whole")
        m.free("weights", "whole")
    m.loss(m.layers, m.layers)
    m.free("activations", m.layers)
    for layer in reversed(range(m.layers)):
        await m.all_gather(layer, "whole")
        m.backward(layer, layer, layer + 1, layer, layer, "whole")
        await m.reduce_scatter(layer)
        m.free("grads", layer + 1)
        m.free("activations", layer)
        m.free("weights", "whole")
    for layer in range(m.layers):
        m.update(layer, layer, layer)


def own_layers(m: PuzzleRank) -> range:
    """Return the layers of this rank in a pipeline."""
    each = m.layers // m.ranks
    return range(m.rank * each, (m.rank + 1) * each)


async def pipeline(m: PuzzleRank) -> None:
    """Solve puzzle 5: a pipeline of stages, through which the whole batch goes at once."""
    layers = own_layers(m)
    for layer in layers:
        m.load(layer)
    if m.rank == 0:
        m.input(range(m.batches), 0)
    else:
        await m.receive(m.rank - 1, layers[0])
    for layer in layers:
        m.forward(layer, layer, layer + 1, layer)
    if m.rank == m.ranks - 1:
        m.loss(m.layers, m.layers)
    else:
        await m.send(m.rank + 1, "activations", layers[-1] + 1)
        await m.receive(m.rank + 1, layers[-1] + 1)
    for layer in reversed(layers):
        m.backward(layer, layer, layer + 1, layer, layer, layer)
        m.free("grads", layer + 1)
        m.free("activations", layer)
    if m.rank:
        await m.send(m.rank - 1, "grads", layers[0])
    for layer in layers:
        m.update(layer, layer, layer)


async def gpipe(m: PuzzleRank) -> None:
    """Solve puzzle 6: batch elements travel one by one; all forwards, then all backwards."""
    layers = own_layers(m)
    for layer in layers:
        m.load(layer)
    for j in range(m.batches):
        if m.rank == 0:
            m.input([j], (0, j))
        else:
            await m.receive(m.rank - 1, (layers[0], j))
        for layer in layers:
            m.forward(layer, (layer, j), (layer + 1, j), layer)
        if m.rank < m.ranks - 1:
            await m.send(m.rank + 1, "activations", (layers[-1] + 1, j))
    for j in range(m.batches):
        if m.rank == m.ranks - 1:
            m.loss((m.layers, j), (m.layers, j))
        else:
            await m.receive(m.rank + 1, (layers[-1] + 1, j))
        for layer in reversed(layers):
            m.backward(layer, (layer, j), (layer + 1, j), (layer, j), (layer, j), layer)
            m.free("grads", (layer + 1, j))
            m.free("activations", (layer, j))
        if m.rank:
            await m.send(m.rank - 1, "grads", (layers[0], j))
    for layer in reversed(layers):
        m.rename("weight_grads", (layer, 0), layer)
        for j in range(1, m.batches):
            m.add(layer, (layer, j))
            m.free("weight_grads", (layer, j))
        m.update(layer, layer, layer)


STAGES = 4


async def pipeline_fsdp(m: PuzzleRank) -> None:
    """Solve puzzle 7: four pipelines of four ranks, every weight in sixteen shards."""
    place = m.rank % STAGES
    for layer in range(m.layers):
        m.load(layer, ("part", layer), m.rank, m.ranks)
    for layer in range(m.layers):
        await _forward(m, layer, place)
    for layer in reversed(range(m.layers)):
        await _backward(m, layer, place)
    for layer in range(m.layers):
        m.update(layer, layer, ("part", layer), layer)


async def _forward(m: PuzzleRank, layer: int, place: int) -> None:
    """Run one layer on the ranks of its stage; the other ranks only contribute their shards."""
    if layer == place == 0:
        m.input([m.rank // STAGES], 0)
    elif layer == place:
        await m.receive(m.rank - 1, layer)
    await m.all_gather(("part", layer), layer)
    if layer == place:
        m.forward(layer, layer, layer + 1, layer)
    m.free("weights", layer)
    if layer == place == STAGES - 1:
        m.loss(m.layers, m.layers)
    elif layer == place:
        await m.send(m.rank + 1, "activations", layer + 1)


async def _backward(m: PuzzleRank, layer: int, place: int) -> None:
    if layer == place < STAGES - 1:
        await m.receive(m.rank + 1, layer + 1)
    await m.all_gather(("part", layer), layer)
    if layer == place:
        m.backward(layer, layer, layer + 1, layer, layer, layer)
        m.free("grads", layer + 1)
        m.free("activations", layer)
    else:
        m.empty(layer, layer)
    await m.reduce_scatter(layer)
    m.free("weights", layer)
    if layer == place > 0:
        await m.send(m.rank - 1, "grads", layer)
