"""Fine-tuning examples as text: the model's input, and the characters that are answers.

    {"prompt": P, "completion": C}     P C end                          loss on C and end
    {"messages": […]}                  by the tokenizer's own chat template, where its folder has
                                       one; loss on what it writes for each turn of the assistant,
                                       the end of the turn included. Else this plain one:

        system: CONTENT⏎user: CONTENT⏎assistant: CONTENT end⏎       loss on CONTENT end

`end` is the tokenizer's end-of-text token, left out if it has none. The answer is the text that a
template appends for an assistant's turn. A template that then changes earlier turns is refused,
since training would use another text than generation. Source transformers, `apply_chat_template`;
loss on answers: Wei et al. 2021 (2109.01652)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, check_choice, nearest_word
from shoal.data.text.text_files import END_OF_TEXT
from shoal.data.text.text_rows import CHAT, PAIR, row_text

ANSWERS = "assistant"
ROLES = ("system", "user", ANSWERS, "tool", "developer")

Render = Callable[[list[dict[str, Any]], bool], str]
"""Renderer of (messages, whether an answer is to follow) as text."""


@dataclass(frozen=True)
class Example:
    """One example: its text, and spans (start, stop) of characters that are answers."""

    text: str
    answers: tuple[tuple[int, int], ...]


def find_template(tokenizer: str) -> str:
    """Return the folder of a tokenizer.json's chat template, "" if there is none."""
    path = Path(tokenizer).expanduser()
    if tokenizer.startswith("bpe:"):
        return ""
    if (path.parent / "chat_template.jinja").is_file():
        return str(path.parent)
    try:
        about = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(path.parent) if isinstance(about, dict) and about.get("chat_template") else ""


def load_template(folder: str) -> Render:
    """Return the chat template of a transformers tokenizer's folder.

    Raises a ConfigError without transformers, or for a folder that it cannot read.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f"data.tokenizer: {folder} has a chat template, which transformers applies, and that "
            f"is not installed; pip install 'shoal[hf]'"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises whatever it meets
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"data.tokenizer: {folder} cannot be used: {said[0]}") from error

    def render(messages: list[dict[str, Any]], asking: bool) -> str:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asking)
        )

    return render


def iter_examples(
    rows: Iterable[tuple[str, dict[str, Any]]],
    form: tuple[str, ...],
    end: str,
    render: Render | None,
) -> Iterator[Example]:
    """Yield every row as an example.

    Args:
        rows: (place, object).
        form: PAIR or CHAT.
        end: text of the end-of-text token, "" none.
        render: a chat template.

    Raises:
        ConfigError: a row has another form; with file and line.
    """
    writer: Callable[[dict[str, Any], str], Example]
    if form == PAIR:
        writer = partial(_pair, end=end)
    elif render is None:
        writer = partial(_plain, end=end)
    else:
        writer = partial(_templated, render=render)
    return (writer(row, place) for place, row in rows)


def _pair(row: dict[str, Any], place: str, *, end: str) -> Example:
    prompt, completion = (row_text(row, key, place) for key in PAIR)
    text = prompt + completion + end
    return Example(text, ((len(prompt), len(text)),))


def _plain(row: dict[str, Any], place: str, *, end: str) -> Example:
    text, answers = "", []
    for message in _messages(row, place):
        text += f"{message['role']}:"
        start = len(text)  # the space is the answer's: BPE joins it to the first word
        text += f" {message['content']}"
        if message["role"] == ANSWERS:
            text += end
            answers.append((start, len(text)))
        text += "\n"
    return Example(text, tuple(answers))


def _templated(row: dict[str, Any], place: str, *, render: Render) -> Example:
    messages = _messages(row, place)
    try:
        text = render(messages, False)
        answers = []
        for turn, message in enumerate(messages):
            if message["role"] == ANSWERS:
                before = render(messages[:turn], True)
                after = render(messages[: turn + 1], False)
                if not (text.startswith(after) and after.startswith(before)):
                    raise ConfigError(
                        f"{place}: the tokenizer's chat template writes earlier turns anew once "
                        f"others follow, so turn {turn + 1} is no answer to what was asked; "
                        f"try: a line for each answer, its last turn"
                    )
                answers.append((len(before), len(after)))
    except ConfigError:
        raise
    except Exception as error:  # a template raises for turns that it does not know
        raise ConfigError(
            f"{place}: the tokenizer's chat template refuses it: {type(error).__name__}: {error}"
        ) from error
    return Example(text, tuple(answers))


def plain_question(prompt: str) -> str:
    """Return a user's turn in the plain form, up to the start of the answer."""
    return f"user: {prompt}\n{ANSWERS}:"


def _messages(row: dict[str, Any], place: str) -> list[dict[str, Any]]:
    (key,) = CHAT
    if key not in row:
        close = nearest_word(key, row)
        hint = f"nearest key: {close}" if close else "the lines before have them"
        raise ConfigError(f"{place}: has no {key}; {hint}")
    messages = row[key]
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ConfigError(f"{place}: {key} is a list of {{role, content}}")
    for number, message in enumerate(messages, 1):
        turn = f"{place}: message {number}"
        for wanted in ("role", "content"):
            row_text(message, wanted, turn)
        check_choice(f"{turn}: role", message["role"], ROLES)
    if not any(message["role"] == ANSWERS for message in messages):
        raise ConfigError(f"{place}: no message is of role {ANSWERS}, so there is nothing to learn")
    return messages


def plain_end(tokenizer: str) -> str:
    """Return the end-of-text of a tokenizer trained here; for others look it up in them."""
    return END_OF_TEXT if tokenizer.startswith("bpe:") else ""
