"""Codecs: what comes back, from any size, for any weight; what is not finite; what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from shoal.base.errors import BugError, ConfigError
from shoal.base.layouts import island_options
from shoal.fabric.compressed.codecs import ALIGNED, BLOCK, CODECS, Codec, find_codec
from shoal.fabric.compressed.codecs.e3m0 import E3M0Codec
from shoal.fabric.compressed.codecs.int8 import Int8Codec
from shoal.fabric.compressed.codecs.top2bit import GROUP
from shoal.fabric.compressed.compressed_sums import pack_indices, top_k_indices, unpack_indices

FP32, FP64 = torch.float32, torch.float64
SIZES = [0, 1, 2, 7, 63, 65, 4097, BLOCK - 1, BLOCK, 2 * BLOCK + 3 * 4096 + 5]
SCALED = ["int8", "e3m0", "sign"]
every_codec = pytest.mark.parametrize("name", CODECS)
both_formats = pytest.mark.parametrize("dtype", [FP32, FP64], ids=["fp32", "fp64"])


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def coded(codec: Codec, numbers: torch.Tensor, fill: int = 255) -> torch.Tensor:
    packed = torch.full((codec.size_bytes(numbers.numel()),), fill, dtype=torch.uint8)
    codec.encode(numbers, packed)
    return packed


def through(codec: Codec, numbers: torch.Tensor) -> torch.Tensor:
    """Coded and decoded."""
    out = torch.full_like(numbers, math.nan)
    codec.decode(coded(codec, numbers), out)
    return out


@both_formats
@pytest.mark.parametrize("elements", SIZES)
@every_codec
def test_any_size_whatever_was_there_before(name: str, elements: int, dtype: torch.dtype) -> None:
    codec = find_codec(name, dtype)
    numbers = drawn(elements, dtype=dtype)
    kept = numbers.clone()
    packed = coded(codec, numbers)
    assert packed.numel() % ALIGNED == 0
    assert torch.equal(packed, coded(codec, numbers, fill=0)), "a byte was not written"
    assert torch.equal(numbers, kept)
    told = torch.full_like(numbers, math.nan)
    codec.decode(packed, told)
    assert bool(told.isfinite().all())
    error = (told - numbers).double().norm() / numbers.double().norm().clamp(min=1e-30)
    assert float(error) <= {"none": 0, "bf16": 0.004, "int8": 0.02}.get(name, 1)


@both_formats
@every_codec
def test_a_weight_and_a_sum(name: str, dtype: torch.dtype) -> None:
    """Each product and each sum is rounded once: what the same is by hand, bit for bit."""
    codec = find_codec(name, dtype)
    numbers = drawn(BLOCK + 4099, dtype=dtype)
    packed = coded(codec, numbers)
    plain, weighted = torch.empty_like(numbers), torch.full_like(numbers, math.nan)
    codec.decode(packed, plain)
    codec.decode(packed, weighted, weight=0.3)
    if name == "int8":  # code · (weight · scale)
        scales = packed[: 2 * dtype.itemsize].view(dtype) * 0.3
        codes = packed[2 * dtype.itemsize :][: numbers.numel()].view(torch.int8).to(dtype)
        expected = torch.cat([codes[:BLOCK] * scales[0], codes[BLOCK:] * scales[1]])
    else:
        expected = plain * torch.tensor(0.3, dtype=dtype)
    assert torch.equal(weighted, expected)
    before = drawn(numbers.numel(), seed=1, dtype=dtype)
    total = before.clone()
    codec.decode(packed, total, weight=0.3, add=True)
    assert torch.equal(total, before + weighted)
    codec.decode(packed, total, weight=-0.3, add=True)
    assert torch.equal(total, before + weighted - weighted)


@every_codec
def test_pieces_know_nothing_of_each_other(name: str) -> None:
    """Pieces of odd sizes, one after another in one row of bytes, from and into odd places."""
    codec = find_codec(name, FP32)
    numbers, told = drawn(BLOCK + 5000)[1:], torch.empty(BLOCK + 5000)[1:]
    sizes = [1, 4098, BLOCK + 3]
    pieces = numbers[: sum(sizes)].split(sizes)
    row = torch.empty(sum(map(codec.size_bytes, sizes)), dtype=torch.uint8)
    rows = row.split([codec.size_bytes(n) for n in sizes])
    for piece, packed in zip(pieces, rows, strict=True):
        codec.encode(piece, packed)
    for piece, packed, out in zip(pieces, rows, told[: sum(sizes)].split(sizes), strict=True):
        codec.decode(packed, out)
        assert torch.equal(packed, coded(codec, piece.clone()))
        assert torch.equal(out, through(codec, piece.clone()))


def test_bytes_of_a_number() -> None:
    """What every codec costs, scales included: of a million numbers."""
    sizes = {name: find_codec(name, FP32).size_bytes(1 << 20) for name in CODECS}
    assert sizes == {
        "none": 4 << 20,
        "bf16": 2 << 20,
        "int8": (1 << 20) + 64,
        "e3m0": (1 << 19) + 64,
        "top2bit": (1 << 14) * 14 // 8 + 128,
        "sign": (1 << 17) + 64,
    }


def test_bf16_of_fp64_goes_through_fp32() -> None:
    """Just above the middle of two bf16; in fp32 it lies on it, and goes to the even one."""
    numbers = torch.tensor([1 + 2**-8 + 2**-40, 1 + 2**-8 + 2**-20], dtype=FP64)
    assert through(find_codec("bf16", FP64), numbers).tolist() == [1, 1 + 2**-7]


@both_formats
@pytest.mark.parametrize("block", [1024, BLOCK])
def test_int8_errs_by_half_a_scale(block: int, dtype: torch.dtype) -> None:
    """And a block has its own scale: tiny numbers beside huge ones survive in another block."""
    numbers = drawn(3 * block, dtype=dtype)
    numbers[block : 2 * block] *= 1e-20
    told = through(Int8Codec(dtype, block), numbers)
    scale = numbers.view(3, -1).abs().amax(1, keepdim=True) / 127
    assert bool(((told - numbers).view(3, -1).abs() <= 0.50002 * scale).all())


def nearest_power(number: float, scale: float) -> float:
    """What E3M0Codec makes of a number, by its definition: the nearest of 15, of two the larger."""
    magnitudes = [0.0, *(scale * 2.0**-k for k in range(7))]
    best = min(magnitudes, key=lambda m: (abs(abs(number) - m), -m))
    return math.copysign(best, number)


@both_formats
def test_e3m0_takes_the_nearest(dtype: torch.dtype) -> None:
    numbers = drawn(2001, dtype=dtype)
    numbers[:8] = torch.tensor([0, 1.5, -1.5, 0.75, 3 / 128, -3 / 256, 1 / 64, 6.0])
    assert float(numbers.abs().max()) == 6.0  # as near to 4 as to 8
    told = through(E3M0Codec(dtype), numbers)
    assert told.tolist() == [nearest_power(number, 8.0) for number in numbers.tolist()]


def test_sign_is_the_mean_magnitude() -> None:
    numbers = torch.tensor([1.0, -2.0, 0.0, -5.0, 2.0, 2.0, 2.0, 2.0, -2.0])
    assert through(find_codec("sign", FP32), numbers).tolist() == [
        2, -2, 2, -2, 2, 2, 2, 2, -2
    ]  # fmt: skip


@both_formats
def test_top2bit_sends_the_largest(dtype: torch.dtype) -> None:
    numbers = drawn(20 * 4096 + 100, dtype=dtype)
    numbers[70_000:71_000] *= 1e10  # groups of their own: others do not feel it
    numbers[-100:] *= 1e-10
    told = through(find_codec("top2bit", dtype), numbers)
    for start in range(0, numbers.numel(), 4096):
        chunk, sent = numbers[start : start + 4096], told[start : start + 4096]
        count = -(-len(chunk) // 64)
        best = chunk.abs().topk(count).indices
        assert set(best.tolist()) == set(sent.nonzero().flatten().tolist())
        assert torch.equal(sent[best].sign(), chunk[best].sign())
        if start < GROUP or len(chunk) < 4096:
            assert float((sent[best] - chunk[best]).abs().max()) < float(chunk.abs().max()) / 2
    kept = numbers[: 16 * 4096].view(16, -1).abs().topk(64).values
    large = kept > kept.mean()
    expected = sorted([float(kept[large].mean()), float(kept[~large].mean())])
    assert told[: 16 * 4096].abs().unique().tolist() == pytest.approx([0, *expected], rel=1e-6)


def test_top2bit_of_equal_numbers() -> None:
    """No number is above the mean: that bin is empty."""
    numbers = torch.full((4096,), 0.1, dtype=FP64)
    told = through(find_codec("top2bit", FP64), numbers)
    assert told.unique().tolist() == pytest.approx([0, 0.1], rel=1e-15)
    assert not bool(through(find_codec("top2bit", FP64), 0 * numbers).any())


@both_formats
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_codec
def test_what_is_not_finite_does_not_vanish(name: str, bad: float, dtype: torch.dtype) -> None:
    codec = find_codec(name, dtype)
    numbers = drawn(2 * BLOCK, dtype=dtype)
    numbers[5] = bad
    told = through(codec, numbers)
    block = told[:BLOCK]
    assert not bool(block.isfinite().all())
    assert bool(told[BLOCK:].isfinite().all()), "another block"
    if name in SCALED:
        assert bool(block.isnan().all())
        other = numbers.clone()
        other[:BLOCK] = math.nan
        assert torch.equal(coded(codec, numbers), coded(codec, other)), "bytes of NaN differ"
    elif name == "top2bit":
        assert int(block.isnan().sum()) == BLOCK // 64
    total = torch.zeros_like(numbers)
    codec.decode(coded(codec, numbers), total, weight=0.5, add=True)
    assert not bool(total[:BLOCK].isfinite().all())


@both_formats
@pytest.mark.parametrize("name", ["int8", "e3m0"])
def test_at_the_ends_of_the_range(name: str, dtype: torch.dtype) -> None:
    """Numbers without a normal scale, and the largest there are."""
    numbers = torch.finfo(dtype)
    tiny, huge = numbers.tiny, numbers.max
    for size in (0.0, tiny * 2**-20, tiny / 3, tiny, 200 * tiny, huge / 3, huge * 0.9999):
        given = drawn(100, dtype=dtype).sign() * size
        told = through(find_codec(name, dtype), given)
        assert bool(told.isfinite().all())
        assert bool(((given - told).abs() <= given.abs()).all())


@both_formats
def test_a_scale_is_a_normal_number(dtype: torch.dtype) -> None:
    """What is smaller than the smallest scale is coded in it; zero stays zero."""
    tiny = torch.finfo(dtype).tiny
    numbers = torch.tensor([tiny, -3 * tiny, tiny / 3, 0.0], dtype=dtype)
    assert through(Int8Codec(dtype), numbers).tolist() == [tiny, -3 * tiny, 0, 0]
    assert through(E3M0Codec(dtype), numbers).tolist() == [2 * tiny, -4 * tiny, 0, 0]
    for codec, scale in ((Int8Codec(dtype), tiny), (E3M0Codec(dtype), 128 * tiny)):
        packed = coded(codec, torch.zeros_like(numbers))
        assert packed[: dtype.itemsize].view(dtype).item() == scale
        assert not bool(packed[dtype.itemsize :].any())


def test_the_names_are_those_that_users_write() -> None:
    assert tuple(CODECS) == island_options.CODECS
    for name in CODECS:
        codec = find_codec(name, FP64)
        assert (codec.name, codec.dtype, codec.gathers) == (name, FP64, name == "top2bit")


@pytest.mark.parametrize(
    ("find", "error", "said"),
    [
        (lambda: find_codec("int4", FP32), ConfigError,
         "islands.codec = int4: not one of none, bf16, int8, e3m0, top2bit, sign; try: int8"),
        (lambda: find_codec("int8", torch.bfloat16), BugError,
         "codec int8: numbers travel from float32 or float64, not from torch.bfloat16"),
    ],
)  # fmt: skip
def test_what_is_no_codec(find: Callable[[], Codec], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        find()
    assert str(caught.value) == said


@both_formats
def test_places_come_back_exactly(dtype: torch.dtype) -> None:
    numbers = drawn(501, dtype=dtype)
    chosen = top_k_indices(numbers, 7)
    packed = pack_indices(numbers, chosen)
    assert packed.numel() == 7 * (dtype.itemsize + 4)
    values, at = unpack_indices(packed, dtype)
    assert torch.equal(at, chosen)
    assert torch.equal(values, numbers[chosen])
    assert float(values.abs().min()) >= float(numbers.abs().sort().values[-7])
    numbers[3] = math.nan
    assert top_k_indices(numbers, 1).tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codes_of_one_public_scale_add_up_as_integers(dtype: torch.dtype) -> None:
    """Messages of three members: the sum of their codes, decoded once, is the sum of all."""
    codec, scale, count = Int8Codec(dtype, 8, scale=0.25), 0.25, 21
    messages = [torch.randn(count, dtype=dtype) for _ in range(3)]
    packed = []
    for one in messages:
        out = torch.empty(codec.size_bytes(count), dtype=torch.uint8)
        codec.encode(one, out)
        packed.append(codec._fields(out, count)[1].view(torch.int8).to(torch.int32))
    summed = sum(packed).to(dtype) * scale  # type: ignore[union-attr]
    assert torch.equal(summed, sum(through(codec, one) for one in messages))
    assert float((summed - sum(messages)).abs().max()) <= 3 * scale / 2 * 1.0001
    wild = through(codec, torch.tensor([1e4, -1e4, 0.0] + 8 * [torch.inf], dtype=dtype))
    assert wild[:2].isnan().all()
    assert through(codec, torch.tensor([1e4, -1e4], dtype=dtype)).tolist() == [31.75, -31.75]
