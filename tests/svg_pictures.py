"""SVG pictures of terminals and of report sections: text stays text, light and dark, no font.

    terminal    each piece of text at its column, with its width fixed, so that any monospaced font
                fits; braille letters become dots, and lines of the box drawing block become lines
    page        the report's own elements and style sheet, in a foreignObject of fixed size

`rich.Console.export_svg` loads a font from a network, which an image in a page must not, and has
one set of colours.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape, unescape
from importlib import resources
from itertools import groupby

from shoal.report.png_image import make_palette
from shoal.view.watch.styled_lines import SGR, Line, cell_width, line_text

COLUMN, ROW, SIZE, PAD, BAR = 8.4, 17.0, 14, 16.0, 30.0
BASELINE = 12.6
"""From the top of a row."""
LIGHT = {
    "ground": "#ffffff", "edge": "#d0d7de", "ink": "#1b1f24", "dim": "#6a737d", "30": "#1b1f24",
    "31": "#b3261e", "32": "#1a7f4b", "33": "#9a5b00", "35": "#8a3fbf", "36": "#0b7285",
    "97": "#ffffff", "41": "#c4532d", "42": "#7fcf9f", "43": "#f2c45c", "44": "#2b6cb0",
    "45": "#8a5fbf", "46": "#6cc5cf", "47": "#d3d9df",
}  # fmt: skip
DARK = LIGHT | {
    "ground": "#0d1117", "edge": "#30363d", "ink": "#e6edf3", "dim": "#8b949e", "31": "#ff8a80",
    "32": "#4cc38a", "33": "#e3a34a", "35": "#c59bf0", "36": "#57c7d1", "42": "#63c792",
    "43": "#e0b64f", "44": "#3a73b8", "45": "#7d57b0", "46": "#57c7d1", "47": "#9aa5b1",
}  # fmt: skip
MONO = 'ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace'
VOID = re.compile(r"<(br|col|hr|img)\b([^>]*)>")
IMAGE = re.compile(r'<img[^>]*\bsrc="(data:image/png;base64,[^"]*)"[^>]*>')
DOTS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
"""Column and row of each bit of a braille letter."""


def terminal_svg(command: str, lines: Sequence[Line], columns: int = 80) -> str:
    """Return a terminal that shows a command and its output.

    Args:
        command: stands in the bar of the window.
        lines: pieces of text with a style of `styled_lines.SGR`.
    """
    lines = [part for line in lines for part in wrap_line(line, columns)]
    width = columns * COLUMN + 2 * PAD
    height = BAR + len(lines) * ROW + 2 * PAD - 6
    parts = [
        f'<rect class="window" x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1:.0f}" '
        'rx="7"/>',
        f'<text class="dim" x="{PAD:.0f}" y="20">$ {escape(command)}</text>',
        f'<path class="rule" d="M0 {BAR:.0f}H{width:.0f}"/>',
    ]
    for number, line in enumerate(lines):
        top = BAR + PAD - 4 + number * ROW
        column = 0
        for text, style in line:
            parts += _draw_piece(text, style, PAD + column * COLUMN, top)
            column += cell_width(text)
    digest = text_digest([command, *map(line_text, lines)])
    return _document(width, height, command, _terminal_style(), parts, digest)


def wrap_line(line: Line, columns: int) -> list[Line]:
    """Return a line as a terminal wraps it.

    >>> wrap_line((("abc", ""), ("def", "bold")), 4)
    [(('abc', ''), ('d', 'bold')), (('ef', 'bold'),)]
    """
    found: list[list[tuple[str, str]]] = [[]]
    room = columns
    for text, style in line:
        for letter in text:
            wide = cell_width(letter)
            if wide > room:
                found.append([])
                room = columns
            if found[-1] and found[-1][-1][1] == style:
                found[-1][-1] = (found[-1][-1][0] + letter, style)
            else:
                found[-1].append((letter, style))
            room -= wide
    return [tuple(one) for one in found]


def _draw_piece(text: str, style: str, x: float, top: float) -> list[str]:
    """Return the elements of a piece of text: its ground, its letters, its dots and lines."""
    codes = SGR.get(style, style).split(";")
    names = [f"c{code}" for code in codes if code in LIGHT and not code.startswith("4")]
    names += [name for code, name in (("1", "bold"), ("2", "dim"), ("4", "under")) if code in codes]
    found = []
    wide = cell_width(text) * COLUMN
    grounds = [code for code in codes if code in LIGHT and code.startswith("4")]
    if grounds or "7" in codes:
        look = f"g{grounds[0]}" if grounds else "gink"
        found.append(
            f'<rect class="{look}" x="{x:.1f}" y="{top:.1f}" width="{wide:.1f}" '
            f'height="{ROW:.1f}"/>'
        )
        names += ["cground"] if "7" in codes else []
    look = f' class="{" ".join(names)}"' if names else ""
    for match in re.finditer(r"[⠀-⣿]+|[━─]+|[^⠀-⣿━─ ]+(?: [^⠀-⣿━─ ]+)*", text):
        piece, at = match[0], x + cell_width(text[: match.start()]) * COLUMN
        if "⠀" <= piece[0] <= "⣿":
            found.append(f'<path class="dots {" ".join(names)}" d="{_dot_path(piece, at, top)}"/>')
        elif piece[0] in "━─":
            stroke = "3" if piece[0] == "━" else "1"
            length, y = len(piece) * COLUMN, top + ROW / 2
            found.append(
                f'<path class="dash {" ".join(names)}" stroke-width="{stroke}" '
                f'd="M{at:.1f} {y:.1f}h{length:.1f}"/>'
            )
        else:
            length = cell_width(piece) * COLUMN
            found.append(
                f'<text{look} x="{at:.1f}" y="{top + BASELINE:.1f}" textLength="{length:.1f}" '
                f'lengthAdjust="spacingAndGlyphs">{escape(piece)}</text>'
            )
    return found


def _dot_path(letters: str, x: float, top: float) -> str:
    """Return the dots of braille letters as a path of points."""
    found = []
    for place, letter in enumerate(letters):
        bits = ord(letter) - 0x2800
        for bit, (column, row) in enumerate(DOTS):
            if bits >> bit & 1:
                dot_x = x + (place + 0.25 + 0.5 * column) * COLUMN
                found.append(f"M{dot_x:.1f} {top + (row + 0.5) * ROW / 4:.1f}h0")
    return "".join(found)


def _terminal_style() -> str:
    def colours(palette: dict[str, str]) -> str:
        rules = [f".window{{fill:{palette['ground']};stroke:{palette['edge']}}}"]
        rules.append(f".rule{{stroke:{palette['edge']}}}")
        rules.append(f"text{{fill:{palette['ink']}}}.dots,.dash{{stroke:{palette['ink']}}}")
        for name, colour in palette.items():
            if name.startswith("4"):
                rules.append(f".g{name}{{fill:{colour}}}")
            else:
                rules.append(f".c{name}{{fill:{colour};stroke:{colour}}}")
        rules.append(f".dim{{fill:{palette['dim']};stroke:{palette['dim']}}}")
        rules.append(f".gink{{fill:{palette['ink']}}}")
        return "".join(rules)

    return (
        f"text{{font:{SIZE}px {MONO};white-space:pre;stroke:none!important}}"
        ".bold{font-weight:700}.under{text-decoration:underline}.dash,.dots{fill:none!important}"
        ".dots{stroke-width:2;stroke-linecap:round}"
        f"{colours(LIGHT)}@media(prefers-color-scheme:dark){{{colours(DARK)}}}"
    )


def page_svg(title: str, markup: Iterable[str], width: int, height: int) -> str:
    """Return elements of a report as a picture.

    Args:
        title: for screen readers.
        markup: HTML made by `shoal.report.markup`.
    """
    text = "".join(markup)
    digest = markup_digest(text)
    text = VOID.sub(r"<\1\2/>", IMAGE.sub(lambda found: _draw_map(found[1]), text))
    text = text.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    sheet = resources.files("shoal.report").joinpath("assets", "report.css")
    style = sheet.read_text(encoding="utf-8").replace("html{", ".html{").replace("body{", ".body{")
    style += (
        ".plot .map,.ramp .map{display:block;width:100%;height:100%}.ramp .map{width:120px;"
        "height:8px;border:1px solid var(--line)}@media(prefers-color-scheme:dark){.map{"
        "filter:invert(1) hue-rotate(180deg)}}"
        f".html{{width:{width}px;height:{height}px;overflow:hidden}}main{{padding:0 20px}}"
        "main section:first-child{padding-top:16px}.grid2{grid-template-columns:1fr 1fr}"
        ".tiles{gap:10px 26px}.tiles div:nth-child(n+8){display:none}.edge{fill:none;stroke:var(--line)}"
    )
    parts = [
        f'<foreignObject width="{width}" height="{height}">'
        f'<div xmlns="http://www.w3.org/1999/xhtml" class="html"><main>{text}</main></div>'
        "</foreignObject>",
        f'<rect class="edge" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="7"/>',
    ]
    return _document(width, height, title, escape(style, quote=False), parts, digest)


def _draw_map(url: str) -> str:
    """Return the image of a map as SVG: a path for each shade, since some pages allow no image."""
    palette, shades = make_palette(), defaultdict[int, str](str)
    rows = read_rows(url)
    for y, row in enumerate(rows):
        x = 0
        for shade, cells in groupby(row):
            wide = len(list(cells))
            shades[shade] += f"M{x} {y}h{wide}v1h-{wide}z" if shade else ""
            x += wide
    paths = [
        f'<path fill="#{palette[3 * shade : 3 * shade + 3].hex()}" d="{path}"/>'
        for shade, path in sorted(shades.items())
        if shade
    ]
    size = f'viewBox="0 0 {len(rows[0])} {len(rows)}" preserveAspectRatio="none"'
    return f'<svg class="map" shape-rendering="crispEdges" {size}>{"".join(paths)}</svg>'


def _document(
    width: float, height: float, title: str, style: str, parts: Sequence[str], digest: str
) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"'
    body = "\n".join(parts)
    return (
        f'{head} aria-label="{escape(title)}">\n<metadata>{digest}</metadata>\n'
        f"<style>{style}</style>\n{body}\n</svg>\n"
    )


def text_digest(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines of text."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def markup_digest(markup: str) -> str:
    """Return the SHA-256 of texts and data of markup: words, points of lines, sizes, cells of maps.

    Elements, classes and the style sheet do not count, so a new look needs no new picture.
    """
    data = re.findall(r'\b(?:points|width)="([^"]*)"', markup)
    data += [row.hex() for url in IMAGE.findall(markup) for row in read_rows(url)]
    words = unescape(re.sub(r"<[^>]*>", "\n", markup)).split()
    return text_digest([*words, *data])


def read_rows(url: str) -> list[bytes]:
    """Return the rows of a map, a byte a cell, from its PNG, whichever zlib wrote it."""
    raw = base64.b64decode(url.partition(",")[2])
    at = raw.index(b"IDAT")
    size = int.from_bytes(raw[at - 4 : at], "big")
    cells = zlib.decompress(raw[at + 4 : at + 4 + size])
    wide = int.from_bytes(raw[16:20], "big") + 1  # a row begins with the number of its filter
    return [cells[start + 1 : start + wide] for start in range(0, len(cells), wide)]


def read_digest(svg: str) -> str:
    """Return the digest that a picture carries; "" if it has none.

    >>> read_digest("<svg><metadata>ab12</metadata></svg>"), read_digest("<svg/>")
    ('ab12', '')
    """
    found = re.search(r"<metadata>(\w+)</metadata>", svg)
    return found[1] if found else ""
