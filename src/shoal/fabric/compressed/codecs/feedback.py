"""Error feedback: the encoding error of each message is added to the next message.

    total = message + keeps · left    what is coded
    left' = total − decoded           what the next message brings

With `keeps` 1 the decoded messages of all rounds sum to the true messages minus the last `left`:
errors are delayed, not lost. Below 1, old errors decay like a momentum. A round that does not count
must not change `left`. So there are two residuals: the committed one, and the pending one, which
`commit` makes current.

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
    """Accumulated encoding error of one vector.

    Args:
        keeps: share of the last round's error that is added to the next message.

    A round that sends several times continues from `coming`.
    """

    def __init__(
        self, elements: int, dtype: torch.dtype, device: torch.device, keeps: float = 1.0
    ) -> None:
        self.keeps = keeps
        self.standing = torch.zeros(elements, dtype=dtype, device=device)
        self.coming = torch.zeros_like(self.standing)
        self.written = False

    def add(self, numbers: Tensor) -> Tensor:
        """Add the residual to numbers; the caller subtracts the decoded message in place.

        Returns:
            [elements], `coming` itself.
        """
        before = self.coming if self.written else self.standing
        if self.keeps != 1 and not self.written:
            before = torch.mul(self.standing, self.keeps, out=self.coming)
        count = numbers.numel()
        torch.add(before[:count], numbers, out=self.coming[:count])
        self.coming[count:] = 0  # decoded padding is no data, and may be NaN
        self.written = True
        return self.coming

    def begin(self) -> None:
        """Start a round and discard the residual of an uncommitted one."""
        self.written = False

    def commit(self) -> None:
        """Commit the round: its residual becomes current."""
        if self.written:
            self.standing, self.coming = self.coming, self.standing
            self.written = False


def encode_with_error(codec: Codec, numbers: Tensor, out: Tensor) -> None:
    """Encode numbers as `Codec.encode` does, and overwrite them with the encoding error."""
    codec.encode(numbers, out)
    codec.decode(out, numbers, weight=-1.0, add=True)


class ErrorFeedback:
    """Residuals by tag: one for each vector that is sent repeatedly.

    Args:
        keeps: share of the last round's error that is added to the next message.

    Do not commit a round whose message was refused: its cause, for example a NaN, would stay in the
    residual for ever.
    """

    def __init__(self, keeps: float = 1.0) -> None:
        self.keeps = keeps
        self._left: dict[str, Residual] = {}

    def encode(self, tag: str, codec: Codec, numbers: Tensor, out: Tensor) -> None:
        """Encode numbers [elements] plus the residual of a tag; see `Codec.encode`.

        Raises a BugError if the tag had another number of elements before.
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
        encode_with_error(codec, left.add(numbers), out)

    def begin(self) -> None:
        """Start a round and discard the residuals of an uncommitted one."""
        for left in self._left.values():
            left.begin()

    def commit(self, counts: Callable[[str], bool] | None = None) -> None:
        """Commit the round; tags that sent nothing keep their residuals.

        Args:
            counts: returns whether a tag's message counted; default: all did.
        """
        for tag, left in self._left.items():
            if counts is None or counts(tag):
                left.commit()

    def tensors(self) -> dict[str, Tensor]:
        """Return the committed residuals by tag; not copies."""
        return {tag: left.standing for tag, left in self._left.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load residuals that `tensors` returned; tags without an entry start at zero."""
        self._left = {}
        for tag, tensor in tensors.items():
            left = Residual(tensor.numel(), tensor.dtype, tensor.device, self.keeps)
            left.standing.copy_(tensor)
            self._left[tag] = left
