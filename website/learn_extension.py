"""Sphinx extension of the learning pages: numbers with a source, exercises, widgets without network.

`{value}` shows its text, with the source as a title. `{exercise} NAME` shows the question of
`shoal simulate exercise NAME`, and checks answers in the page. Before a page is read, its numbers
and console outputs are compared with their sources; a difference is a warning, so `-W` fails.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import translated_pages
from browser_zip import write_zip
from docutils import nodes
from docutils.parsers.rst import Directive
from page_values import ROLE, page_problems, source_title
from sphinx.application import Sphinx
from sphinx.search.zh import SearchChinese
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

from shoal.base.errors import ShoalError
from shoal.teach.exercises.answers import exercise_record, find_exercise

LOG = logging.getLogger(__name__)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
PYODIDE = (
    "pyodide.js", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json",
)  # fmt: skip
"""Files of npm's package that a browser loads."""
DOCS = translated_pages.ROOT / "docs"
MOVED = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={}.html">\n'
)
"""First page of the Chinese site's folder: its contents lie beside the lessons."""
FRAME = {
    "Previous": "上一页", "Next": "下一页", "On this page": "本页内容", "Contents": "目录", "Menu": "菜单",
    "Expand": "展开", "Light mode": "浅色", "Dark mode": "深色", "Skip to content": "跳到正文", "Back to top": "回到顶部",
    "Toggle site navigation sidebar": "显示或隐藏导航", "Toggle table of contents sidebar": "显示或隐藏本页目录",
    "Toggle Light / Dark / Auto color theme": "切换浅色、深色、自动", "Hide table of contents sidebar": "隐藏本页目录",
    "Hide navigation sidebar": "隐藏导航", "View this page": "查看本页",
}  # fmt: skip
"""Words of the theme around a page."""
FENCED = re.compile(r"(^ *```.*?^ *```|`(?:[^`\n]|\n(?!\n))+`(?!\]))", re.MULTILINE | re.DOTALL)
"""Code of a page, in which nothing is a link; code in a sentence may go on in the next line."""


class ValueRole(SphinxRole):
    """A number: its text, with its source as a title."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return an abbreviation whose explanation is the source."""
        found = re.fullmatch(r"(.+?)\s*<(.+)>", self.text, re.DOTALL)
        if found is None:
            message = self.inliner.reporter.error(f"{{value}}`{self.text}` has no <source>")
            return [], [message]
        chinese = self.config.language == "zh_CN"
        words = translated_pages.translations("widgets") if chinese else {}
        title = source_title(found[2].strip(), words)
        return [nodes.abbreviation(found[1], found[1], explanation=title, classes=["value"])], []


class ExerciseDirective(Directive):
    """An exercise: the page's own text, hints, and a field that checks an answer."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the question, and a form as raw HTML."""
        name = self.arguments[0]
        try:
            exercise = find_exercise(name)
        except ShoalError as failure:
            raise self.error(str(failure)) from None
        chinese = self.state.document.settings.env.config.language == "zh_CN"
        words = translated_pages.exercise_words(exercise.page) if chinese else {}
        question = words.get(exercise.question, exercise.question)
        text = " ".join(" ".join(self.content).split())
        if text != question:
            raise self.error(f"{name}: the page asks {text!r}, the exercise {question!r}")
        box = nodes.container(classes=["exercise"])
        self.state.nested_parse(self.content, self.content_offset, box)
        record = translated_pages.translate_values(exercise_record(exercise), words)
        box += nodes.raw("", answer_form(record, words), format="html")
        return [box]


def answer_form(record: dict[str, Any], words: dict[str, str]) -> str:
    """Return the form that takes and checks an answer, with the hints below, as HTML.

    Args:
        record: of the exercise, in the language of the page.
        words: translations of the form's own words; none on an English page.
    """

    def say(english: str) -> str:
        return html.escape(words.get(english, english))

    packed = html.escape(json.dumps(record, ensure_ascii=False))
    if record["choices"]:
        options = "".join(f"<option>{html.escape(word)}</option>" for word in record["choices"])
        field = (
            f'<select aria-label="{say("answer")}"><option value="">…</option>{options}</select>'
        )
    else:
        field = f'<input type="text" inputmode="decimal" size="9" aria-label="{say("answer")}">'
    hints = "".join(f"<li>{html.escape(hint)}</li>" for hint in record["hints"])
    return (
        f'<form class="answer" data-exercise="{packed}">{field} '
        f"<span>{html.escape(record['unit'])}</span> "
        f'<button type="submit">{say("Check")}</button> <output aria-live="polite"></output></form>'
        f"<details><summary>{say('Hints')}</summary><ol>{hints}</ol></details>"
        f'<p class="terminal">{say("In a terminal:")} '
        f"<code>shoal simulate exercise {record['name']} …</code></p>"
    )


def check_page(app: Sphinx, document: str, source: list[str]) -> None:
    """Warn of every number and output of a page that is not its source's."""
    text = source[0]
    if "```console" in text or ROLE.search(text):
        for line, message in page_problems(text):
            LOG.warning("%s", message, location=(document, line), type="value")
    source[0] = link_files(text, Path(app.srcdir, document).parent, Path(app.srcdir))
    if document == app.config.root_doc:
        source[0] += contents(app)


def link_files(text: str, folder: Path, docs: Path) -> str:
    """Return a page whose links to files outside of the site are downloads, to folders their first page.

    In the repository the same links open the file.
    """
    parts = FENCED.split(text)
    return "".join(
        part if place % 2 else LINK.sub(lambda found: _file_link(found, folder, docs), part)
        for place, part in enumerate(parts)
    )


