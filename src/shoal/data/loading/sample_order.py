"""Order of all samples, computed on the fly from one integer.

Samples form one endless stream. Position p lies in epoch e = p // n and is dataset index
perm_e(p mod n), where perm_e shuffles 0 … n − 1 anew in every epoch. No list is shuffled or
stored: perm_e is a keyed Feistel network on w = max(6, ⌈log2 n⌉) bits, so memory is O(1) and any
position costs the same.

    (L, R) = the high ⌊w/2⌋ and the low ⌈w/2⌉ bits of x
    twelve times, in turn:  L ^= F(R, key_r)   or   R ^= F(L, key_r)      each undoes itself
    while the result is ≥ n: the same again ("cycle walking"; under 2 walks on average for n > 32)

Every step is a bijection, so the whole is one, whatever F is. The keys are the SHAKE-256 digest of
(seed, epoch, n); F is the finaliser of SplitMix64.

Source  Black & Rogaway 2002, "Ciphers with arbitrary finite domains" (cycle walking); Steele et al.
        2014 (SplitMix64). Ours differs in having unequal halves, so that w need not be even.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 12
TABLE_BITS = 12
"""Most bits of a half for which F is a table; 8192 positions then take 0.4 ms instead of 1.5."""

MIN_BITS = 6
"""fewer bits shuffle 3 samples unevenly (measured: chi² 4 times its mean at 2 bits)"""


def _mix(half: Words, key: np.uint64 | Words) -> Words:
    """Return 64 well-mixed bits per element (SplitMix64's finaliser; products wrap around)."""
    x = half + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _draw_keys(seed: int, epoch: int, samples: int) -> Words:
    """Return the keys of the rounds, [ROUNDS]."""
    digest = hashlib.shake_256(f"shoal order {seed} {epoch} {samples}".encode()).digest(8 * ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


@lru_cache(maxsize=8)  # training's and validation's epochs, of a loader or two
def _rounds(seed: int, epoch: int, samples: int, width: int) -> list[Callable[[Words], Words]]:
    """Return F of each round: bits for one half from the other, by a table for few bits."""
    low, high = (width + 1) // 2, width // 2

    def stirred(key: np.uint64, bits: int, half: Words) -> Words:
        return _mix(half, key) & np.uint64(2**bits - 1)

    def looked_up(table: Words, half: Words) -> Words:
        return table.take(half.view(np.int64))

    rounds: list[Callable[[Words], Words]] = []
    for number, word in enumerate(_draw_keys(seed, epoch, samples)):
        given, wanted = (low, high) if number % 2 else (high, low)
        one = partial(stirred, word, wanted)
        if given <= TABLE_BITS:
            one = partial(looked_up, one(np.arange(2**given, dtype=np.uint64)))
        rounds.append(one)
    return rounds


def _network(x: Words, rounds: list[Callable[[Words], Words]], width: int) -> Words:
    """Apply one bijection of 0 … 2^width − 1, element by element."""
    low_bits = np.uint64((width + 1) // 2)
    high, low = x >> low_bits, x & ((np.uint64(1) << low_bits) - np.uint64(1))
    for number, one in enumerate(rounds):
        if number % 2:
            high ^= one(low)
        else:
            low ^= one(high)
    return (high << low_bits) | low


@lru_cache(maxsize=128)  # owners in turn have an epoch each; 4 MiB at most
def _permute_all(seed: int, epoch: int, samples: int, width: int) -> Indices:
    """Return the shuffled positions of 0 … samples − 1, the same as of `_network`.

    Of few samples calls take longer than numbers. So the tables of all rounds are made at once, and
    the network is a table: a walk is one look-up, and look-ups of 2, 4, 8 … walks are looked up.
    """
    low, high = (width + 1) // 2, width // 2
    mixed = _mix(np.arange(2**low, dtype=np.uint64), _draw_keys(seed, epoch, samples)[:, None])
    masks = np.array([2**low - 1, 2**high - 1] * (ROUNDS // 2), dtype=np.int64)
    tables = list(mixed.view(np.int64) & masks[:, None])
    domain = np.arange(2**width, dtype=np.int64)
    left, right = domain >> low, domain & (2**low - 1)
    for of_left, of_right in zip(tables[::2], tables[1::2], strict=True):
        right ^= of_left.take(left)
        left ^= of_right.take(right)
    network = (left << low) | right
    found = network[:samples]
    domain[samples:] = network[samples:]  # results inside stay, the others walk on
    while int(found.max()) >= samples:
        found, domain = domain.take(found), domain.take(domain)
    found.flags.writeable = False
    return found


def permute(offsets: npt.ArrayLike, samples: int, seed: int, epoch: int) -> Indices:
    """Return the shuffled position of each offset in 0 … samples − 1; int64, same shape [k].

    Args:
        offsets: numbers in 0 … samples − 1; (seed, epoch, samples) selects the shuffle.

    Note:
        samples ≤ 2^62.

    >>> sorted(permute(range(5), 5, seed=0, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    if samples <= 1:
        return np.zeros(np.shape(offsets), dtype=np.int64)
    width = max(MIN_BITS, (samples - 1).bit_length())
    if width <= TABLE_BITS:
        return _permute_all(seed, epoch, samples, width).take(np.asarray(offsets, dtype=np.int64))
    x = np.asarray(offsets, dtype=np.uint64)
    rounds = _rounds(seed, epoch, samples, width)
    x = _network(x, rounds, width)
    outside = np.flatnonzero(x >= samples)
    while outside.size:
        x[outside] = _network(x[outside], rounds, width)
        outside = outside[x[outside] >= samples]
    return x.astype(np.int64)


def samples_at(
    start: int, stop: int, samples: int, seed: int, *, shuffle: bool = True
) -> tuple[int, Indices]:
    """Return epoch and dataset indices [stop − start] of stream positions of one epoch.

    Args:
        samples: n ≥ 1, the dataset's length.
        shuffle: False: index p mod n, in file order.

    Raises:
        ValueError: the range spans two epochs (no step and no micro-batch does).

    >>> epoch, indices = samples_at(8, 10, 5, seed=1)
    >>> epoch, indices.tolist() == permute([3, 4], 5, seed=1, epoch=1).tolist()
    (1, True)
    """
    epoch = start // samples
    if stop > (epoch + 1) * samples:
        raise ValueError(f"positions {start} … {stop - 1} lie in two epochs of {samples} samples")
    offsets = np.arange(start - epoch * samples, stop - epoch * samples, dtype=np.int64)
    return epoch, permute(offsets, samples, seed, epoch) if shuffle else offsets
