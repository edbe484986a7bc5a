"""Thirty names that rooms import from each other, with no more than a reader of a call sees of them.

    python tests/proof/names.py SEED         signature and docstring of each

Whoever reads them writes down what each does, and is held against the code: docs/proof/names.md.
"""

from __future__ import annotations

import ast
import random
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "shoal"
COUNT = 30


def imported() -> list[tuple[str, str]]:
    """(module, name) of every function and class that another room imports."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shoal."):
                parts = str(node.module).split(".")
                if parts[1] != room:
                    found |= {(str(node.module), alias.name) for alias in node.names}
    return sorted(one for one in found if definition(*one) is not None)


def definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    """Where a name is defined; None for constants, modules and what is passed on."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    path = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    return None


def shown(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Signature and docstring."""
    if isinstance(node, ast.ClassDef):
        fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
        head = f"class {node.name}: {', '.join(fields)}"
    else:
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        head = f"def {node.name}({ast.unparse(node.args)}){returns}"
    return f"{head}\n    {ast.get_docstring(node, clean=True) or '(no docstring)'}"


def main() -> None:
    """Print the questions."""
    drawn = random.Random(int(sys.argv[1])).sample(imported(), COUNT)
    for number, (module, name) in enumerate(drawn, 1):
        node = definition(module, name)
        assert node is not None
        text = shown(node).replace("\n", "\n    ")
        print(f"{number}. {module}.{name}\n    {text}\n")


if __name__ == "__main__":
    main()
