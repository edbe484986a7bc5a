"""Says what to do next with a run that a script of the user's own made, which no command resumes.

Findings name commands of `shoal train`; a run folder without a run.toml belongs to a script, whose
words for the same are other ones.
"""

from __future__ import annotations

import re
from pathlib import Path

RESUMES = re.compile(r"shoal train --resume (?:'[^']*'|\S+)(?: (?P<key>[\w.]+)=(?P<value>\S+))?")
PLANS = re.compile(r"shoal plan \S+run\.toml.*")
WORDS = {
    "data.workers": "run.loader(…, workers={})",
    "optimizer.lr": "a smaller learning rate",
}
"""What keys are in a script, where they are no keyword of shoal.parallelize."""
AGAIN = "start the script again; run.restore() goes on from its last checkpoint"


def is_of_a_script(folder: Path) -> bool:
    """Whether no command made this run folder."""
    return not (folder / "run.toml").exists()


def in_a_script(command: str) -> str:
    """The same for a script.

    >>> in_a_script("shoal train --resume runs/own train.spikes=skip")
    'start the script again, with shoal.parallelize(…, spikes="skip")'
    """
    command = PLANS.sub("a larger batch, or another layout, for shoal.parallelize", command)
    return RESUMES.sub(_said, command)


def _said(found: re.Match[str]) -> str:
    key, value = found["key"], found["value"]
    if key is None:
        return AGAIN
    word = WORDS.get(key, f'shoal.parallelize(…, {key.rpartition(".")[2]}="{{}}")')
    return f"start the script again, with {word.format(value)}"
