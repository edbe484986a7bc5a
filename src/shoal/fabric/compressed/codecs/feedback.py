"""What codes leave out of messages is kept, and comes with the next message: error feedback.

    total = message + keeps · left    what is coded
    left' = total − decoded           what the next message brings

With `keeps` 1 the decoded messages add up to the true ones over rounds, but for the last `left`:
nothing is lost, only late. Below 1, what was left out long ago fades, like a momentum.
A round that does not count must leave `left` as it was, so there are two: the standing one, and the
coming one, which takes its place by `commit`.

Source: Seide et al. 2014; Karimireddy et al. 2019; Sarfi et al. 2025 (SparseLoCo keeps 0.95)
Limits: 2 × the bytes of a message are kept
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.base.errors import BugError
from shoal.fabric.compressed.codecs.base import Codec


class Residual:
    """What codes left out of one vector so far.

    Args:
        keeps: share of what the last round left that comes with the next.

    A round that sends several times goes on from `coming`.
    """

    def __init__(
        self, elements: int, dtype: torch.dtype, device: torch.device, keeps: float = 1.0
    ) -> None:
        self.keeps = keeps
        self.standing = torch.zeros(elements, dtype=dtype, device=device)
        self.coming = torch.zeros_like(self.standing)
        self.written = False

    def add(self, numbers: Tensor) -> Tensor:
        """numbers [at most elements] + what is left; the caller subtracts what it sends, in place.

        Returns:
            [elements], `coming` itself.
        """
        before = self.coming if self.written else self.standing
        if self.keeps != 1 and not self.written:
            before = torch.mul(self.standing, self.keeps, out=self.coming)
        count = numbers.numel()
        torch.add(before[:count], numbers, out=self.coming[:count])
        self.coming[count:] = 0  # what a code made of padding is nobody's, and may be NaN
        self.written = True
        return self.coming

    def begin(self) -> None:
        """A round begins: what an uncommitted one left behind is forgotten."""
        self.written = False

    def commit(self) -> None:
        """The round counted: what was kept is valid."""
        if self.written:
            self.standing, self.coming = self.coming, self.standing
            self.written = False


def encode_rest(codec: Codec, numbers: Tensor, out: Tensor) -> None:
    """Code numbers as `Codec.encode` does; what the code leaves out takes their place."""
    codec.encode(numbers, out)
    codec.decode(out, numbers, weight=-1.0, add=True)


class Feedback:
    """Residuals by tag: one for each vector that is sent again and again.

    Args:
        keeps: share of what the last round left that comes with the next.

    A round whose message was refused is not to be committed: what made it refused, a NaN perhaps,
    would stay for good.
    """

    def __init__(self, keeps: float = 1.0) -> None:
        self.keeps = keeps
        self._left: dict[str, Residual] = {}

    def encode(self, tag: str, codec: Codec, numbers: Tensor, out: Tensor) -> None:
        """Code numbers [elements] and what is left of this tag; see `Codec.encode`.

        Errors: BugError if the tag stood for another number of elements.
        """
        left = self._left.get(tag)
        if left is None:
            left = Residual(numbers.numel(), codec.dtype, numbers.device, self.keeps)
            self._left[tag] = left
        if left.standing.numel() != numbers.numel():
            raise BugError(
                f"error feedback of {tag}: {numbers.numel()} numbers, but "
                f"{left.standing.numel()} were left over; every tag is one vector"
            )
        encode_rest(codec, left.add(numbers), out)

    def begin(self) -> None:
        """A round begins: what an uncommitted one left behind is forgotten."""
        for left in self._left.values():
            left.begin()

    def commit(self, counts: Callable[[str], bool] | None = None) -> None:
        """The round counted: what was kept is valid. Tags that sent nothing keep what they had.

        Args:
            counts: says of a tag whether what it sent counted; default: all did.
        """
        for tag, left in self._left.items():
            if counts is None or counts(tag):
                left.commit()

    def tensors(self) -> dict[str, Tensor]:
        """What is left by tag, as of the last commit; not copies."""
        return {tag: left.standing for tag, left in self._left.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `tensors` gave; tags it does not name have nothing left."""
        self._left = {}
        for tag, tensor in tensors.items():
            left = Residual(tensor.numel(), tensor.dtype, tensor.device, self.keeps)
            left.standing.copy_(tensor)
            self._left[tag] = left
