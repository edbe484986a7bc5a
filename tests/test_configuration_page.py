"""docs/reference/configuration.md lists every key as the code has it; UPDATE_DOCS=1 writes it anew."""

from __future__ import annotations

import ast
import inspect
import os
from dataclasses import fields
from pathlib import Path

from shoal.config.save import toml_value
from shoal.config.sections import Config, keys
from shoal.forecast.models.model_facts import FAMILIES, PUBLISHED

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "configuration.md"
HEAD = """# Every key of run.toml

Written on the command line as `section.key=value`, in a file as tables. Defaults are those of
`shoal train` without arguments; 0 or an empty text mostly means "derived". This page is generated
from the code (`UPDATE_DOCS=1 make unit`), and a test fails when they differ.
"""


def said(section: object) -> dict[str, str]:
    """The line under each key of a section's dataclass, and of the policies that it inherits."""
    lines: dict[str, str] = {}
    for kind in type(section).__mro__[-2::-1]:
        tree = ast.parse(inspect.getsource(kind)).body[0]
        assert isinstance(tree, ast.ClassDef)
        for item, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(item, ast.AnnAssign) and isinstance(after, ast.Expr):
                lines[item.target.id] = " ".join(ast.literal_eval(after.value).split())
    return lines


def render() -> str:
    parts = [HEAD]
    for field in fields(Config):
        section = getattr(Config(), field.name)
        parts.append(f"\n## [{field.name}]\n\n| key | default | says |\n|---|---|---|\n")
        texts = said(section)
        for key in keys(section):
            default = toml_value(getattr(section, key.name))
            parts.append(f"| `{key.name}` | `{default}` | {texts.get(key.name, '')} |\n")
        if field.name == "model":
            parts.append(models())
    return "".join(parts)


def models() -> str:
    parts = [f"\nPublished sizes: {', '.join(f'`{name}`' for name in PUBLISHED)}.\n"]
    for family, arguments in FAMILIES.items():
        parts.append(f"\nArguments of `{family}`:\n\n| key | default | says |\n|---|---|---|\n")
        for a in arguments:
            default = a.derived if a.derived else toml_value(a.default)
            parts.append(f"| `{a.name}` | {default} | {a.text} |\n")
    return "".join(parts)


def test_the_page_is_what_the_code_says() -> None:
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(render())
    assert PAGE.read_text() == render(), "run: UPDATE_DOCS=1 make unit"
