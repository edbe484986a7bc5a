"""Text for a terminal whose encoding lacks some letters: × becomes x, a box becomes ASCII.

    READABLE       the name of an error handler: `text.encode("latin-1", READABLE)`
    PLAIN_ASCII    a codec that is ASCII under another name. Libraries take a stream that calls
                   itself ASCII for a mistake and write UTF-8 into it, which such a terminal shows
                   as noise

Letters of the encoding stay: latin-1 keeps × and loses only boxes.
"""

from __future__ import annotations

import codecs
import unicodedata

READABLE = "shoal.readable"
PLAIN_ASCII = "plain-ascii"

SPELT = {
    "×": "x", "−": "-", "–": "-", "—": "-", "·": ".", "…": "...", "→": "->", "←": "<-",
    "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "±": "+-", "√": "sqrt ", "∞": "inf",
    "∫": "integral ", "∂": "d", "α": "alpha", "β": "beta", "ε": "eps", "τ": "tau", "Σ": "sum ",
    "λ": "lambda", "⌈": "ceil(", "⌉": ")", "⌊": "floor(", "⌋": ")", "ⁿ": "^n", "°": " degrees",
    "●": "*", "○": "o", "◆": "#", "◇": "+", "▲": "^", "△": "^", "▼": "v", "■": "#", "□": ".",
    "█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "=", "▍": "-", "▎": "-", "▏": ".", "░": ".",
    "▒": ":", "▓": "#", "▁": "_", "▂": "_", "▃": "-", "▄": "-", "▅": "=", "▆": "=", "▇": "#",
    "\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "•": "*", "✓": "v", "✗": "x",
}  # fmt: skip
"""Replacements of letters that an encoding lacks; superscript and subscript figures have a rule."""


def ascii_replacement(letter: str) -> str:
    """Return the ASCII replacement of one letter; "?" for one that has none.

    >>> (
    ...     ascii_replacement("×"),
    ...     ascii_replacement("┼"),
    ...     ascii_replacement("é"),
    ...     ascii_replacement("⁹"),
    ...     ascii_replacement("漢"),
    ... )
    ('x', '+', 'e', '^9', '?')
    """
    if letter in SPELT:
        return SPELT[letter]
    name = unicodedata.name(letter, "")
    if name.startswith("BOX DRAWINGS"):
        across, along = "HORIZONTAL" in name, "VERTICAL" in name
        return "+" if across == along else "-" if across else "|"
    plain = unicodedata.normalize("NFKD", letter)
    plain = "".join(SPELT.get(one, one) for one in plain if not unicodedata.combining(one))
    plain = plain.encode("ascii", "ignore").decode()
    return ("^" if name.startswith("SUPERSCRIPT") else "") + plain if plain else "?"


def _replace(failure: UnicodeError) -> tuple[str, int]:
    """Replace letters that an encoding lacks, as an error handler of Python's codecs."""
    if not isinstance(failure, UnicodeEncodeError):
        raise failure
    lacking = failure.object[failure.start : failure.end]
    return "".join(map(ascii_replacement, lacking)), failure.end


def _plain_ascii(name: str) -> codecs.CodecInfo | None:
    if name.replace("_", "-") != PLAIN_ASCII:
        return None
    found = codecs.lookup("ascii")
    return codecs.CodecInfo(
        found.encode,
        found.decode,
        found.streamreader,
        found.streamwriter,
        found.incrementalencoder,
        found.incrementaldecoder,
        PLAIN_ASCII,
    )


codecs.register_error(READABLE, _replace)
codecs.register(_plain_ascii)
