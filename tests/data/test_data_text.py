"""Text: files, held-out choice, tokenizer, encoding, cache."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, WordPiece
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from shoal.base.errors import ConfigError
from shoal.config.sections import DataSection
from shoal.data.files.documents import (
    EXCLUDED_FOLDERS,
    Document,
    glob_documents,
    hold_out,
    stdlib_documents,
)
from shoal.data.sources import open_source
from shoal.data.text import text_files as text_module
from shoal.data.text.single_pass_text import SinglePassTexts
from shoal.data.text.text_files import END_OF_TEXT, open_corpus, train_bpe_on
from shoal.data.text.token_bytes import count_token_bytes
from shoal.trainer.jobs.validation import make_byte_counter

WORDS = ["the tide comes in, the tide goes out\n", "a shoal of herring turns as one\n", "größe €\n"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    (folder / "old").mkdir(parents=True)
    for i in range(20):
        name = f"old/{i}.txt" if i % 2 else f"{i}.txt"
        (folder / name).write_text("".join(WORDS[(i + k) % 3] for k in range(30)))
    return folder


def section(source: str, **settings: Any) -> DataSection:
    defaults: dict[str, Any] = dict(tokenizer="bpe:300", sequence=16, validation="0.2")
    return DataSection(source=source, **{**defaults, **settings})


def train_bpe(documents: list[Document], vocabulary: int) -> Any:
    return train_bpe_on(SinglePassTexts(documents, []).sample(), vocabulary)


def decode(source: Any, spans: Any) -> str:
    ids = np.concatenate([span.open() for span in spans]).tolist()
    return str(source.tokenizer.decode(ids, skip_special_tokens=False))


def test_text_comes_back_document_by_document(books: Path) -> None:
    source = open_source(section(f"text:{books}/**/*.txt"), 0)
    train, held = hold_out(glob_documents(f"{books}/**/*.txt"), 0.2)
    assert len(train) + len(held) == 20
    for part, documents in ((source.train, train), (source.validation, held)):
        want = "".join(d.text() + "<|endoftext|>" for d in documents)
        assert decode(source, part.spans) == want
    assert source.vocabulary == 300
    assert source.train.draws_nothing
    assert source.description == (
        f"{books}/**/*.txt: 20 files, 15.8 KiB, {source_tokens(source)} tokens; "
        f"{len(held)} files held out"
    )


def source_tokens(source: Any) -> str:
    total = sum(s.tokens for part in (source.train, source.validation) for s in part.spans)
    return f"{total / 1000:.1f}K"


def test_unigram_entropy_by_hand(books: Path) -> None:
    source = open_source(section(f"text:{books}/**/*.txt"), 0)
    train = np.concatenate([s.open() for s in source.train.spans])
    held = np.concatenate([s.open() for s in source.validation.spans])
    counts = np.bincount(train, minlength=300) + 1
    want = float(np.mean([-math.log(counts[t] / counts.sum()) for t in held]))
    assert source.unigram_entropy == pytest.approx(want, abs=1e-12)


def test_held_out_files_do_not_depend_on_other_files_or_the_folder(books: Path) -> None:
    before = {d.name for d in hold_out(glob_documents(f"{books}/**/*.txt"), 0.2)[1]}
    for i in range(100, 120):
        (books / f"{i}.txt").write_text("more")
    moved = books.rename(books.with_name("moved"))
    train, held = hold_out(glob_documents(f"{moved}/**/*.txt"), 0.2)
    assert before == {d.name for d in held if int(Path(d.name).stem) < 100}
    assert 0 < len(held) < len(train)


def test_each_side_gets_a_file(books: Path) -> None:
    documents = glob_documents(f"{books}/*.txt")
    assert len(hold_out(documents, 1e-9)[1]) == 1
    assert len(hold_out(documents, 0.999999)[0]) == 1
    assert hold_out(documents, 0)[1] == []


def test_of_one_file_the_tail_is_held_out(books: Path) -> None:
    source = open_source(section(f"text:{books}/0.txt", validation="0.25"), 0)
    train, held = source.train.spans[0], source.validation.spans[0]
    assert train.stop == held.start
    assert held.tokens == pytest.approx(0.25 * (train.tokens + held.tokens), abs=1)
    assert source.description.endswith("; last 25% held out")


def test_nothing_held_out(books: Path) -> None:
    source = open_source(section(f"text:{books}/*.txt", validation="0"), 0)
    assert source.validation is None
    assert source.description.endswith("; none held out")
    assert source.unigram_entropy is not None


def test_the_second_call_neither_trains_nor_encodes(
    books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    real = text_module.encode_texts

    def counted(*given: Any) -> Any:
        built.append(1)
        return real(*given)

    monkeypatch.setattr(text_module, "encode_texts", counted)
    first = open_source(section(f"text:{books}/*.txt"), 0)
    again = open_source(section(f"text:{books}/*.txt", sequence=8), 0)
    assert len(built) == 1
    assert again.train.spans == first.train.spans
    os.utime(books / "0.txt", ns=(1, 1))
    open_source(section(f"text:{books}/*.txt"), 0)
    assert len(built) == 2


def test_a_damaged_cache_is_made_again(books: Path) -> None:
    first = open_source(section(f"text:{books}/*.txt"), 0)
    path = Path(first.train.spans[0].path)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    open_source(section(f"text:{books}/*.txt"), 0)
    assert path.read_bytes() == good


def test_the_same_text_gives_the_same_tokenizer(books: Path) -> None:
    documents = glob_documents(f"{books}/**/*.txt")
    assert train_bpe(documents, 300).to_str() == train_bpe(documents, 300).to_str()


def test_long_documents_are_encoded_in_pieces(books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 64)
    monkeypatch.setattr(text_module, "ENCODE_CHARACTERS", 200)
    source = open_source(section(f"text:{books}/0.txt", validation="0"), 0)
    want = (books / "0.txt").read_text() + "<|endoftext|>"
    assert decode(source, source.train.spans) == want


def test_pieces_end_with_a_line(books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = glob_documents(f"{books}/*.txt")
    tokenizer = train_bpe(documents, 300)
    whole = text_module.encode_texts(tokenizer, SinglePassTexts(documents, []))[0].tolist()
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 64)
    assert text_module.encode_texts(tokenizer, SinglePassTexts(documents, []))[0].tolist() == whole


def test_no_token_is_added_that_is_not_text(books: Path, tmp_path: Path) -> None:
    documents = glob_documents(f"{books}/*.txt")
    tokenizer = train_bpe(documents, 300)
    plain = text_module.encode_texts(tokenizer, SinglePassTexts(documents, []))[0].tolist()
    tokenizer.post_processor = TemplateProcessing(single="A $0", special_tokens=[("A", 65)])
    assert text_module.encode_texts(tokenizer, SinglePassTexts(documents, []))[0].tolist() == plain


def test_a_tokenizer_of_ones_own(books: Path, tmp_path: Path) -> None:
    own = tmp_path / "tokenizer.json"
    train_bpe(glob_documents(f"{books}/*.txt"), 280).save(str(own))
    source = open_source(section(f"text:{books}/**/*.txt", tokenizer=str(own)), 0)
    assert source.vocabulary == 280
    own.write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json: is no tokenizer.json: "):
        open_source(section(f"text:{books}/**/*.txt", tokenizer=str(own)), 0)


def test_a_large_vocabulary_takes_uint32(books: Path, tmp_path: Path) -> None:
    tokenizer = train_bpe(glob_documents(f"{books}/*.txt"), 280)
    tokenizer.add_tokens([f"word{i}" for i in range(2**16)])
    tokenizer.save(str(tmp_path / "big.json"))
    source = open_source(section(f"text:{books}/0.txt", tokenizer=str(tmp_path / "big.json")), 0)
    assert source.train.spans[0].open().dtype == np.uint32


def test_validation_from_other_text_uses_the_same_tokenizer(books: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("quite other words, " * 20)
    source = open_source(section(f"text:{books}/*.txt", validation=f"text:{other}"), 0)
    assert decode(source, source.validation.spans) == other.read_text() + "<|endoftext|>"
    assert source.description.endswith("; 1 file held out")


def test_empty_text(tmp_path: Path) -> None:
    tokenizer = tmp_path / "t.json"
    made = train_bpe([], 300)
    made.save(str(tokenizer))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match="data.sequence = 16: a sample takes 17 tokens"):
        open_source(section(f"text:{tmp_path}/a.txt", validation="0"), 0)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(
        ConfigError, match=r"a\.txt: is an empty file; try: files with data in them"
    ):
        open_source(section(f"text:{tmp_path}/a.txt", validation="0"), 0)


def test_stdlib_is_source_code_without_tests() -> None:
    names = {d.name for d in stdlib_documents()}
    assert {"json/decoder.py", "argparse.py", "asyncio/tasks.py"} <= names
    parts = {part for name in names for part in Path(name).parts[:-1]}
    assert not parts & EXCLUDED_FOLDERS
    assert all(name.endswith(".py") for name in names)


def test_a_corpus_of_some_standard_library_files() -> None:
    documents = [d for d in stdlib_documents() if d.name.startswith("json/")]
    train, held = hold_out(documents, 0.3)
    corpus = open_corpus(train, held, "bpe:512")
    assert (corpus.vocabulary, corpus.tokens > 1000) == (512, True)
    assert 3 < corpus.unigram_entropy < math.log(512)


def test_bytes_of_tokens_are_those_of_the_text() -> None:
    """Byte-level tokens, also parts of characters; tokens with spaces; words without them."""
    text = "".join(WORDS) + "größe € 東京"
    ours = train_bpe_on([text] * 3, 300)
    counted = count_token_bytes(ours, 320)
    assert counted is not None
    assert len(counted) == 320
    ids = ours.encode(text).ids
    assert counted[ids].sum() == len(text.encode())
    assert not counted[ours.token_to_id(END_OF_TEXT)]
    words = {"▁größe": 0, "<0xE2>": 1, "▁": 2}
    pieces = Tokenizer(BPE(words, []))
    pieces.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse()])
    found = count_token_bytes(pieces, 3)
    assert found is not None
    assert found.tolist() == [8, 1, 1]
    pieces.decoder = WordPiece()
    assert count_token_bytes(pieces, 3) is None


def test_bytes_of_targets_leave_out_ignored_ones(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(WORDS[number % 2] * 20)
    source = open_source(section(f"text:{tmp_path}/*.txt"), 0)
    count_bytes = make_byte_counter(source)
    assert count_bytes is not None
    _, targets = source.validation[0]
    total, count = count_bytes(None, targets)
    text = source.tokenizer.decode(targets.tolist())
    assert (total, count) == (len(text.encode()), len(targets))
    targets = targets.clone()
    targets[3:] = -100
    total, count = count_bytes(None, targets)
    assert (total, count) == (len(source.tokenizer.decode(targets[:3].tolist()).encode()), 3)
    assert make_byte_counter(open_source(DataSection(source="digits"), 0)) is None
