"""One line for a command line that has no such verb or option, with the nearest one.

For example: "docs: No such command; try: shoal docs; help: shoal --help".
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from shoal.base.text.event_sentences import strip_control_characters

SYNONYMS = {
    **dict.fromkeys(("ls", "list", "ps", "status", "history"), "runs"),
    **dict.fromkeys(("log", "logs", "debug", "why", "errors"), "diagnose"),
    **dict.fromkeys(("resume", "continue", "restart"), "train --resume RUN"),
    **dict.fromkeys(("fit", "start", "pretrain", "finetune"), "train"),
    **dict.fromkeys(("generate", "chat", "infer"), "sample"),
    **dict.fromkeys(("bench", "benchmark"), "compare"),
    **dict.fromkeys(("check", "env", "info"), "doctor"),
    **dict.fromkeys(("export", "verify"), "checkpoint {word}"),
    **dict.fromkeys(("sbatch", "slurm", "kubernetes"), "launch {word}"),
    **dict.fromkeys(("help", "version"), "--{word}"),
}
"""Words that other tools have for a verb → ours."""
OF_A_RUN = {"data": "look", "islands": "show", "checkpoint": "list"}
"""Group → its verb that takes a run's folder, which may follow the group at once."""


def format_usage_error(failure: Exception, words: list[str], groups: Collection[str]) -> str:
    """Return the line about a wrong command line, without "shoal: ".

    Args:
        failure: an error of typer that can format itself.
        words: the command line after `shoal`.
        groups: verbs that another word follows.
    """
    text = " ".join(failure.format_message().split())  # type: ignore[attr-defined]
    verbs, path = _read_context(getattr(failure, "ctx", None))
    if not path and not verbs and words[:1] and not words[0].startswith("-"):
        path = words[: 2 if words[0] in groups else 1]  # typer names no command
    hint = _nearest_verb(text, words, verbs, path)
    if found := re.search(r" \(Possible options: ([^)]+)\)", text):
        hint = hint or found[1]
    text = re.sub(r" \(Possible options: [^)]+\)| Did you mean .*\?$", "", text)
    where = f"{' '.join(path)}: " if path else ""
    parts = [f"{where}{text.rstrip('.')}", f"try: {hint}" if hint else ""]
    parts.append(f"help: shoal {''.join(f'{word} ' for word in path)}--help")
    return strip_control_characters("; ".join(filter(None, parts)))


def _read_context(context: Any) -> tuple[list[str], list[str]]:
    """Return the verbs of the innermost group, and the words of the command that failed."""
    path: list[str] = []
    verbs: list[str] = []
    while context is not None:
        verbs = verbs or list(getattr(context.command, "commands", {}))
        if context.parent is not None:
            path.insert(0, str(context.info_name))
        context = context.parent
    return verbs, path


def _nearest_verb(text: str, words: list[str], verbs: list[str], path: list[str]) -> str:
    """Return the command that was probably meant, "" if the verb is right.

    Args:
        verbs: of the group in which the command line failed.
        path: the words that are right.
    """
    begin = "shoal " + "".join(f"{word} " for word in path)
    if (found := re.match(r"No such command '(.*?)'", text)) is None:
        bare = "Missing" in text and len(path) == 1 and not any(w.startswith("-") for w in words)
        rest = words[len(path) :]
        if bare and "'--as'" in text and rest and Path(rest[0]).suffix:
            return f"shoal run --as accelerate {shlex.join(rest)}, or --as deepspeed"
        longer = [verb for verb in verbs if bare and verb != path[0] and verb.startswith(path[0])]
        return f"shoal {longer[0]}" if longer else ""
    word = found[1].lower()
    after = words[len(path) + 1 : len(path) + 2]
    if after and word + after[0] in verbs:
        return f"{begin}{word}{after[0]}"
    if word == "help" and after and after[0] in verbs:
        return f"shoal {after[0]} --help"
    begins = [verb for verb in verbs if len(word) > 1 and verb.startswith(word)]
    least = 0.6 if path else 0.7  # a group has few and short verbs: "kye" is "key"
    near = [word] if word in verbs else begins or difflib.get_close_matches(word, verbs, 2, least)
    if word in SYNONYMS and word not in verbs and not path:
        return f"shoal {SYNONYMS[word].format(word=word)}"
    if not near and path and path[-1] in OF_A_RUN:
        near = [f"{OF_A_RUN[path[-1]]} {shlex.quote(found[1])}"]
    return ", or ".join(f"{begin}{verb}" for verb in near[:2])
