"""Samples as `shoal data look` describes them: labels, documents, padding, text, images, escapes."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shoal.cli.data_lines import row_lines
from shoal.cli.row_style import RowStyle
from shoal.cli.wrapped_text import TextWrapper, escape_text
from shoal.data.inspection.decoded_text import decode_segments
from shoal.data.inspection.sample_fields import (
    count_misplaced,
    count_padding,
    describe_sample,
    mark_tokens,
    split_joined,
)
from shoal.data.text.text_files import train_bpe_on


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def marked(row: dict[str, Any]) -> list[tuple[int, bool, int]]:
    return [(token["id"], token["learnt"], token["document"]) for token in mark_tokens(row)]


def test_shifted_targets_mark_the_token_that_follows() -> None:
    row = describe_sample(ids(5, 6, 7), ids(-100, 7, 8))
    assert row["shifted"]
    assert marked(row) == [(5, False, 0), (6, False, 0), (7, True, 0), (8, True, 0)]
    assert count_misplaced(row) == 0
    assert count_misplaced(describe_sample(ids(5, 6, 7), ids(9, 7, 8))) == 1


def test_packed_rows_have_documents_with_last_targets_of_their_own() -> None:
    given = {"input_ids": ids(1, 2, 5, 6, 0, 0), "position_ids": ids(0, 1, 0, 1, 0, 1)}
    row = describe_sample(given, ids(2, 3, -100, 7, -100, -100))
    assert marked(row) == [
        (1, False, 0), (2, True, 0), (3, True, 0),
        (5, False, 1), (6, False, 1), (7, True, 1),
        (0, False, 2), (0, False, 2),
    ]  # fmt: skip
    assert count_misplaced(row) == 0
    assert count_padding(mark_tokens(row)) == 2


def test_labels_of_one_dict_stand_at_their_own_token() -> None:
    """As models of transformers take them; also (inputs, labels) that are not shifted."""
    one = {"input_ids": ids(1, 2, 3), "labels": ids(-100, 2, 3)}
    expected = [(1, False, 0), (2, True, 0), (3, True, 0)]
    assert marked(describe_sample(one, one)) == expected
    assert marked(describe_sample(ids(1, 2, 3), ids(-100, 2, 3))) == expected


def test_samples_of_other_kinds_are_listed_by_field() -> None:
    image = torch.zeros(3, 8, 8)
    image[:, :4] = 1.0
    row = describe_sample(image, torch.tensor(7))
    first, second = row["fields"]
    assert (first["name"], first["dtype"], first["shape"]) == ("inputs", "float32", [3, 8, 8])
    assert (first["least"], first["most"], first["mean"]) == (0.0, 1.0, 0.5)
    assert first["shades"] == ["9" * 16] * 4 + ["0" * 16] * 4
    assert second == {"name": "targets", "dtype": "int64", "shape": [], "values": [7]}
    one = {"x": np.array([1.0, np.nan]), "name": "a\x1b[1m", "more": [torch.ones(2, 9)]}
    fields = describe_sample(one, one)["fields"]
    assert fields[0]["values"] == [1.0, "nan"]
    assert fields[0]["not_finite"] == 1
    assert [one["name"] for one in fields] == ["x", "name", "more[0]"]


def test_a_joined_batch_is_cut_into_its_samples() -> None:
    value = [{"a": torch.arange(6).view(2, 3), "b": ["x", "y"]}, torch.arange(2)]
    first, second = split_joined(value, 2) or []
    assert first[0]["a"].tolist() == [0, 1, 2]
    assert (second[0]["b"], int(second[1])) == ("y", 1)
    assert split_joined(torch.zeros(1, 7), 3) is None, "rows that a collate function packs"


def segments(row: dict[str, Any], tokenizer: Any) -> list[tuple[str, bool]]:
    found = decode_segments(mark_tokens(row), tokenizer)
    return [(one["text"], one["learnt"]) for one in found]


def test_text_is_whole_across_marks() -> None:
    """Spaces of words, letters of several tokens, special tokens, ids beyond the vocabulary."""
    tokenizer = train_bpe_on(["hello world " * 9], 260)
    tokens = tokenizer.encode("hello world é").ids
    learnt_from = 5
    targets = [-100 if n < learnt_from else token for n, token in enumerate(tokens)][1:]
    row = describe_sample(ids(*tokens[:-1]), ids(*targets))
    assert "".join(text for text, _ in segments(row, tokenizer)).startswith("hello world ")
    whole = describe_sample(ids(*tokens[:-1]), ids(*tokens[1:]))
    assert "".join(text for text, _ in segments(whole, tokenizer)) == "hello world é"
    end = describe_sample(ids(tokens[0], 0), ids(0, 999))
    assert [text for text, _ in segments(end, tokenizer)][-2:] == ["<|endoftext|>", "⟨id 999⟩"]
    words = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "▁c": 2}, unk_token="▁a"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    row = describe_sample(ids(0, 1), ids(-100, 2))
    assert segments(row, words) == [("a b", False), (" c", True)]


HOSTILE = "a\x1b]0;title\x07b\u202ec\x9b1m\u2028d\x00e\\n"


def test_no_control_character_reaches_a_terminal() -> None:
    words = Tokenizer(models.WordLevel({HOSTILE: 0, "b": 1}, unk_token="b"))
    row = describe_sample(ids(0, 1), ids(0, 0))
    row |= {"tokens": mark_tokens(row)}
    for token in row["tokens"]:
        token["text"] = HOSTILE
    row["segments"] = decode_segments(row["tokens"], words)
    other = describe_sample({"x": HOSTILE}, {"x": HOSTILE})
    for style in (RowStyle(), RowStyle(with_ids=True), RowStyle(coloured=True)):
        for one in (row, other):
            text = "\n".join(row_lines(one, style))
            plain = re.sub(r"\x1b\[[0-9;]*m", "", text) if style.coloured else text
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", plain)
    assert escape_text("\\\x1b") == r"\\\x1b", "an escape in the text is not one of ours"


@pytest.mark.parametrize("width", [20, 80])
def test_lines_keep_the_width_of_the_terminal(width: int) -> None:
    wrapper = TextWrapper("  │ ", "  │ ", width)
    wrapper.add("漢字 and letters " * 9, "\x1b[32m")
    wrapper.add("the end\nof it")
    for line in wrapper.finish():
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
        wide = sum(one in "漢字" for one in plain)
        assert len(plain) + wide <= width
        assert line.count("\x1b[32m") == line.count("\x1b[0m"), "a colour ends with its line"


def test_an_encoding_without_brackets_gets_plain_ones() -> None:
    tokenizer = train_bpe_on(["hello world " * 9], 260)
    tokens = tokenizer.encode("hello").ids
    row = describe_sample(ids(*tokens[:-1]), ids(*tokens[1:]))
    row["segments"] = decode_segments(mark_tokens(row), tokenizer)
    (line,) = row_lines(row, RowStyle(encoding="latin-1"))
    assert line.count("[[") == line.count("]]") == 1
    (line,) = row_lines(row, RowStyle())
    assert line.count("⟦") == line.count("⟧") == 1
    assert os.linesep not in line
