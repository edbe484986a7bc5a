"""JSON lines as text: which key, what is held out, and one line for each line that is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.base.errors import ConfigError
from shoal.config.sections import DataSection
from shoal.data.sources import open_source
from shoal.data.text import text_rows as rows

TEXTS = [f"line {n}: the tide comes in, the tide goes out, größe €{n % 7}\n" for n in range(200)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def lines(path: Path, rows: list[Any]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def opened(source: str, **settings: Any) -> Any:
    defaults: dict[str, Any] = dict(tokenizer="bpe:300", sequence=16, validation="0.2")
    return open_source(DataSection(source=source, **{**defaults, **settings}), 0)


def texts(source: Any, part: Any) -> list[str]:
    ids = np.concatenate([span.open() for span in part.spans]).tolist()
    whole = str(source.tokenizer.decode(ids, skip_special_tokens=False))
    return whole.split("<|endoftext|>")[:-1]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_every_line_is_a_document_on_one_side(tmp_path: Path, name: str) -> None:
    lines(tmp_path / name, [{"id": n, "text": text} for n, text in enumerate(TEXTS)])
    source = opened(f"jsonl:{tmp_path}/*.jsonl*")
    train, held = texts(source, source.train), texts(source, source.validation)
    assert sorted(train + held) == sorted(TEXTS)
    assert 20 <= len(held) <= 60
    assert [t for t in TEXTS if t in set(train)] == train, "in the file's order"
    assert source.description.endswith("20% of the rows held out")


def test_both_sides_are_encoded_in_one_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    first = opened(f"jsonl:{path}")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "other"))
    read: list[str] = []
    real = rows.TextRows.rows

    def counted(document: rows.TextRows, keys: Any = ()) -> Any:
        for place, row in real(document, keys):
            read.append(place)
            yield place, row

    monkeypatch.setattr(rows.TextRows, "rows", counted)
    source = opened(f"jsonl:{path}", tokenizer=first.train.spans[0].path[:-9] + "tokenizer.json")
    assert len(read) < 1.1 * len(TEXTS), "first rows, for the form, and all once"
    for part in ("train", "validation"):
        ours, theirs = (texts(one, getattr(one, part)) for one in (source, first))
        assert ours == theirs


def test_lines_that_are_added_or_equal_move_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines(path, [{"text": text} for text in TEXTS[:150]])
    before = set(texts(source := opened(f"jsonl:{path}"), source.validation))
    lines(path, [{"text": text} for text in [*TEXTS[:20], *TEXTS]])
    source = opened(f"jsonl:{path}")
    train, held = texts(source, source.train), texts(source, source.validation)
    assert before <= set(held)
    assert not set(train) & set(held)


def test_one_line_alone_gives_its_tail(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "".join(TEXTS)}])
    source = opened(f"jsonl:{path}", validation="0.1")
    tokens = [sum(s.tokens for s in part.spans) for part in (source.train, source.validation)]
    assert tokens[1] == round(0.1 * sum(tokens))


def test_another_key_and_a_second_source(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "no", "content": text} for text in TEXTS])
    other = lines(tmp_path / "b.jsonl", [{"content": text} for text in TEXTS[:9]])
    source = opened(f"jsonl:{path}", field="content", validation=f"jsonl:{other}")
    assert texts(source, source.train) == TEXTS
    assert texts(source, source.validation) == TEXTS[:9]


@pytest.mark.parametrize(
    ("content", "settings", "text"),
    [
        ('{"text": "a"}\n\n{"text": \n', {}, ":3: is not JSON: Input data was truncated"),
        ('{"text": "a"}\n[1]\n', {}, ":2: is list, an object is wanted: {…}"),
        ('{"text": "a"}\n{"txt": "b"}\n', {}, ":2: has no text; nearest key: txt"),
        ('{"text": "a"}\n{"id": 3}\n', {}, ":2: has no text; it has id"),
        ('{"text": "a"}\n{"text": 3}\n', {}, ":2: text is int, a text is wanted"),
        ('{"text": "a"}\n{"text": null}\n', {}, ":2: text is NoneType, a text is wanted"),
        ('{"id": 3, "content": "a"}\n', {}, ":1: has id, content; text, messages, or prompt and "
         "completion are wanted; try: data.field=content"),
        ('{"text": "a"}\n', {"field": "txet"}, ":1: has no txet; nearest key: text"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_told_by_its_number(
    tmp_path: Path, content: str, settings: dict[str, Any], text: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        opened(f"jsonl:{path}", **settings)
    assert str(caught.value) == f"{path}{text}"


def test_files_without_a_line_and_broken_gzip(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"^data.source: .*a.jsonl: hold no row$"):
        opened(f"jsonl:{tmp_path}/a.jsonl")
    whole = gzip.compress("".join(f'{{"text": "{n}"}}\n' for n in range(99)).encode())
    (tmp_path / "b.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(ConfigError, match=r"b.jsonl.gz:\d+: cannot be read: Compressed file ended"):
        opened(f"jsonl:{tmp_path}/b.jsonl.gz")
