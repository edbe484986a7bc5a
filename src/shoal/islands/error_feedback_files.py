"""What an island's codes left out and still owe the others, as that island's checkpoints keep it.

    left.RANK.TAG   error feedback of one piece: of a message as FRAGMENT/OWNER/CHUNK, of a sum that
                    this island passes on as FRAGMENT/sum/CHUNK; see `fabric.halves`

It is the island's own, like its inner optimizer's state, and belongs to pieces: another number of
islands, another layout inside or another code cuts other pieces, and another island owes other
numbers. Then nothing is taken back, and one line says so: what was owed is lost, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.base.plans.tensor_shards import Shard
from shoal.fabric.compressed.codecs import Feedback

LEFT = "left."


@dataclass
class Leftovers:
    """Error feedback of one process of an island, on its way to checkpoints and back.

    Attributes:
        feedback: None where the code leaves nothing out.
        rank: of this process in its island.
        pieces: settings that decide whose pieces these are and how they are cut (islands, layout,
            code), by key: what was saved under others is dropped.
    """

    feedback: Feedback | None
    rank: int
    pieces: Mapping[str, Any]

    def parts(self) -> dict[str, tuple[Tensor, Shard]]:
        """What is left by its name in a checkpoint, each whole on this rank."""
        found = {}
        for tag, tensor in self._tensors().items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[self._own + tag] = (
                tensor,
                Shard.whole(self._own + tag, tuple(tensor.shape), dtype),
            )
        return found

    def record(self) -> dict[str, Any] | None:
        """Whose pieces they are, the same on every rank; None where nothing is left out."""
        return None if self.feedback is None else dict(self.pieces)

    def owns(self, names: Iterable[str], kept: Mapping[str, Any] | None) -> list[str]:
        """Which of a checkpoint's tensors this rank takes back; `kept` as `record` gave it."""
        if self.feedback is None or kept != self.pieces:
            return []
        return [name for name in names if name.startswith(self._own)]

    def load(self, tensors: Mapping[str, Tensor], kept: Mapping[str, Any] | None) -> str:
        """Take back what `parts` gave; nothing is left of a run that had other pieces.

        Args:
            kept: as `record` gave it.
            tensors: others' are passed over.

        Returns:
            one line where something was left and is dropped, else "".
        """
        mine = self.owns(tensors, kept)
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
