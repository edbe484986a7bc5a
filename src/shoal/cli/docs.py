"""`shoal docs`: list the pages of the documentation, and print one of them.

The wheel holds them (`shoal/pages`, a link to docs/ in the repository). So a machine without
network has the pages of the version that it runs.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from shoal.base.errors import ConfigError

PAGES = Path(__file__).resolve().parents[1] / "pages"
FOLDERS = {
    "learn": "Learn",
    "start": "Start",
    "recipes": "Recipes",
    "how-it-works": "How it works",
    "reference": "Reference",
    "proof": "Proof",
}
"""Folder → its heading, in the order of reading."""

VALUE = re.compile(r"\{value\}`([^`<]+?)\s*<[^`]+>`")
"""A number of a learning page with its source, of which a terminal shows the number alone."""

SYNONYMS = {"quickstart": "tutorial", "getting-started": "tutorial", "introduction": "tutorial"}
"""Names that pages of other projects have → ours."""

FIRST = {"reference/federated": "start/owners"}
"""Page with every key → the page to begin with, which a reader may not know by its name."""

PAGE = typer.Argument(None, metavar="[PAGE]", help="A page by its name, as own-loop.")
WHERE = typer.Option(False, "--path", help="Print the file's path instead of its text.")
JSON = typer.Option(False, "--json", help="One JSON document: the list, or the page.")
LANGUAGES = ("en", "zh")
LANGUAGE = typer.Option("en", "--lang", metavar="en|zh", help="Language of the pages; zh: Chinese.")


@dataclass(frozen=True)
class Page:
    """One page of the documentation.

    Args:
        name: the file's name without its ending; `shoal docs` takes it, and folder/name.
        folder: one of FOLDERS.
        title: its first heading.
        path: its file.
    """

    name: str
    folder: str
    title: str
    path: str


def docs(
    words: list[str] = PAGE, path: bool = WHERE, as_json: bool = JSON, language: str = LANGUAGE
) -> None:
    """List the pages of the documentation, or print one.

    Exit status: 0, or 2 for a page that does not exist, with the nearest name.
    """
    pages = list_pages(language_folder(language))
    if words:
        page = find_in_language("-".join(words), pages, language)
        text = VALUE.sub(r"\1", Path(page.path).read_text(encoding="utf-8"))
        if as_json:
            typer.echo(json.dumps({**asdict(page), "text": text}))
        else:
            typer.echo(page.path if path else text.rstrip("\n"))
        if first := FIRST.get(f"{page.folder}/{page.name}"):
            typer.echo(f"begin with: shoal docs {first}", err=True)
        # On standard error: standard output is the page alone.
        for other in _namesakes(page, pages) if "/" not in "-".join(words) else ():
            call = f"shoal docs {other.folder}/{other.name}"
            typer.echo(f"another page of this name: {call} ({other.title})", err=True)
    elif as_json:
        typer.echo(json.dumps([asdict(page) for page in pages], indent=1))
    else:
        typer.echo("\n".join(list_lines(pages)))


def language_folder(language: str) -> Path:
    """Return the folder with the pages of a language.

    Raises:
        ConfigError: there are none in that language.
    """
    if language not in LANGUAGES:
        known = ", ".join(LANGUAGES)
        raise ConfigError(f"docs: no pages in {language}, only {known}; try: shoal docs --lang zh")
    return PAGES if language == "en" else PAGES / language


def list_pages(root: Path = PAGES) -> list[Page]:
    """Return all pages, in the order of reading.

    Raises:
        ConfigError: this installation has no pages.
    """
    found = []
    for folder in FOLDERS:
        paths = sorted((root / folder).glob("*.md"))
        for path in (p for p in paths if p.stem != "README" and not p.name.endswith("template.md")):
            with path.open(encoding="utf-8") as file:
                title = file.readline().strip("# \n")
            found.append(Page(path.stem, folder, title, str(path.resolve())))
    if not found:
        raise ConfigError(f"docs: no pages in {root}; try: reinstall it")
    return found


def find_page(word: str, pages: list[Page]) -> Page:
    """Return the page of a name, as own-loop, own-loop.md or proof/any-module.

    Raises:
        ConfigError: no page has that name, with the nearest one.
    """
    words = word.lower().removeprefix("docs/").removesuffix(".md").replace("_", "-")
    folder, _, name = words.rpartition("/")
    for page in pages:
        if page.name == name and folder in ("", page.folder):
            return page
    near = find_nearest_page(name, pages)
    hint = f"try: shoal docs {_call_name(near, pages)}" if near else "all pages: shoal docs"
    raise ConfigError(f"docs {word}: no such page; {hint}")


def find_in_language(word: str, pages: list[Page], language: str) -> Page:
    """Return the page of a name in a language.

    Raises:
        ConfigError: there is none; if there is an English one, the message names it.
    """
    try:
        return find_page(word, pages)
    except ConfigError:
        if language == "en":
            raise
    english = list_pages()
    call = _call_name(find_page(word, english), english)
    raise ConfigError(f"docs {word}: no page in {language}; try: shoal docs {call}")


def find_nearest_page(name: str, pages: list[Page]) -> Page | None:
    """Return the page that a wrong name probably means; None if none is near.

    In this order: names that begin with it, a word of a name that begins with it, the most alike
    name, names that contain it, titles that contain it.
    """
    if not name:
        return None
    names = [page.name for page in pages]
    begins = [page for page in pages if page.name.startswith(name)]
    words = [page for page in pages if any(w.startswith(name) for w in page.name.split("-"))]
    close = difflib.get_close_matches(name, [*names, *SYNONYMS], 1, 0.6)
    alike = [page for page in pages if page.name in [SYNONYMS.get(one, one) for one in close]]
    inside = [page for page in pages if name in page.name]
    titled = [page for page in pages if name in page.title.lower()]
    return next(iter([*begins, *words, *alike, *inside, *titled]), None)


def _namesakes(page: Page, pages: list[Page]) -> list[Page]:
    """Return the other pages of the same name."""
    return [one for one in pages if one.name == page.name and one.folder != page.folder]


def _call_name(page: Page, pages: list[Page]) -> str:
    """Return the shortest name that means this page alone."""
    return f"{page.folder}/{page.name}" if _namesakes(page, pages) else page.name


def list_lines(pages: list[Page]) -> list[str]:
    """Return the list as lines of a terminal, grouped by folder.

    Two pages of one name have their folder behind the title.
    """
    width = max(len(page.name) for page in pages)
    lines = []
    for folder, heading in FOLDERS.items():
        inside = [one for one in pages if one.folder == folder]
        lines += [f"{heading}:"] if inside else []
        for page in inside:
            call = f"  ({_call_name(page, pages)})" if _namesakes(page, pages) else ""
            lines.append(f"  {page.name:<{width}}  {page.title}{call}")
        lines += [""] if inside else []
    english = {page.folder for page in pages} == set(FOLDERS)
    last = "own-loop; 中文: shoal docs --lang zh" if english else "--lang zh ranks"
    return [*lines, f"Print one: shoal docs {last}"]
