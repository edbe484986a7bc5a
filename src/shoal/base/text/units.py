"""Formatting of base units (bytes, seconds, FLOP) as text; no other module does it."""

from __future__ import annotations

LONGEST_S = 3600e5
"""Eleven years: above it hours and minutes are meaningless."""


def bytes_text(n_bytes: float) -> str:
    """Format bytes in the binary unit (B, KiB, … EiB) that keeps them below 1024.

    >>> bytes_text(3 * 2**20), bytes_text(512), bytes_text(1.5 * 2**30)
    ('3.0 MiB', '512 B', '1.5 GiB')
    >>> bytes_text(2e18), bytes_text(1e25)
    ('1.7 EiB', '8.7e+06 EiB')
    """
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{_short(size)} EiB"


def seconds_text(seconds: float) -> str:
    """Format seconds: ms below one second, s below a minute, then min and s, then h and min.

    >>> seconds_text(0.0042), seconds_text(7.25), seconds_text(95), seconds_text(7300)
    ('4.2 ms', '7.2 s', '1 min 35 s', '2 h 01 min')
    >>> seconds_text(1e12)
    '2.8e+08 h'
    """
    if seconds < 0.99995:  # else 1000.0 ms
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds >= LONGEST_S:
        return f"{_short(seconds / 3600)} h"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count_text(count: float) -> str:
    """Format a count in thousands with the field's suffix: none, K, M, B, T.

    >>> count_text(950), count_text(4_210_000), count_text(8.03e9)
    ('950', '4.2M', '8.0B')
    >>> count_text(1e18)
    '1.0e+06T'
    """
    size = float(count)
    for suffix in ("", "K", "M", "B"):
        if abs(size) < 1000:
            return f"{size:.0f}" if not suffix else f"{size:.1f}{suffix}"
        size /= 1000
    return f"{_short(size)}T"


def rate_text(rate: float, *, exact: bool = False) -> str:
    """Format a count per second; a small one, as of a first step, keeps two digits.

    Args:
        rate: count per second.
        exact: for a program: no rounding to thousands.

    >>> rate_text(0.3), rate_text(5231.0), rate_text(5231.0, exact=True)
    ('0.3', '5.2K', '5231')
    """
    if 0 < rate < 10:
        return f"{rate:.2g}"
    return f"{rate:.0f}" if exact else count_text(rate)


def count_noun(count: int, noun: str, several: str = "") -> str:
    """Return a count with its noun, in the plural where it has to be.

    >>> count_noun(1, "rank"), count_noun(2, "rank"), count_noun(0, "process", "processes")
    ('1 rank', '2 ranks', '0 processes')
    """
    return f"{count:,} {noun if count == 1 else several or f'{noun}s'}"


def flops_text(flops_per_s: float) -> str:
    """Format a rate of floating-point operations per second: FLOP/s, KFLOP/s, … PFLOP/s.

    >>> flops_text(78e9)
    '78.0 GFLOP/s'
    """
    size = float(flops_per_s)
    for prefix in ("", "K", "M", "G", "T"):
        if abs(size) < 1000:
            return f"{size:.1f} {prefix}FLOP/s"
        size /= 1000
    return f"{_short(size)} PFLOP/s"


def _short(size: float) -> str:
    """Format a figure in the largest unit, with an exponent if it has too many digits."""
    return f"{size:.1f}" if abs(size) < 1e5 else f"{size:.1e}"
