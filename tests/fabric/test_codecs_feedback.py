"""Error feedback: nothing is lost over rounds, and a round that did not count was never there."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.base.errors import BugError
from shoal.fabric.compressed.codecs import CODECS, Codec, ErrorFeedback, find_codec

LOSSY = [name for name in CODECS if name != "none"]
ELEMENTS, ROUNDS = 4096 + 777, 12


def message(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ELEMENTS, generator=generator, dtype=dtype)


def send(
    feedback: ErrorFeedback, codec: Codec, numbers: torch.Tensor, tag: str = "0"
) -> torch.Tensor:
    """What arrives."""
    packed = torch.empty(codec.size_bytes(numbers.numel()), dtype=torch.uint8)
    feedback.encode(tag, codec, numbers, packed)
    out = torch.empty_like(numbers)
    codec.decode(packed, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", LOSSY)
def test_what_arrived_and_what_is_left_make_the_whole(name: str, dtype: torch.dtype) -> None:
    feedback, codec = ErrorFeedback(), find_codec(name, dtype)
    arrived, true = torch.zeros(ELEMENTS, dtype=torch.float64), 0
    for seed in range(ROUNDS):
        numbers = message(seed, dtype)
        kept = numbers.clone()
        feedback.begin()
        arrived += send(feedback, codec, numbers)
        feedback.commit()
        assert torch.equal(numbers, kept)
        true = true + numbers.double()
    left = feedback.tensors()["0"]
    assert float(left.norm()) > 0
    error = float((arrived + left - true).norm() / true.norm())
    assert error <= ROUNDS * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", LOSSY)
def test_a_round_that_did_not_count_leaves_no_trace(name: str) -> None:
    """Not even one full of NaN, nor a tag that appeared in it."""
    codec = find_codec(name, torch.float64)
    met, never = ErrorFeedback(), ErrorFeedback()
    for one in (met, never):
        one.begin()
        send(one, codec, message(1))
        one.commit()
    met.begin()
    broken = message(2)
    broken[::3] = math.nan
    send(met, codec, broken)
    send(met, codec, broken, tag="new")
    for seed in (3, 4):
        results = []
        for one in (met, never):
            one.begin()
            results += [send(one, codec, message(seed)), send(one, codec, message(5), tag="new")]
            one.commit()
        assert torch.equal(results[0], results[2])
        assert torch.equal(results[1], results[3])
    assert all(torch.equal(met.tensors()[tag], never.tensors()[tag]) for tag in ("0", "new"))


def test_a_round_that_sends_twice_keeps_both() -> None:
    codec, feedback = find_codec("sign", torch.float64), ErrorFeedback()
    feedback.begin()
    arrived = send(feedback, codec, message(1)) + send(feedback, codec, message(2))
    feedback.commit()
    left = message(1) + message(2) - arrived
    assert torch.allclose(feedback.tensors()["0"], left, rtol=0, atol=1e-14)


def test_what_is_left_may_fade() -> None:
    """Once per round, however often that sends; also after it was loaded."""
    codec, feedback = find_codec("sign", torch.float64), ErrorFeedback(keeps=0.75)
    left = torch.zeros(ELEMENTS, dtype=torch.float64)
    for seed in range(3):
        feedback.begin()
        arrived = send(feedback, codec, message(seed)) + send(feedback, codec, message(seed + 9))
        feedback.commit()
        left = 0.75 * left + message(seed) + message(seed + 9) - arrived
        assert torch.allclose(feedback.tensors()["0"], left, rtol=0, atol=1e-14)
        feedback.load(feedback.tensors())


def test_a_tag_that_sends_nothing_keeps_what_it_had() -> None:
    codec, feedback = find_codec("e3m0", torch.float64), ErrorFeedback()
    for tag in ("0", "1"):
        feedback.begin()
        send(feedback, codec, message(1), tag=tag)
        feedback.commit()
    assert torch.equal(
        feedback.tensors()["0"], message(1) - send(ErrorFeedback(), codec, message(1))
    )


def test_what_is_left_is_saved_and_taken() -> None:
    codec = find_codec("int8", torch.float64)
    whole = ErrorFeedback()
    send(whole, codec, message(1))
    whole.commit()
    saved = {tag: tensor.clone() for tag, tensor in whole.tensors().items()}
    kept = saved["0"].clone()
    resumed = ErrorFeedback()
    send(resumed, codec, message(7), tag="gone")
    resumed.load(saved)
    for seed in (2, 3):
        for one in (whole, resumed):
            one.begin()
        assert torch.equal(*(send(one, codec, message(seed)) for one in (whole, resumed)))
        for one in (whole, resumed):
            one.commit()
    assert list(resumed.tensors()) == ["0"]
    assert torch.equal(whole.tensors()["0"], resumed.tensors()["0"])
    assert torch.equal(saved["0"], kept), "the saved tensor itself was taken"


def test_a_tag_is_one_vector() -> None:
    codec, feedback = find_codec("int8", torch.float64), ErrorFeedback()
    send(feedback, codec, message(1), tag="2.0")
    with pytest.raises(BugError) as caught:
        send(feedback, codec, message(1)[:10], tag="2.0")
    assert str(caught.value) == (
        "error feedback of 2.0: 10 numbers, but 4873 were left over; every tag is one vector"
    )
