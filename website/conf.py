"""Sphinx configuration of the site that `make docs` builds from docs/**/*.md."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "src")]

import translated_pages  # noqa: E402

import shoal  # noqa: E402

CHINESE = tags.has("zh")  # type: ignore[name-defined]  # noqa: F821
"""`sphinx -t zh` builds docs/zh: fewer pages, no reference, a search that cuts Chinese words."""

project, author, copyright = "Shoal", "the Shoal authors", "the Shoal authors, Apache-2.0"
version = release = shoal.__version__
extensions = ["myst_parser", "sphinx.ext.napoleon", "learn_extension"]
if not CHINESE:
    extensions.insert(2, "autoapi.extension")
root_doc = "learn/README" if CHINESE else "README"
language = "zh_CN" if CHINESE else "en"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["pictures/runs/**", "**/*.template.md", "zh/**"]
nitpicky = True
napoleon_use_ivar = True
html_search_language = "zh" if CHINESE else "en"
suppress_warnings = [
    "autoapi.python_import_resolution",  # the reference reads the public modules alone
    "misc.highlighting_failure",  # a page may leave out lines of a program by …
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = "Shoal"
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
html_show_sourcelink = False
html_copy_source = False
html_baseurl = ""
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "github-dark"

MODULES = sorted(
    {*shoal._HOMES.values()} - {"shoal.fabric", "shoal.base.layouts.policies"}
    | {"shoal.fabric.world"}
)
"""Modules that define the public names; the reference reads copies of them, not all of the source.

Policies are keys of run.toml: docs/reference/configuration.md has them.
"""


def _copy_public_modules() -> Path:
    """Copy the modules of the public names, so that the reference has these alone."""
    folder = ROOT / "build" / "api-source"
    shutil.rmtree(folder, ignore_errors=True)
    for module in MODULES:
        path = Path(*module.split(".")).with_suffix(".py")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "src" / path, target)
        for parent in target.parents[: len(path.parents) - 1]:
            name = ".".join(parent.relative_to(folder).parts)
            text = f'"""Modules of {name} that define public names."""\n'
            parent.joinpath("__init__.py").write_text(text, encoding="utf-8")
    return folder / "shoal"


autoapi_dirs = [str(_copy_public_modules())]
autoapi_root = "api"
autoapi_add_toctree_entry = False
autoapi_keep_files = False
autoapi_options = ["members", "show-module-summary"]
autoapi_member_order = "bysource"
# Annotations name types of torch, and of modules that the reference leaves out.
nitpick_ignore_regex = [(r"py:.*", r".*")]

LEARN = [
    "why", "ranks", "by-hand", "ddp", "targets", "sharding", "pipelines", "inside-layers", "precision",
    "failures", "diloco", "servers", "planning", "proving", "puzzles", "bugs", "which-one", "glossary",
    "reading",
]  # fmt: skip
"""Pages of docs/learn, in the order in which a person needs them."""


def _pages(folder: str) -> list[str]:
    found = sorted((ROOT / "docs" / folder).glob("*.md"))
    return [f"{folder}/{page.stem}" for page in found if not page.name.endswith("template.md")]


shoal_contents = {
    "学习": [f"/learn/{name}" for name in translated_pages.LESSONS],
} if CHINESE else {
    "Learn": ["learn/README", *(f"learn/{name}" for name in LEARN
                                if (ROOT / f"docs/learn/{name}.md").exists())],
    "Start": _pages("start"),
    "Recipes": _pages("recipes"),
    "How it works": _pages("how-it-works"),
    "Reference": _pages("reference"),
    "Proof": _pages("proof"),
    "Decisions": [*_pages("decisions"), "history", "lab-log"],
    "Interface": ["api/shoal/index"],
}  # fmt: skip
