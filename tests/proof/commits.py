"""Draw ten commits older than the rooms, and score who names the file that each changed most.

    python tests/proof/commits.py draw SEED FOLDER    writes subjects.txt, tree.txt and key.json
    python tests/proof/commits.py score FOLDER        reads answers.txt: "number: path"; the figure

A reader sees the subjects and the folder tree of today alone. A file counts at its present place:
renames are followed by git. Drawn are commits that changed a source file that still exists.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "d6df9575"
"""The last commit before the rooms."""
COUNT = 10
LEAST_LINES = 10


def git(*words: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def moves() -> list[tuple[str, dict[str, str]]]:
    """Return (commit, old path → new path) of all commits that moved files, oldest first."""
    text = git("log", "--reverse", "-M40%", "--diff-filter=R", "--name-status", "--format=@%H")
    found = []
    for part in text.split("@")[1:]:
        commit, *lines = part.split("\n")
        rows = [line.split("\t") for line in lines if line.startswith("R")]
        found.append((commit, {old: new for _, old, new in rows}))
    return found


def changed_most(commit: str) -> tuple[str, int]:
    """Return the source file in which a commit changed most lines, and how many."""
    rows = [line.split("\t") for line in git("show", "--numstat", "--format=", commit).splitlines()]
    counts = {
        path: int(added) + int(removed)
        for added, removed, path in rows
        if path.startswith("src/shoal/") and added.isdecimal() and "=>" not in path
    }
    best = max(counts, key=lambda path: counts[path], default="")
    return best, counts.get(best, 0)


def draw(seed: int, folder: Path) -> None:
    """Write the subjects, the tree and the key."""
    order = git("log", "--reverse", "--format=%H").split()
    at = {commit: n for n, commit in enumerate(order)}
    renamed = moves()
    commits = git("log", "--no-merges", "--format=%H", BEFORE).split()
    random.Random(seed).shuffle(commits)
    rows: list[dict[str, str]] = []
    for commit in commits:
        path, lines = changed_most(commit)
        for later, table in renamed:
            if at[later] > at[commit]:
                path = table.get(path, path)
        if lines >= LEAST_LINES and (ROOT / path).is_file():
            subject = git("show", "--no-patch", "--format=%s", commit).strip()
            rows.append({"commit": commit[:8], "subject": subject, "path": path})
        if len(rows) == COUNT:
            break
    folder.mkdir(parents=True, exist_ok=True)
    subjects = [f"{n}. {row['subject']}" for n, row in enumerate(rows, 1)]
    (folder / "subjects.txt").write_text("\n".join(subjects) + "\n")
    (folder / "tree.txt").write_text(git("ls-files", "src/shoal"))
    (folder / "key.json").write_text(json.dumps({"seed": seed, "commits": rows}, indent=1) + "\n")


def score(folder: Path) -> int:
    """Print how many files were named, and those that were not."""
    key = json.loads((folder / "key.json").read_text())
    text = (folder / "answers.txt").read_text()
    named = dict(re.findall(r"^(\d+)[.:]\s*(\S+)", text, re.MULTILINE))
    right = 0
    for n, row in enumerate(key["commits"], 1):
        found = named.get(str(n), "")
        right += found == row["path"]
        if found != row["path"]:
            print(f"{n}. {row['subject']}\n   {row['path']}, named: {found or 'nothing'}")
    print(f"seed {key['seed']}: {right} of {len(key['commits'])}")
    return right


def main(words: list[str]) -> int:
    """Draw, or score."""
    if words[:1] == ["draw"] and len(words) == 3:
        draw(int(words[1]), Path(words[2]))
        return 0
    if words[:1] == ["score"] and len(words) == 2:
        score(Path(words[1]))
        return 0
    sys.stderr.write("commits.py draw SEED FOLDER · commits.py score FOLDER\n")
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
