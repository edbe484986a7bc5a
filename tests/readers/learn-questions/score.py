"""Count the right answers of a reader: `N: answer`, a line each, against answers.toml.

python tests/readers/learn-questions/score.py FILE
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ANSWERS = Path(__file__).with_name("answers.toml")
FIRST_OF_SHOAL = 16


def right_answers(text: str) -> dict[int, bool]:
    """Return for each question whether the text answers it as the pages do."""
    given = dict(re.findall(r"^(\d+)[:.] *(.*)$", text, re.MULTILINE))
    keys = tomllib.loads(ANSWERS.read_text(encoding="utf-8"))["answer"]
    return {
        key["number"]: all(
            re.search(pattern, given.get(str(key["number"]), ""), re.IGNORECASE)
            for pattern in key["accept"]
        )
        for key in keys
    }


if __name__ == "__main__":
    right = right_answers(Path(sys.argv[1]).read_text(encoding="utf-8"))
    own = sum(right[number] for number in right if number >= FIRST_OF_SHOAL)
    wrong = [number for number in right if not right[number]]
    sys.stdout.write(f"{sum(right.values())} of {len(right)}; of Shoal's: {own}; not: {wrong}\n")
