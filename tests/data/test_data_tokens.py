"""Token files: samples, held-out tails, checks of every id."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.config.sections import DataSection
from shoal.data.files.token_files import (
    TokenDataset,
    TokenSpan,
    count_tokens,
    cross_entropy,
    open_folder,
)
from shoal.data.loading.loader import Loader
from shoal.data.sources import open_source


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.mkdir()
    return path


def test_samples_cover_every_target_once(folder: Path) -> None:
    np.save(folder / "a.npy", np.arange(11, dtype=np.uint16))
    np.save(folder / "b.npy", np.arange(100, 108, dtype=np.uint16))
    spans = [
        TokenSpan(str(folder / n), "npy", 0, size) for n, size in (("a.npy", 11), ("b.npy", 8))
    ]
    dataset = TokenDataset(spans, sequence=3)
    assert len(dataset) == 3 + 2
    inputs, targets = zip(*(dataset[i] for i in range(5)), strict=True)
    assert [t.tolist() for t in targets[:3]] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert [t.tolist() for t in targets[3:]] == [[101, 102, 103], [104, 105, 106]]
    assert all(torch.equal(i[1:], t[:-1]) for i, t in zip(inputs, targets, strict=True))
    assert inputs[0].dtype == targets[0].dtype == torch.int64
    with pytest.raises(IndexError):
        dataset[5]
    with pytest.raises(IndexError):
        dataset[-1]


def test_a_sample_does_not_change_the_file(folder: Path) -> None:
    np.save(folder / "train.npy", np.arange(9, dtype=np.int64))
    dataset = TokenDataset([TokenSpan(str(folder / "train.npy"), "npy", 0, 9)], 4)
    dataset[0][0].zero_()
    assert dataset[0][0].tolist() == [0, 1, 2, 3]


def test_a_dataset_travels_by_path(folder: Path) -> None:
    np.save(folder / "train.npy", np.zeros(100_000, dtype=np.uint16))
    dataset = TokenDataset([TokenSpan(str(folder / "train.npy"), "npy", 0, 100_000)], 4)
    first = dataset[0][0]
    text = pickle.dumps(dataset)  # as a spawned worker process gets it
    assert len(text) < 2000
    assert torch.equal(pickle.loads(text)[0][0], first)


def test_workers_read_the_same(folder: Path) -> None:
    np.save(folder / "train.npy", np.arange(1000, dtype=np.uint16))
    section = DataSection(source=f"tokens:{folder}", sequence=7, validation="0")
    train = open_source(section, 0).train
    steps = [
        [v.tolist() for step in Loader(train, batch=8, micro_batch=4, seed=0, workers=w)
         for pair in step.values for v in pair]
        for w in (0, 2)
    ]  # fmt: skip
    assert steps[0] == steps[1]


def test_folder_with_bin_files_and_meta(folder: Path) -> None:
    (folder / "meta.json").write_text(json.dumps({"dtype": "uint32", "vocabulary": 80_000}))
    np.arange(0, 70_000, 7, dtype="<u4").tofile(folder / "train_0.bin")
    np.arange(50, dtype="<u4").tofile(folder / "train_1.bin")
    np.arange(40, dtype="<u4").tofile(folder / "val.bin")
    tokens = open_folder(str(folder), 0.5)
    assert [s.tokens for s in tokens.train] == [10_000, 50]
    assert [s.tokens for s in tokens.validation] == [40]
    assert (tokens.vocabulary, tokens.files) == (80_000, 3)


def test_bin_is_uint16_without_meta_and_the_tail_is_held_out(folder: Path) -> None:
    np.arange(1000, dtype="<u2").tofile(folder / "train.bin")
    source = open_source(DataSection(source=f"tokens:{folder}", sequence=9, validation="0.1"), 0)
    assert source.vocabulary == 1000
    assert source.train[0][1].tolist() == list(range(1, 10))
    assert source.validation[0][0].tolist() == list(range(900, 909))
    assert len(source.validation) == 11
    assert source.description.endswith(
        "tokens: 1 file, 1.0K tokens, vocabulary 1000; 100 tokens held out"
    )
    assert source.kind == "tokens"
    # each of 100 held-out ids is unseen: add-one smoothing gives 1 / (900 + 1000)
    assert source.unigram_entropy == pytest.approx(math.log(1900))


def test_an_id_beyond_the_vocabulary_is_named(folder: Path) -> None:
    (folder / "meta.json").write_text(json.dumps({"vocabulary": 500}))
    tokens = np.arange(400, dtype="<u2")
    tokens[123] = 500
    tokens.tofile(folder / "train.bin")
    with pytest.raises(ConfigError) as caught:
        open_folder(str(folder), 0.1)
    assert str(caught.value) == (
        f"{folder / 'train.bin'}: token id 500 at 123: ids must be below vocabulary = 500 of "
        f"{folder / 'meta.json'}"
    )
    tokens[123], tokens[399] = 0, 501  # in the held-out tail
    tokens.tofile(folder / "train.bin")
    with pytest.raises(ConfigError, match="token id 501 at 399"):
        open_folder(str(folder), 0.1)


def test_negative_ids_are_named(folder: Path) -> None:
    np.save(folder / "train.npy", np.array([3, -7, 4]))
    with pytest.raises(ConfigError, match=r"train.npy: token id -7 at 1: ids are 0 …"):
        open_folder(str(folder), 0.0)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros(4, dtype=np.float32), r"has dtype float32 and shape \[4\]; tokens are one row"),
        (np.zeros((2, 2), dtype=np.int64), r"has dtype int64 and shape \[2, 2\]"),
    ],
)
def test_files_that_are_not_tokens(folder: Path, array: np.ndarray, text: str) -> None:
    np.save(folder / "train.npy", array)
    with pytest.raises(ConfigError, match=text):
        open_folder(str(folder), 0.1)


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        ("{", r"meta.json: must be like \{"),
        ("[]", r"meta.json: must be like \{"),
        ('{"dtype": "uint61"}', "meta.json: dtype = uint61: not one of .*; try: uint16"),
        ('{"vocabulary": "many"}', r"meta.json: vocabulary = many: must be 1 …"),
        ('{"dtype": "uint32"}', r"train.bin: cannot be read as uint32 tokens"),
    ],
)
def test_meta_that_is_wrong(folder: Path, meta: str, text: str) -> None:
    np.zeros(5, dtype="<u2").tofile(folder / "train.bin")
    (folder / "meta.json").write_text(meta)
    with pytest.raises(ConfigError, match=text):
        open_folder(str(folder), 0.1)


def test_damaged_npy(folder: Path) -> None:
    (folder / "train.npy").write_bytes(b"not numpy at all")
    with pytest.raises(ConfigError, match="train.npy: cannot be read as npy tokens"):
        open_folder(str(folder), 0.1)


def test_too_few_tokens_for_one_sample(folder: Path) -> None:
    np.zeros(200, dtype="<u2").tofile(folder / "train.bin")
    section = DataSection(source=f"tokens:{folder}", sequence=256, validation="0")
    with pytest.raises(ConfigError) as caught:
        open_source(section, 0)
    assert str(caught.value) == (
        "data.sequence = 256: a sample takes 257 tokens, the train part has 200; "
        "try: data.sequence=199"
    )


def test_the_scan_is_cached_until_a_file_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.zeros(100, dtype="<u2").tofile(folder / "train.bin")
    calls: list[int] = []

    def counted(spans: Any) -> Any:
        calls.append(1)
        return count_tokens(spans)

    monkeypatch.setattr("shoal.data.files.token_files.count_tokens", counted)
    for _ in range(2):
        assert open_folder(str(folder), 0.1).vocabulary == 1
    assert len(calls) == 2  # train and validation, once
    np.full(100, 5, dtype="<u2").tofile(folder / "train.bin")
    assert open_folder(str(folder), 0.1).vocabulary == 6


def test_cross_entropy_by_hand() -> None:
    got = cross_entropy(np.array([6, 2, 0]), np.array([1, 0, 1]))
    assert got == pytest.approx(-(math.log(7 / 11) + math.log(1 / 11)) / 2)
