"""Sources: digits, synthetic tokens, the user's own functions, and second sources."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.config.sections import DataSection
from shoal.data.digits import EvenSubset
from shoal.data.sources import open_source
from shoal.trainer.loaders.run_loaders import open_loader


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def module(name: str, text: str) -> None:
    """A user's module in the working folder."""
    Path(f"{name}.py").write_text(text)


def test_digits() -> None:
    source = open_source(DataSection(source="digits"), 0)
    assert (
        source.description == "digits of scikit-learn: 1797 images of 8×8, 10 classes; 359 held out"
    )
    image, target = source.train[0]
    assert (image.shape, image.dtype, target.dtype) == ((1, 8, 8), torch.float32, torch.int64)
    images = torch.stack([source.train[i][0] for i in range(len(source.train))])
    assert (images.min(), images.max()) == (0, 1)
    assert source.unigram_entropy == pytest.approx(math.log(10), abs=0.02)
    assert (source.kind, source.vocabulary, source.train.draws_nothing) == ("samples", None, True)
    classes = torch.stack([source.validation[i][1] for i in range(len(source.validation))])
    assert torch.bincount(classes).min() > 15


def test_digits_are_scikit_learns_and_do_not_import_it() -> None:
    code = (
        "import sys, torch; from shoal.data.digits import open_digits; found = open_digits(0.0); "
        "assert 'sklearn' not in sys.modules; from sklearn.datasets import load_digits; "
        "other = open_digits(0.0); pairs = zip(found.train.tensors, other.train.tensors); "
        "assert all(torch.equal(one, same) for one, same in pairs); "
        "images, classes = load_digits(return_X_y=True); from shoal.data import digits; "
        "sys.modules.pop('sklearn.datasets'); own, known = digits._read_digits(); "
        "assert (own == images).all() and (known == classes).all() and known.dtype == 'int64'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_digits_held_out_do_not_depend_on_the_seed_and_follow_the_share() -> None:
    first, second = (open_source(DataSection(source="digits"), seed) for seed in (0, 9))
    assert torch.equal(first.validation[7][0], second.validation[7][0])
    assert len(open_source(DataSection(source="digits", validation="0.5"), 0).validation) == 898
    assert open_source(DataSection(source="digits", validation="0"), 0).validation is None


def test_synthetic_tokens() -> None:
    section = DataSection(source="synthetic", sequence=32)
    source, again, other = (open_source(section, seed) for seed in (1, 1, 2))
    inputs, targets = source.train[5]
    assert (inputs.shape, inputs.dtype) == ((32,), torch.int64)
    assert torch.equal(inputs[1:], targets[:-1])
    assert torch.equal(inputs, again.train[5][0])
    for different in (source.train[6], other.train[5], source.validation[5], other.validation[5]):
        assert not torch.equal(inputs, different[0])
    assert int(inputs.min()) >= 0
    assert int(inputs.max()) < 2048 == source.vocabulary
    assert source.unigram_entropy == pytest.approx(math.log(2048))
    np.random.seed(1)
    want = np.random.rand()
    np.random.seed(1)
    source.train[7]
    assert np.random.rand() == want


@pytest.mark.parametrize(
    ("samples", "held"), [(2, 1), (5, 2), (10, 1), (10, 9), (97, 31), (64, 16)]
)
def test_even_parts_are_every_sample_once(samples: int, held: int) -> None:
    whole = list(range(samples))
    train, kept = EvenSubset(whole, held, False), EvenSubset(whole, held, True)
    assert (
        sorted([*(train[i] for i in range(len(train))), *(kept[i] for i in range(held))]) == whole
    )
    gaps = np.diff([kept[i] for i in range(held)])
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1
    with pytest.raises(IndexError):
        train[len(train)]


def test_a_function_of_ones_own() -> None:
    module("my_list", "def make():\n    return [(i, i % 3) for i in range(40)]\n")
    source = open_source(DataSection(source="my_list:make", validation="0.1"), 0)
    assert (len(source.train), len(source.validation)) == (36, 4)
    assert source.description == "my_list:make: list, 40 samples; 4 held out"
    step = next(iter(open_loader(source.train, batch=4, micro_batch=2, seed=0)))
    assert [v.shape for v in step.values[0]] == [(2,), (2,)]


def test_a_function_giving_both_parts_and_a_collate() -> None:
    module(
        "my_pair",
        "def make():\n    return [1, 2, 3], [4]\n\n"
        "def stream():\n    return (i for i in range(9))\n\n"
        "def join(samples):\n    return tuple(samples)\n",
    )
    source = open_source(DataSection(source="my_pair:make", collate="my_pair:join"), 0)
    assert (source.train, source.validation) == ([1, 2, 3], [4])
    assert source.collate is not None
    assert source.collate([1, 2]) == (1, 2)
    stream = open_source(DataSection(source="my_pair:stream"), 0)
    assert stream.validation is None
    assert stream.description.endswith("generator, samples in order; no validation data")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("def make():\n    raise OSError('gone')", r"my_bad\d:make\(\) raises OSError: gone"),
        ("def make():\n    pass", "gives None, not a dataset or an iterable"),
        ("def mate():\n    pass", r"my_bad\d has no make; try: my_bad\d:mate"),
        ("make = 3", "is int, not a function"),
        ("import no_such_thing", "importing my_bad.* raises ModuleNotFoundError: No module named"),
    ],
)
def test_functions_that_fail(body: str, text: str, request: pytest.FixtureRequest) -> None:
    name = f"my_bad{abs(hash(body)) % 10}"
    module(name, body)
    request.addfinalizer(lambda: __import__("sys").modules.pop(name, None))
    with pytest.raises(ConfigError, match=text):
        open_source(DataSection(source=f"{name}:make"), 0)


