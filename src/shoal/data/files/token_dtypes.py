"""Check that a raw token file is read with the dtype with which it was written.

A `.bin` file does not store its dtype. Enough bytes show it. In 32-bit ids every second 16-bit
number is 0 or tiny; in 16-bit ids the low byte varies more than the high one. In 8-bit ids all
bytes have one distribution, and ids in floats are whole numbers.

    token ids      70000       12           65           uint32, little-endian
    as uint16      4464   1    12   0       65   0       second ones ≤ 255: they are high halves

Only certain evidence counts: at least LEAST numbers of one position are above all of the other.
Without evidence (a short file, one of zeros) there is no result.

Two writers say the dtype: llm.c (and modded-nanogpt) in 256 int32 before the tokens, Megatron-LM in
the `.idx` beside the `.bin`.
Source: llm.c's dev/data/data_common.py; Megatron-LM's core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.base.errors import ConfigError
from shoal.data.files.file_formats import HEAD_BYTES, LEAST_EVIDENCE, find_format

Numbers = npt.NDArray[Any]

BLOCKS, BLOCK_BYTES = 64, 4096
"""Pieces of a file that are sampled, evenly spread, at multiples of 8 bytes · bytes of each."""

LEAST = 24
"""Numbers that must be above all of the other position: by chance 2⁻²⁴ if both are alike."""

SPREAD = 2**14
"""Least maximum of the low halves of ids above 65,535: such a vocabulary fills 16 bits."""

LEAST_BYTES = 2048
"""Bytes of each position whose distributions are compared; fewer differ by chance."""

LLM_C = {
    20240520: ("llm.c and modded-nanogpt", "uint16"),
    20240801: ("llm.c (Llama 3)", "uint32"),
    20240522: ("llm.c's evaluations", ""),
    20240326: ("llm.c's weights", ""),
}
"""First int32 of a file → the program that writes it, and the dtype of tokens after its header."""

LLM_C_BYTES = 1024
"""Header of llm.c: 256 int32."""

MEGATRON = (b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00")
MEGATRON_BYTES = 34
"""Bytes of its index before the lengths of sequences."""
MEGATRON_CODES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}

FLOATS = {"<f8": "float64", "<f4": "float32", "<f2": "float16"}
"""Float formats in which ids are saved by mistake: `array.astype(float).tofile`."""

SAME_BYTES = {"int32": "uint32"}
"""Pairs of dtypes in which ids have the same bytes."""


@dataclass(frozen=True)
class DetectedDtype:
    """The dtype and byte order that a file's bytes show, and the evidence."""

    dtype: str
    why: str
    big_endian: bool = False


