"""Error feedback of an island's codecs, in that island's checkpoints.

    left.RANK.TAG   error feedback of one piece: of a message as FRAGMENT/OWNER/CHUNK, of a sum that
                    this island passes on as FRAGMENT/sum/CHUNK; see `fabric.halves`

Like the state of its inner optimizer, it belongs to one island and to its pieces. Another number of
islands, another layout inside or another codec has other pieces, and another island has other
errors. Then nothing is loaded, and one line reports it: the residuals are lost, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.base.plans.tensor_shards import Shard
from shoal.fabric.compressed.codecs import ErrorFeedback

LEFT = "left."


@dataclass
class IslandErrorFeedback:
    """Error feedback of one process of an island, as tensors of a checkpoint.

    Attributes:
        feedback: residuals of the codec; None if the codec is lossless.
        rank: rank of this process in its island.
        pieces: settings that determine the pieces (islands, layout, codec), by key; residuals saved
            under other settings are dropped.
    """

    feedback: ErrorFeedback | None
    rank: int
    pieces: Mapping[str, Any]

    def parts(self) -> dict[str, tuple[Tensor, Shard]]:
        """Return the residuals by their names in a checkpoint, each whole on this rank."""
        found = {}
        for tag, tensor in self._tensors().items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[self._own + tag] = (
                tensor,
                Shard.whole(self._own + tag, tuple(tensor.shape), dtype),
            )
        return found

    def record(self) -> dict[str, Any] | None:
        """Return the settings of the pieces, the same on every rank; None for a lossless codec."""
        return None if self.feedback is None else dict(self.pieces)

    def select_own_tensors(self, names: Iterable[str], kept: Mapping[str, Any] | None) -> list[str]:
        """Return the checkpoint's tensors that this rank loads; `kept` as `record` returned it."""
        if self.feedback is None or kept != self.pieces:
            return []
        return [name for name in names if name.startswith(self._own)]

    def load(self, tensors: Mapping[str, Tensor], kept: Mapping[str, Any] | None) -> str:
        """Load the residuals that `parts` returned; drop those of other pieces.

        Args:
            kept: the result of `record`.
            tensors: tensors by name; those of other ranks are ignored.

        Returns:
            one line if residuals were dropped, else "".
        """
        mine = self.select_own_tensors(tensors, kept)
        if self.feedback is not None:
            self.feedback.load({name.removeprefix(self._own): tensors[name] for name in mine})
        if kept is None or (self.feedback is not None and kept == self.pieces):
            return ""
        other = [key for key, value in self.pieces.items() if kept.get(key) != value]
        changed = ", ".join(f"{key} was {kept.get(key)}, is {self.pieces[key]}" for key in other)
        return f"what codes left out of earlier rounds is dropped: {changed}"

    @property
    def _own(self) -> str:
        return f"{LEFT}{self.rank}."

    def _tensors(self) -> dict[str, Tensor]:
        return {} if self.feedback is None else self.feedback.tensors()
