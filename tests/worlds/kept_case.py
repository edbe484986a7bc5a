"""What the tests of kept splits run on every member of a world: a start with a cache, and steps."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.fabric import World
from shoal.models.llama import Llama
from shoal.parallel import tensor_parallel
from shoal.parallel.tensor.split_block import BlockSplit
from shoal.parallel.tensor.splits import ModelSplit
from shoal.trainer.parallelize import parallelize

VOCABULARY, SEQ, ROWS = 31, 8, 2
PASSES: list[int] = []


class Counted(Llama):
    """Counts forward passes."""

    def forward(self, tokens: Tensor) -> Any:
        """[batch, seq] to what a Llama gives."""
        PASSES.append(1)
        return super().forward(tokens)


class Tower(nn.Module):
    """An encoder layer of torch's own, three times, with attention's fused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        layers = (nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True) for _ in range(3))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, seq] to logits [batch, seq, vocabulary]."""
        PASSES.append(1)
        h = self.tokens(ids)
        for layer in self.layers:
            h = layer(h)
        logits: Tensor = self.head(h)
        return logits


def llama(dropout: float) -> nn.Module:
    """A small one; 2 key/value heads."""
    sizes = {"dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 48}
    return Counted(vocabulary=VOCABULARY, sequence=SEQ, dropout=dropout, **sizes)


def start(
    world: World,
    folders: list[str],
    *,
    model: str = "llama",
    layout: dict[str, Any] | None = None,
    rows: int = ROWS,
    dropout: float = 0.1,
) -> dict[str, Any]:
    """Start and take two steps with each rank's own cache folder; what came of it.

    rows   of the sample: as many as a micro-batch has, or fewer
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2 * ROWS, SEQ), generator=generator)
    splits: list[ModelSplit] = []
    real = tensor_parallel.apply_split

    def noting(module: nn.Module, split: ModelSplit, axis: World) -> Any:
        splits.append(split)
        return real(module, split, axis)

    folder = folders[world.rank % len(folders)]
    environ = mock.patch.dict(os.environ, {"SHOAL_CACHE": folder})
    with environ, mock.patch.object(tensor_parallel, "apply_split", noting):
        PASSES.clear()
        torch.manual_seed(world.rank)  # as a user may: what ranks find must not depend on it
        run = parallelize(
            (lambda: llama(dropout)) if model == "llama" else Tower,
            lambda p: torch.optim.SGD(p, lr=0.1),
            layout=layout or {"tp": world.size},
            batch=2 * ROWS,
            micro_batch=ROWS,
            precision="fp64",
            sample=(ids[:rows], ids[:rows]),
            world=world,
        )
        passes = len(PASSES)
        losses = [float(run.step((ids, ids)).loss) for _ in range(2)]
    weights = [p.detach().numpy().tobytes() for p in run.program.parameters.values()]
    for undo in run.program.on_close:  # as `run.close`, but the world stays for others
        undo()
    return {
        "passes": passes,
        "losses": losses,
        "weights": hashlib.blake2b(b"".join(weights)).hexdigest(),
        "told": _told(splits[0]),
        "files": [path.name for path in sorted(Path(folder).glob("splits/*"))],
    }


def _told(split: ModelSplit) -> list[str]:
    """Everything that a split says, but for graphs."""
    kept = [f.name for f in fields(BlockSplit) if f.name not in ("run", "flatten", "rebuild")]
    blocks = [[g.names, *(getattr(g.split, name) for name in kept)] for g in split.classes]
    tables = (split.tables.split, split.tables.whole, split.tables.embeddings)
    heads = (split.tables.heads, split.tables.to_loss)
    rest = (split.degree, split.sequence, split.parameters, split.exchanges, split.notices)
    told = pytree.tree_map(
        lambda leaf: sorted(leaf) if isinstance(leaf, frozenset) else leaf,
        [*blocks, *tables, *heads, *rest, split.scattered],
    )
    return [re.sub(" at 0x[0-9a-f]+", "", repr(one)) for one in told]
