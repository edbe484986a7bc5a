"""Buffers of a model in a loop of another library: each rank's own, as the library keeps them.

    DDP (Accelerate, Lightning)      rank 0's are broadcast before a pass, unless the pass before it
                                     was one of several in a step, or ran without gradients
    FSDP, DeepSpeed                  never broadcast

Running statistics therefore belong to a pass and a rank, and not to a step's micro-batches in order
(design §6). Saves have rank 0's values, as those of the main process. With `--exact` this file is
not used. Source: torch/nn/parallel/distributed.py, `_check_sync_bufs_pre_fwd`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.parallel.buffers import batch_norm, sync_buffers
from shoal.trainer.run import Run


class RankBuffers:
    """Buffers of a run's model on this rank.

    Args:
        run: a run, whose own rules for buffers end here.
        broadcasts: the library is DDP.

    Attributes:
        last: this pass is the last of its step, or the only one.
    """

    def __init__(self, run: Run, *, broadcasts: bool) -> None:
        run.program = sync_buffers.release(batch_norm.release(run.program))
        self.run, self.last = run, True
        self.broadcasts = broadcasts and run.world.size > 1
        self._due = True

    def enter_pass(self) -> None:
        """Broadcast rank 0's buffers if DDP would; every rank calls it."""
        if self._due and self.broadcasts:
            self._broadcast()
        self._due = self.last and torch.is_grad_enabled()

    @contextmanager
    def as_on_first_rank(self) -> Iterator[None]:
        """Hold rank 0's buffers while open, for a save of all ranks; every rank calls it."""
        if self.run.world.size == 1:
            yield
            return
        own = [one.detach().clone() for one in self._buffers()]
        self._broadcast()
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(self._buffers(), own, strict=True):
                    buffer.copy_(value)

    def _buffers(self) -> list[torch.Tensor]:
        return [one for one in self.run.model.buffers() if not one.is_meta]

    @torch.no_grad()
    def _broadcast(self) -> None:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for one in self._buffers():
            by_dtype.setdefault(one.dtype, []).append(one)
        for buffers in by_dtype.values():
            flat = torch.cat([one.reshape(-1) for one in buffers])
            if flat.dtype is torch.bool:
                flat = flat.byte()
            self.run.world.broadcast(flat)
            for one, value in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                one.copy_(value.reshape(one.shape))