def test_a_second_source_for_validation(tmp_path: Path) -> None:
    np.arange(500, dtype="<u2").tofile(tmp_path / "train.bin")
    section = DataSection(source="synthetic", sequence=8, validation=f"tokens:{tmp_path}")
    source = open_source(section, 0)
    assert source.validation[0][0].tolist() == list(range(8))
    assert "; validation: " in source.description
    (tmp_path / "meta.json").write_text('{"vocabulary": 5000}')
    with pytest.raises(ConfigError) as caught:
        open_source(section, 0)
    assert str(caught.value) == (
        f"data.validation = tokens:{tmp_path}: has token ids up to 4999, data.source = synthetic "
        f"has a vocabulary of 2048"
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"validation": "digits"}, "data.validation = digits: gives samples, .* gives tokens"),
        ({"validation": "stdlib"}, "data.validation = stdlib: text needs the tokenizer"),
        ({"validation": "1.5"}, "a share is at least 0 and below 1; try: data.validation=0.5"),
        ({"validation": "-0.1"}, "try: data.validation=0$"),
        ({"validation": "nan"}, "a share is at least 0 and below 1"),
        ({"validation": "5%"}, "data.validation = 5%: neither a share such as 0.05 nor a source"),
        ({"source": "stdlb"}, "data.source = stdlb: not one of .*; try: stdlib"),
        ({"sequence": 0}, "data.sequence = 0: must be at least 1 token"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        open_source(DataSection(**{"source": "synthetic", **settings}), 0)


def test_a_share_of_text_is_kept_to_the_sample(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"some words of file {number}, " * 200)
    section = DataSection(source=f"text:{tmp_path}/*.txt", tokenizer="bpe:300", sequence=8)
    small = open_source(replace(section, validation="0.0005"), 0)
    total = len(small.train) + len(small.validation)
    assert small.validation_samples == max(1, round(0.0005 * total)) < len(small.validation)
    assert "1 file held out" in small.description
    wide = open_source(replace(section, validation="0.5"), 0)
    half = round(0.5 * (len(wide.train) + len(wide.validation)))
    assert wide.validation_samples == (half if half < len(wide.validation) else None)
    second = open_source(replace(section, validation=f"text:{tmp_path}/1*.txt"), 0)
    assert second.validation_samples is None
