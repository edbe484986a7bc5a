"""Error feedback in checkpoints: each island's own, and only for the pieces it was left over from."""

from __future__ import annotations

import pytest
import torch

from shoal.fabric.compressed.codecs import ErrorFeedback, find_codec
from shoal.islands.error_feedback_files import IslandErrorFeedback

PIECES = {"islands.index": 1, "islands.count": 3, "layout": "fsdp", "islands.codec": "sign"}


def left(rank: int = 1, pieces: dict = PIECES, sends: bool = False) -> IslandErrorFeedback:
    feedback, codec = ErrorFeedback(), find_codec("sign", torch.float32)
    if sends:
        feedback.begin()
        for tag, elements in (("0/0/0", 40), ("0/sum/0", 24)):
            size = codec.size_bytes(elements)
            numbers = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
            feedback.encode(tag, codec, numbers, torch.empty(size, dtype=torch.uint8))
        feedback.commit()
    return IslandErrorFeedback(feedback, rank, pieces)


def test_what_is_left_comes_back_bit_for_bit() -> None:
    full, empty = left(sends=True), left()
    parts = full.parts()
    assert set(parts) == {"left.1.0/0/0", "left.1.0/sum/0"}
    assert all(shard.name == name for name, (_, shard) in parts.items())
    tensors = {name: tensor.clone() for name, (tensor, _) in parts.items()}
    others = {"left.11.0/0/0": torch.ones(40), "outer.w": torch.ones(3)}
    assert empty.select_own_tensors([*tensors, *others], full.record()) == list(tensors)
    assert empty.load({**tensors, **others}, full.record()) == ""
    assert full.feedback is not None
    assert empty.feedback is not None
    kept = empty.feedback.tensors()
    assert kept.keys() == full.feedback.tensors().keys()
    assert all(torch.equal(kept[tag], one) for tag, one in full.feedback.tensors().items())


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("islands.count", 2, "islands.count was 3, is 2"),
        ("islands.index", 0, "islands.index was 1, is 0"),
        ("layout", "ddp", "layout was fsdp, is ddp"),
        ("islands.codec", "top2bit", "islands.codec was sign, is top2bit"),
    ],
)
def test_of_other_pieces_nothing_is_taken(key: str, value: object, said: str) -> None:
    full, other = left(sends=True), left(pieces={**PIECES, key: value}, sends=True)
    tensors = {name: tensor for name, (tensor, _) in full.parts().items()}
    assert other.select_own_tensors(tensors, full.record()) == []
    line = other.load(tensors, full.record())
    assert line == f"what codes left out of earlier rounds is dropped: {said}"
    assert other.parts() == {}


def test_codes_that_leave_nothing_out_keep_nothing() -> None:
    none = IslandErrorFeedback(None, 1, {**PIECES, "islands.codec": "none"})
    assert none.parts() == {}
    assert none.record() is None
    assert none.load({}, None) == ""
    assert none.load({}, PIECES).endswith("dropped: islands.codec was sign, is none")
    full = left(sends=True)
    assert full.load({}, None) == "", "nothing was left in that checkpoint"
    assert full.parts() == {}
