"""Hold what `docs/reference/versions.md` promises of names against the last release, by griffe.

    python tests/proof/public_names.py [REF]     REF: v0.1.1 if not given; 1 where a promise is broken

Both sources are read without being imported. Compared are the names of `import shoal` and those of
`Run` that the page lists: none may be gone, and no call of the release may end in an error, by the
parameters of the signatures.

References:
    griffe, https://mkdocstrings.github.io/griffe/guide/users/checking/
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "versions.md"
RELEASE = "v0.1.1"


def promised() -> tuple[list[str], list[str]]:
    """Return the names of `import shoal`, and those of `Run`, as the page lists them."""
    text = " ".join(PAGE.read_text().partition("## What stays")[2].split())
    exports = re.findall(r"the names of `import shoal`: (.*?);", text)[0]
    methods = re.findall(r"the names of `Run`: (.*?);", text)[0]
    return re.findall(r"`(\w+)`", exports), re.findall(r"`(\w+)`", methods)


def load(ref: str) -> Any:
    """Return the package of a commit; "": of the working tree."""
    if ref:
        return griffe.load_git("shoal", ref=ref, repo=ROOT, search_paths=["src"])
    return griffe.load("shoal", search_paths=[ROOT / "src"])


def find(package: Any, path: str) -> Any:
    """Return the object of a dotted name, behind aliases; None where there is none."""
    try:
        found = package[path]
        return found.final_target if found.is_alias else found
    except KeyError:
        return None


def assigned(package: Any, path: str) -> bool:
    """Return whether a class, or a base of it, assigns an attribute in a tuple, which griffe skips."""
    owner, _, name = path.rpartition(".")
    kind = find(package, owner) if owner else None
    kinds = [kind, *kind.mro()] if kind is not None and kind.is_class else []
    return any(re.search(rf"self\.{name}\b[^=()]*=[^=]", one.source) for one in kinds)


def broken(old: Any, new: Any, path: str) -> Iterator[str]:
    """Yield a line for each way in which a name of the release does not work any more."""
    before, after = find(old, path), find(new, path)
    if before is None and not assigned(old, path):
        yield f"{path}: not in the release"
    elif after is None and not assigned(new, path):
        yield f"{path}: gone"
    elif before is None or after is None:
        return
    elif before.is_function and after.is_function:
        for one in griffe.find_breaking_changes(before, after):
            yield f"{path}: {one.explain(griffe.ExplanationStyle.ONE_LINE)}"
    elif before.kind is not after.kind:
        yield f"{path}: {before.kind.value} became {after.kind.value}"


def main(words: list[str]) -> int:
    """Print what is broken, or how many names are held."""
    exports, methods = promised()
    old, new = load(words[0] if words else RELEASE), load("")
    paths = [*exports, *(f"Run.{name}" for name in methods)]
    lines = [line for path in paths for line in broken(old, new, path)]
    print("\n".join([*lines, f"{len(paths)} names, {len(lines)} broken"]))
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