def detect_dtype(sample: bytes) -> DetectedDtype | None:
    """Return the dtype of a sample of raw token ids; None if uncertain.

    Args:
        sample: whole pieces of the file, each from a multiple of 8 bytes on.

    >>> detect_dtype(np.arange(100, dtype="<u4").tobytes()).dtype
    'uint32'
    >>> drawn = np.random.default_rng(0).integers(5000, size=4000)
    >>> detect_dtype(drawn.astype("<u2").tobytes()).dtype, detect_dtype(bytes(8000))
    ('uint16', None)
    """
    rows = np.frombuffer(sample[: len(sample) // 8 * 8], dtype=np.uint8).reshape(-1, 8)
    if not len(rows):
        return None
    return _find_floats(rows) or _find_wide(rows) or _find_bytes(rows) or _find_uint16(rows)


def _find_floats(rows: Numbers) -> DetectedDtype | None:
    """Return a float dtype if all numbers are integer ids, with small ones that exclude chance."""
    for code, dtype in FLOATS.items():
        numbers = rows.view(code).ravel()
        if not np.isfinite(numbers).all():
            continue
        if float(numbers.min()) < 0 or float(numbers.max()) >= 2**24:
            continue
        if (numbers != np.floor(numbers)).any():
            continue
        # Large floats are whole whatever their bits are: 1024 is the first such float16.
        if len(np.unique(numbers[(numbers > 0) & (numbers < 1024)])) >= LEAST:
            return DetectedDtype(dtype, "read as floats, all numbers are whole")
    return None


def _find_wide(rows: Numbers) -> DetectedDtype | None:
    """Return uint32 or int64, of either byte order, from 16-bit numbers in rows of four."""
    for order in ("<u2", ">u2"):
        pairs = rows.view(order)  # [rows, 4]
        big = order == ">u2"
        places = (3, 2, 1, 0) if big else (0, 1, 2, 3)  # from the lowest bits of 8 bytes up
        low, high, third, fourth = (pairs[:, place] for place in places)
        if not (third.any() or fourth.any()) and _are_halves(low, high):
            return DetectedDtype(
                "int64", "three of four 16-bit numbers are high parts, 0 or tiny", big
            )
        lows, highs = np.concatenate([low, third]), np.concatenate([high, fourth])
        if _are_halves(lows, highs):
            why = f"every second 16-bit number is a high half, at most {int(highs.max())}"
            return DetectedDtype("uint32", why, big)
    return None


def _are_halves(low: Numbers, high: Numbers) -> bool:
    """Return whether these can only be the low and the high halves of ids below 2²⁴."""
    top = int(high.max())
    if top > 255 or np.count_nonzero(low > top) < LEAST:
        return False
    return top == 0 or int(low.max()) >= SPREAD


def _find_bytes(rows: Numbers) -> DetectedDtype | None:
    """Return uint8 if both bytes of a pair have one distribution, neither noise nor 0."""
    first, second = (np.bincount(rows[:, k::2].ravel(), minlength=256) for k in (0, 1))
    both = first + second
    if first.sum() < LEAST_BYTES or both[0] > 0.05 * both.sum():
        return None
    if _distance(first, second) < 0.15 and 2.0 < _entropy(both) < 7.6:
        return DetectedDtype("uint8", "the bytes of both places of a pair are alike")
    return None


def _find_uint16(rows: Numbers) -> DetectedDtype | None:
    """Return uint16 of either byte order: low bytes vary more, and are above all high ones.

    Both numbers of a pair must have similar distributions, else they may be halves of wider ids.
    """
    pairs = rows.view("<u2")
    halves = [np.bincount(rows[:, [k, k + 4]].ravel(), minlength=256) for k in range(4)]
    if np.count_nonzero(pairs[:, 1::2]) * 2 < np.count_nonzero(pairs[:, 0::2]):
        return None
    if max(_distance(halves[0], halves[2]), _distance(halves[1], halves[3])) > 0.4:
        return None
    first, second = rows[:, 0::2].ravel(), rows[:, 1::2].ravel()
    for low, high, big in ((first, second, False), (second, first, True)):
        if _are_bytes(low, high):
            why = f"the {'second' if big else 'first'} byte of each pair varies, the other does not"
            return DetectedDtype("uint16", why, big)
    return None


def _are_bytes(low: Numbers, high: Numbers) -> bool:
    """Return whether these can only be the low and the high bytes of ids below 2¹⁶."""
    top = int(high.max())
    above = low[low > top]
    if len(above) < LEAST or top == 0:
        return len(above) >= LEAST
    entropies = [_entropy(np.bincount(one, minlength=256)) for one in (low, high)]
    more = entropies[0] - entropies[1]
    return int(low.max()) >= 192 and (more > 1.0 or (more > 0 and len(np.unique(above)) >= 16))


def _distance(first: Numbers, second: Numbers) -> float:
    """Return the total variation of two histograms, 0 … 1."""
    shares = [counts / max(1, counts.sum()) for counts in (first, second)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def _entropy(counts: Numbers) -> float:
    """Return the entropy of counts, in bits."""
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log2(shares)).sum())


def read_sample(path: str) -> bytes:
    """Read BLOCKS pieces of a file, evenly spread; all of a small one. May raise OSError."""
    size = Path(path).stat().st_size
    with open(path, "rb", buffering=0) as file:
        if size <= BLOCKS * BLOCK_BYTES:
            return file.read()
        pieces = []
        for number in range(BLOCKS):
            file.seek(number * (size - BLOCK_BYTES) // (BLOCKS - 1) // 8 * 8)
            pieces.append(file.read(BLOCK_BYTES))
        return b"".join(pieces)


def check_dtype(path: str, dtype: str, said: str) -> None:
    """Refuse a raw file whose bytes show that it was written with another dtype.

    Args:
        path: a file of raw token ids.
        dtype: the configured dtype.
        said: source of that dtype: a key, a meta.json, or the default.

    Raises:
        ConfigError: the dtypes differ; names the dtype of the bytes, and the key to set.
    """
    found = detect_dtype(read_sample(path))
    if found is None:
        return
    right = SAME_BYTES.get(dtype, dtype)
    if found.dtype == right and not found.big_endian:
        return
    name = f"big-endian {found.dtype}" if found.big_endian else found.dtype
    code = {"uint8": "u1", "uint16": "u2", "uint32": "u4", "int64": "i8"}.get(found.dtype)
    hint = f"data.dtype={found.dtype}"
    if found.dtype in FLOATS.values():
        read = next(code for code, dtype in FLOATS.items() if dtype == found.dtype)
        hint = f"numpy.fromfile({path!r}, {read!r}).astype('<u4').tofile(…), data.dtype=uint32"
    elif found.big_endian:
        hint = f"numpy.fromfile({path!r}, '>{code}').astype('<{code}').tofile(…)"
    elif found.dtype == "uint8":
        hint += f", or data.source=text:{path} if it is text"
    raise ConfigError(
        f"{path}: read as {dtype} ({said}), but it was written as {name}: {found.why}; try: {hint}"
    )


@dataclass(frozen=True)
class TokenHeader:
    """Header of a token file, or of an index beside it: dtype, length, writer.

    Attributes:
        dtype: of the tokens; "" if nothing says it.
        skipped_bytes: bytes before the first token.
        writer: the program that wrote the file.
    """

    dtype: str = ""
    skipped_bytes: int = 0
    writer: str = ""


def read_header(path: Path, dtype: str = "", by: str = "") -> TokenHeader:
    """Return what is known about a .bin file from its own header, or from Megatron-LM's index.

    Args:
        path: of the file.
        dtype, by: the dtype that the user set, and where; "" if none.

    Raises:
        ConfigError: the file holds no tokens, fewer than it counts, or of another dtype than the
            user set.
    """
    with path.open("rb", buffering=0) as file:
        head = file.read(HEAD_BYTES)
    magic = int.from_bytes(head[:4], "little")
    index = path.with_suffix(".idx")
    if magic in LLM_C and len(head) >= LLM_C_BYTES:
        writer, kind = LLM_C[magic]
        if not kind:
            raise ConfigError(
                f"{path}: begins with the header of {writer}, magic {magic}: {LLM_C_BYTES} bytes "
                f"that are no tokens; try: a file of training tokens"
            )
        found = TokenHeader(kind, LLM_C_BYTES, f"the header of {writer}")
        _check_count(path, found, int.from_bytes(head[8:12], "little"))
    elif index.is_file() and (told := _read_megatron_index(path, index)) is not None:
        found = told
    else:
        _refuse_other_formats(path, head)
        return TokenHeader()
    if dtype and SAME_BYTES.get(dtype, dtype) != SAME_BYTES.get(found.dtype, found.dtype):
        raise ConfigError(
            f"{path}: read as {dtype} ({by}), but {found.writer} says {found.dtype}; try: "
            f"data.dtype=auto"
        )
    return found


def _check_count(path: Path, header: TokenHeader, tokens: int) -> None:
    """Refuse a file that does not hold as many tokens as its header or index counts."""
    size = path.stat().st_size - header.skipped_bytes
    if size != tokens * np.dtype(header.dtype).itemsize:
        raise ConfigError(
            f"{path}: {header.writer} counts {tokens} tokens of {header.dtype}, and the file has "
            f"{size} bytes of them; try: copy it again"
        )


def _read_megatron_index(path: Path, index: Path) -> TokenHeader | None:
    """Return the dtype that Megatron-LM's index beside a file says; None for another index.

    9 bytes MMIDIDX, version, dtype (1 byte), numbers of sequences and documents (8 bytes each),
    then the length of each sequence as int32. Sequences follow each other in the .bin.
    """
    with index.open("rb", buffering=0) as file:
        about = file.read(MEGATRON_BYTES)
    if not about.startswith(MEGATRON):
        return None
    dtype = MEGATRON_CODES.get(about[17]) if about.startswith(MEGATRON[0]) else None
    if dtype is None or len(about) < MEGATRON_BYTES:
        raise ConfigError(
            f"{path}: belongs to Megatron-LM's index {index.name}, whose dtype is not read (old "
            f"formats, int8, int16, floats); try: the .bin alone in a folder of its own, with "
            f"data.dtype"
        )
    sequences = int.from_bytes(about[18:26], "little")
    if index.stat().st_size < MEGATRON_BYTES + 4 * sequences:
        raise ConfigError(f"{index}: ends before its {sequences} lengths; try: copy it again")
    sizes = np.memmap(index, "<i4", "r", MEGATRON_BYTES, (sequences,)) if sequences else np.zeros(0)
    found = TokenHeader(dtype, 0, f"Megatron-LM's index {index.name}")
    _check_count(path, found, int(sizes.sum(dtype=np.int64)))
    return found


def _refuse_other_formats(path: Path, head: bytes) -> None:
    known = find_format(head, LEAST_EVIDENCE)
    if known is not None:
        hint = "name it .npy" if known.name.endswith(".npy") else known.hint(str(path))
        raise ConfigError(f"{path}: is {known.name}, not raw token ids; try: {hint}")