def _file_link(found: re.Match[str], folder: Path, docs: Path) -> str:
    words, target, anchor = found[1], found[2], found[3] or ""
    path = (folder / target).resolve()
    if "://" in target or not path.exists():
        return found[0]
    if (
        path.suffix == ".md"
        and is_chinese(path) != is_chinese(folder)
        and path.is_relative_to(DOCS)
    ):
        page = os.path.relpath(path.with_suffix(".html"), folder)
        return f'<a href="{page}{anchor}">{words}</a>'
    if path.is_dir():
        pages = sorted(path.glob("*.md")) if path.is_relative_to(docs) else []
        return f"[{words}]({os.path.relpath(pages[0], folder)})" if pages else words
    if path.is_relative_to(docs) and path.suffix == ".md":
        return f"[{words}]({target}{anchor})"
    return f"{{download}}`{words.replace('`', '')} <{target}>`"


def is_chinese(path: Path) -> bool:
    """Return whether a page or folder belongs to the Chinese site."""
    return path.is_relative_to(translated_pages.FOLDER)


def show_tables_as_written(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Turn a docstring's drawings and tables, indented text without markup, into literal blocks."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    shown = []
    for block in blocks:
        rows = block.split("\n")
        first = rows[0]
        plain = re.match(r"(\w+:$|- |\d+\. |>>>|\s+>>>)", first) is not None
        deeper = any(row[:1] == " " for row in rows) and not first.startswith(("- ", "* "))
        if deeper and not plain:
            shown += ["::", "", *(f"    {row}" for row in rows), ""]
        else:
            shown += [*rows, ""]
    lines[:] = shown


def write_front_page(app: Sphinx, failure: Exception | None) -> None:
    """Write index.html, which a server shows for the folder: the front page."""
    if failure is None and app.config.language == "zh_CN":
        Path(app.outdir, "index.html").write_text(MOVED.format(app.config.root_doc), "utf-8")
        for page in Path(app.outdir).rglob("*.html"):
            page.write_text(translate_frame(page.read_text("utf-8")), encoding="utf-8")
        words = json.dumps(translated_pages.browser_messages(), ensure_ascii=False)
        script = Path(app.outdir, "_static", "messages.js")
        script.write_text(f"const shoalMessages = {words};\n", encoding="utf-8")
    elif failure is None and app.builder.format == "html":
        front = Path(app.outdir, f"{app.config.root_doc}.html").read_text(encoding="utf-8")
        Path(app.outdir, "index.html").write_text(front, encoding="utf-8")
        copy_python(Path(app.confdir).parent / "build" / "pyodide" / "package", Path(app.outdir))


def copy_python(package: Path, site: Path) -> None:
    """Copy what the simulator in a page needs: Pyodide's five files, and the zip of Shoal's rooms.

    Without them (no npm, no network at the first build) pages read the same, and a button says so.
    """
    target = site / "_static" / "pyodide"
    if not (package / PYODIDE[0]).exists():
        LOG.info("no Pyodide in %s: the simulator is not in the pages", package)
        return
    target.mkdir(parents=True, exist_ok=True)
    for name in PYODIDE:
        shutil.copyfile(package / name, target / name)
    write_zip(target / "shoal.zip")


def contents(app: Sphinx) -> str:
    """Return the toctrees that the front page needs; in the repository its table is enough."""
    parts = []
    for caption, pages in app.config.shoal_contents.items():
        rows = "\n".join(pages)
        parts.append(f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{rows}\n```\n")
    return "".join(parts)


def translate_frame(page: str) -> str:
    """Return a page with the theme's own words, which it has in English alone, in Chinese."""
    for english, chinese in FRAME.items():
        page = page.replace(f">{english}<", f">{chinese}<").replace(
            f'="{english}"', f'="{chinese}"'
        )
    return page


class ChineseSearch(SearchChinese):
    """Search of the Chinese site: jieba cuts pages into words, the browser cuts questions likewise."""

    # Sphinx names the stemmer by the language, and its file for Chinese has the English one.
    language_name = "English"
    js_splitter_code = (Path(__file__).with_name("static") / "split_query.js").read_text("utf-8")


def add_language_link(
    app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any
) -> None:
    """Put a link to the other language above a page that has one."""
    if "body" not in context or page not in translated_pages.PAGES or page == "README":
        return
    chinese = app.config.language == "zh_CN"
    up = "../" * (page.count("/") + chinese)
    address = f"{up}{page}.html" if chinese else f"{up}zh/{page}.html"
    words, language = ("English", "en") if chinese else ("中文", "zh")
    link = f'<p class="language"><a href="{address}" lang="{language}">{words}</a></p>'
    context["body"] = link + context["body"]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register roles, directives and files."""
    app.add_config_value("shoal_contents", {}, "env")
    app.add_role("value", ValueRole())
    app.add_directive("exercise", ExerciseDirective)
    app.add_search_language(ChineseSearch)
    app.connect("source-read", check_page)
    app.connect("html-page-context", add_language_link)
    app.connect("autodoc-process-docstring", show_tables_as_written, priority=100)
    app.connect("build-finished", write_front_page)
    app.add_css_file("learn.css")
    if app.tags.has("zh"):
        app.add_js_file("messages.js", loading_method="defer")
    for name in ("words.js", "formulas.js"):
        app.add_js_file(name, loading_method="defer")
    app.add_js_file("learn.js", loading_method="defer")
    app.add_js_file("python.js", loading_method="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
