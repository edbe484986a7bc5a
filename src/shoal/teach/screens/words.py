"""Format figures for the calculators' screens: the fewest exact digits, with their unit."""

from __future__ import annotations

import math


def number_text(value: float) -> str:
    r"""Format a plain number: three digits, thousands separated by a no-break space.

    >>> [number_text(v).replace("\xa0", " ") for v in (16384, 0.0512, 3, 1.5e9, 123456.7)]
    ['16 384', '0.0512', '3', '1.5e9', '123 457']
    """
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return "∞"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        return f"{value:.3g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\xa0")
    return f"{value:.3g}"


def percent_text(share: float) -> str:
    """Format a share of the whole.

    >>> percent_text(0.8534), percent_text(0.00042), percent_text(1.0)
    ('85.3 %', '0.042 %', '100.0 %')
    """
    shown = 100 * share
    if abs(shown) >= 1e6:
        return f"{shown:.1e} %"
    return f"{shown:.1f} %" if abs(shown) >= 1 or shown == 0 else f"{shown:.2g} %"


def factor_text(factor: float) -> str:
    """Format a speed-up.

    >>> factor_text(1.8181), factor_text(12.4)
    ('1.82×', '12.4×')
    """
    return f"{factor:.3g}×"


def duration_text(seconds: float) -> str:
    """Format seconds in a readable unit, from microseconds to days.

    >>> [duration_text(s) for s in (2e-6, 0.0042, 7.25, 95, 1140, 11160, 4665600)]
    ['2.0 us', '4.2 ms', '7.25 s', '95.0 s', '19.0 min', '3.10 h', '54.0 days']
    """
    if not math.isfinite(seconds):
        return "never"
    for least, size, unit in ((172800, 86400, "days"), (7200, 3600, "h"), (120, 60, "min")):
        if seconds >= least:
            if seconds >= 1e6 * 86400:
                return f"{seconds / size:.1e} {unit}"
            return f"{seconds / size:.{2 if unit == 'h' else 1}f} {unit}"
    if seconds >= 0.99995:  # else 1000.0 ms
        return f"{seconds:.{1 if seconds >= 10 else 2}f} s"
    if seconds == 0:
        return "0 s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def link_rate_text(bytes_per_s: float) -> str:
    """Format a link's rate in bits per second, as links are sold.

    >>> link_rate_text(125e6), link_rate_text(25e9), link_rate_text(float("inf"))
    ('1.00 Gbit/s', '200 Gbit/s', '∞')
    """
    bits = bytes_per_s * 8
    if not math.isfinite(bits):
        return "∞"
    for size, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits >= size:
            shown = bits / size
            if shown >= 1e6:
                return f"{shown:.1e} {unit}"
            return f"{shown:.{2 if shown < 10 else 1 if shown < 100 else 0}f} {unit}"
    return f"{bits:.0f} bit/s"


def geometric_range(low: float, high: float, count: int) -> list[float]:
    """Return `count` values from low to high with equal factors between them, ends included.

    >>> geometric_range(1, 100, 3)
    [1.0, 10.0, 100.0]
    """
    factor = (high / low) ** (1 / (count - 1))
    return [round(low * factor**place, 12) for place in range(count - 1)] + [float(high)]


def powers_of_two(low: int, high: int) -> list[int]:
    """Return the powers of two from low to high, and high itself.

    >>> powers_of_two(1, 12)
    [1, 2, 4, 8, 12]
    """
    counts = [low]
    while counts[-1] * 2 < high:
        counts.append(counts[-1] * 2)
    return [*counts, high] if high > low else counts
