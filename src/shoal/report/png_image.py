"""PNG files of heat maps, written by zlib alone: one byte per cell, a palette of 256 colours.

Source: PNG specification, third edition, W3C 2025: colour type 3, filter 0.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

RAMP = ((255, 255, 255), (254, 217, 118), (253, 141, 60), (227, 26, 28), (128, 0, 38), (40, 0, 20))
"""Colours from 0 to 255, in equal steps; luminance falls all the way, so that hue is not needed."""
LEVELS = 48
"""Shades of a map: fewer compress better."""
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def make_palette() -> bytes:
    """Return 256 colours of three bytes, interpolated along `RAMP`.

    >>> len(make_palette()), make_palette()[:3] == bytes(RAMP[0])
    (768, True)
    """
    found = bytearray()
    for number in range(256):
        place = number / 255 * (len(RAMP) - 1)
        low = min(int(place), len(RAMP) - 2)
        share = place - low
        found += bytes(
            round(a + (b - a) * share) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True)
        )
    return bytes(found)


def encode_png(rows: Sequence[bytes]) -> bytes:
    r"""Return a PNG of rows of cells, a byte each: 0 is transparent, 255 is darkest.

    >>> encode_png([b"\x00\xff"])[:8] == SIGNATURE
    True
    """
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    data = zlib.compress(b"".join(b"\x00" + row for row in rows), 9)
    chunks = ((b"IHDR", header), (b"PLTE", make_palette()), (b"tRNS", b"\x00"), (b"IDAT", data))
    return SIGNATURE + b"".join(_chunk(kind, body) for kind, body in (*chunks, (b"IEND", b"")))


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_data_url(rows: Sequence[bytes]) -> str:
    """Return a PNG of rows as a data: URL."""
    return "data:image/png;base64," + base64.b64encode(encode_png(rows)).decode("ascii")


def shade_cells(values: Array, most: float, least: float = 0.0) -> list[bytes]:
    """Return cells of a map as rows of bytes: 0 below `least`, 255 at `most`, by square roots.

    Args:
        values: [rows, columns], not negative.
        most: darkest value.
        least: values below are left white.

    >>> import numpy as np
    >>> [list(row) for row in shade_cells(np.array([[0.0, 1.0, 4.0]]), 4.0)]
    [[0, 128, 255]]
    """
    import numpy as np

    share = np.sqrt(np.clip(values / (most or 1.0), 0.0, 1.0))
    levels = np.ceil(share * LEVELS) * (values > least)
    # A cell of the largest value is the darkest, whatever was rounded.
    cells = np.rint(levels * (255 / LEVELS)).astype(np.uint8)
    return [row.tobytes() for row in cells]
