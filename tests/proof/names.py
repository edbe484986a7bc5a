"""Draw names by a seed, half of them methods, and match what two readers write about them.

    python tests/proof/names.py draw SEED FOLDER     writes signatures.txt, bodies.txt and key.json
    python tests/proof/names.py match FOLDER         reads signatures.answers, bodies.answers; the figure

One reader sees `signatures.txt` alone (signature and first line of the docstring) and writes a sentence
about each: "number: sentence". Another sees `bodies.txt` alone, in another order: the body without its
docstring, its own name replaced by `f`. The program then sees only the sentences. Within a room it
weighs their words (stems, rare ones more) and pairs them so that the sum of likeness is largest. How
many pairs belong together is the figure; 190 of 200 are wanted. Record: docs/proof/names.md.

References:
    Sparck Jones 1972, "A statistical interpretation of term specificity" (tf-idf);
    Kuhn 1955, "The Hungarian method for the assignment problem".
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "shoal"
COUNT = 200
SHORTEST = 2  # statements of a body beside its docstring: less says nothing about a name
LONGEST = 60  # lines of a body that a reader is shown

Named = ast.FunctionDef | ast.AsyncFunctionDef


def statements(node: Named) -> list[ast.stmt]:
    """Return a body without its docstring."""
    has = ast.get_docstring(node) is not None
    return node.body[1:] if has else node.body


def candidates() -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return (room, module, name) of all functions, and of all methods, that are worth a question."""
    functions, methods = [], []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        room, module = parts[0], ".".join(("shoal", *parts))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, Named) and asked(node):
                functions.append((room, module, node.name))
            if isinstance(node, ast.ClassDef):
                methods += [
                    (room, module, f"{node.name}.{one.name}")
                    for one in node.body
                    if isinstance(one, Named) and asked(one)
                ]
    return functions, methods


def asked(node: Named) -> bool:
    """Return whether a function has a docstring, a name of its own, and a body that says something."""
    special = node.name.startswith("__") and node.name.endswith("__")
    body = statements(node)
    lines = sum((one.end_lineno or one.lineno) - one.lineno + 1 for one in body)
    again = {ast.unparse(one) for one in node.decorator_list} & {"overload", "override"}
    return bool(
        ast.get_docstring(node)
        and not special
        and not again
        and (len(body) >= SHORTEST or lines >= SHORTEST)
        and lines <= LONGEST
    )


def definition(module: str, name: str) -> tuple[Named, ast.ClassDef | None]:
    """Return the node of a name, and its class."""
    path = SOURCE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    owner, _, last = name.rpartition(".")
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    holder = None
    if owner:
        holder = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == owner)
        body = holder.body
    return next(n for n in body if isinstance(n, Named) and n.name == last), holder


def signature(module: str, name: str) -> str:
    """Return signature and first line, with the class's own first line for a method."""
    node, holder = definition(module, name)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    first = (ast.get_docstring(node) or "").split("\n\n")[0]
    head = f"def {node.name}({ast.unparse(node.args)}){returns}\n    {' '.join(first.split())}"
    if holder is None:
        return f"[{module}] {head}"
    about = " ".join((ast.get_docstring(holder) or "").split("\n\n")[0].split())
    return f"[{module}] class {holder.name}: {about}\n  {head}"


def hidden_body(module: str, name: str) -> str:
    """Return parameters and body without the docstring, its own name replaced by `f`."""
    node, _ = definition(module, name)
    node.body = statements(node)
    node.decorator_list = []
    text = ast.unparse(node)
    return re.sub(rf"\b{re.escape(node.name)}\b", "f", text)


def draw(seed: int, folder: Path) -> None:
    """Write what the two readers see, and the key."""
    rng = random.Random(seed)
    functions, methods = candidates()
    drawn = rng.sample(functions, COUNT // 2) + rng.sample(methods, COUNT // 2)
    drawn.sort()
    order = list(range(COUNT))
    rng.shuffle(order)
    folder.mkdir(parents=True, exist_ok=True)
    left = [f"{n}. {signature(m, name)}" for n, (_, m, name) in enumerate(drawn, 1)]
    right = [f"{n}. {hidden_body(*drawn[one][1:])}" for n, one in enumerate(order, 1)]
    (folder / "signatures.txt").write_text("\n\n".join(left) + "\n")
    (folder / "bodies.txt").write_text("\n\n".join(right) + "\n")
    key = {
        "seed": seed,
        "names": [f"{module}.{name}" for _, module, name in drawn],
        "rooms": [room for room, _, _ in drawn],
        "bodies": [one + 1 for one in order],
    }
    (folder / "key.json").write_text(json.dumps(key, indent=1) + "\n")


def answers(path: Path) -> dict[int, str]:
    """Return number → sentence of a reader's file."""
    found = re.findall(r"^\s*(\d+)[:.]\s*(.+)$", path.read_text(), re.MULTILINE)
    return {int(number): text.strip() for number, text in found}


def stems(text: str) -> list[str]:
    """Return the words of a sentence, cut to what their forms share."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())
    return [re.sub(r"(ations?|ings?|ed|es|s|ers?|ion)$", "", w) if len(w) > 4 else w for w in words]


def match(folder: Path) -> list[tuple[str, str]]:
    """Return (name, name of the body that it was paired with) of every pair, and print the figure."""
    from scipy.optimize import linear_sum_assignment
    from sklearn.feature_extraction.text import TfidfVectorizer

    key = json.loads((folder / "key.json").read_text())
    left, right = (answers(folder / f"{w}.answers") for w in ("signatures", "bodies"))
    assert len(left) == len(right) == COUNT, f"{len(left)} and {len(right)} answers, not {COUNT}"
    of_body = {key["bodies"][n - 1] - 1: text for n, text in right.items()}
    pairs = []
    vectors = TfidfVectorizer(analyzer=stems, sublinear_tf=True)
    vectors.fit([*left.values(), *right.values()])
    for room in sorted(set(key["rooms"])):
        members = [n for n, one in enumerate(key["rooms"]) if one == room]
        signatures = vectors.transform([left[n + 1] for n in members])
        bodies = vectors.transform([of_body[n] for n in members])
        rows, columns = linear_sum_assignment(-(signatures @ bodies.T).toarray())
        pairs += [
            (key["names"][members[r]], key["names"][members[c]])
            for r, c in zip(rows, columns, strict=True)
        ]
    wrong = [pair for pair in pairs if pair[0] != pair[1]]
    sys.stdout.write(f"seed {key['seed']}: {len(pairs) - len(wrong)} of {len(pairs)} match\n")
    for name, other in wrong:
        sys.stdout.write(f"  {name}\n    was paired with {other}\n")
    return pairs


def main(words: list[str]) -> int:
    """Draw, or match."""
    if words[:1] == ["draw"] and len(words) == 3:
        draw(int(words[1]), Path(words[2]))
        return 0
    if words[:1] == ["match"] and len(words) == 2:
        match(Path(words[1]))
        return 0
    sys.stderr.write("names.py draw SEED FOLDER · names.py match FOLDER\n")
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
