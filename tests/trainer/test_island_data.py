"""Islands whose data differ are refused before the first round; right ones never are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.data.sources import open_data
from shoal.trainer.islands.island_data import (
    check_same_data,
    describe_difference,
    fingerprint_dataset,
)
from shoal.trainer.islands.island_job import train_rounds

INNER = SimpleNamespace(rank=0, broadcast_json=lambda value: value)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


class Others:
    """A plane on which the other islands send these fingerprints."""

    def __init__(self, *others: Any) -> None:
        self.others = others

    def gather(self, message: bytes, *, deadline_s: float) -> list[bytes]:
        return [message, *(json.dumps(other).encode() for other in self.others)]


def compare(*datasets: Any, key: str = "data.source", workers: int = 0) -> None:
    """As islands 0, 1, … that hold these."""
    own = [
        {key: {"source": f"s{n}", **fingerprint_dataset(d, workers)}}
        for n, d in enumerate(datasets)
    ]
    joined: Any = SimpleNamespace(inner=INNER, plane=Others(*own[1:]))
    check_same_data(joined, {key: ("s0", datasets[0])}, workers)


def texts(folder: Path, name: str, words: str) -> str:
    (folder / name).mkdir()
    for number in range(4):
        (folder / name / f"{number}.txt").write_text(f"{words} {number} and more of it\n" * 40)
    return f"text:{folder / name}/*.txt"


def opened(source: str, **keys: Any) -> Any:
    keys = {"tokenizer": "bpe:300", "sequence": 8, "validation": 0, **keys}
    return open_data(source, **keys).train


class Rows:
    """Rows that a function makes of their numbers."""

    def __init__(self, row: Callable[[int], Any], count: int = 40) -> None:
        self.row, self.count = row, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.row(index)


def test_owners_with_other_data_of_equal_length_are_refused(tmp_path: Path) -> None:
    one = opened(texts(tmp_path, "one", "the words of an owner"))
    two = opened(texts(tmp_path, "two", "the words of another"))
    two.spans, two._ends = [two.spans[0]], [min(len(one), len(two))]
    one._ends = [len(two)]
    assert len(one) == len(two)
    with pytest.raises(ConfigError) as caught:
        compare(one, two)
    found = str(caught.value)
    assert found.startswith(f"data.source: {min(64, len(one))} of {min(64, len(one))} samples")
    assert found.endswith(
        "samples that were compared differ, sample 0 first (s1 on island 1, s0 on island 0): "
        "islands take turns in one stream of samples; try: the same data on all islands, "
        "or islands.data=own"
    )
    with pytest.raises(ConfigError, match=r"data.source: 41 samples, and 40 \(s2 on island 2, s0"):
        compare(*(Rows(lambda n: n, count) for count in (40, 40, 41)))


def test_the_held_out_part_of_island_0_speaks_for_all() -> None:
    """An island without one is not asked: it never validates."""
    with pytest.raises(
        ConfigError, match=r"data.validation: .* differ, .*: island 0 validates for"
    ):
        compare(Rows(lambda n: n), Rows(lambda n: n + 1), key="data.validation")
    joined: Any = SimpleNamespace(inner=INNER, plane=Others({}))
    check_same_data(joined, {"data.validation": ("0.02", Rows(lambda n: n))}, 0)


def made(word: str) -> dict[str, Any]:
    """Rows as sources of many kinds give them: tokens, images, numbers, text, mappings."""
    shift = {"other": 1, "almost": 1e-4, "same": 0}[word]
    whole = int(shift)
    draw = torch.Generator().manual_seed(1)
    images = torch.rand(40, 3, 8, 8, generator=draw)
    return {
        "tokens": lambda n: (torch.arange(8) + n + whole, torch.arange(8)),
        "labels": lambda n: (images[n], (n + whole) % 5),
        "images": lambda n: (images[n] * (1 + 0.1 * shift), n % 5),
        "arrays": lambda n: (np.full(4, n + 1.0) * (1 + shift / 10), np.int64(3)),
        "numbers": lambda n: {"x": 1.5 * n + 1 + 0.1 * shift, "y": [n]},
        "texts": lambda n: {"text": f"row {n + whole}"},
        "shapes": lambda n: torch.zeros(4 + whole),
    }


@pytest.mark.parametrize("kind", made("same"))
def test_rows_of_every_kind_are_compared(kind: str) -> None:
    """What differs by less than a thousandth of its mean may be another decoder's work."""
    one, two, almost = (Rows(made(word)[kind]) for word in ("same", "other", "almost"))
    compare(one, Rows(made("same")[kind]), almost)
    with pytest.raises(ConfigError, match="samples that were compared differ"):
        compare(one, two)


def test_another_order_tokenizer_or_length_of_sample_is_another_stream(tmp_path: Path) -> None:
    """The same content elsewhere is the same stream, be it read by workers."""
    source = texts(tmp_path, "one", "the words of an owner")
    again = texts(tmp_path, "two", "the words of an owner")
    one = opened(source)
    compare(one, opened(again), workers=0)
    compare(one, opened(again), workers=1)
    turned = texts(tmp_path, "turned", "the words of an owner")
    for number in range(4):
        name = tmp_path / "turned" / f"{number}.txt"
        name.rename(name.with_name(f"{9 - number}.txt"))
    for other in (
        opened(turned),
        opened(source, tokenizer="bpe:280"),
        opened(source, sequence=9),
        opened(source, validation=0.3),
    ):
        with pytest.raises(ConfigError, match=r"data.source: "):
            compare(one, other)


def test_what_is_drawn_anew_or_cannot_be_read_says_nothing() -> None:
    draws = iter(range(10**6))
    anew = Rows(lambda n: next(draws))
    assert fingerprint_dataset(anew, 0) == {"samples": 40, "seen": []}
    compare(anew, Rows(lambda n: n))
    augmented = Rows(lambda n: torch.rand(3) + n)  # from torch's own generator, which is seeded
    state = torch.get_rng_state()
    compare(augmented, Rows(lambda n: torch.rand(3) + n))
    assert torch.equal(torch.get_rng_state(), state)
    assert fingerprint_dataset(Rows(lambda n: {}[n]), 0)["seen"] == []
    nan = Rows(lambda n: float("nan"))
    compare(nan, Rows(lambda n: float("nan")))
    assert describe_difference(
        fingerprint_dataset(nan, 0), fingerprint_dataset(Rows(lambda n: 1.0), 0)
    )


def test_it_is_asked_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train_rounds` compares training and held-out data; nothing is trained before."""
    from shoal.config.sections import Config
    from shoal.trainer.islands import island_job

    other = {"data.source": {"source": "b", **fingerprint_dataset(Rows(lambda n: n + 1), 0)}}

    class Plane(Others):
        def gather(self, message: bytes, *, deadline_s: float) -> list[bytes]:
            own = json.loads(message)
            return [message, message if "train.steps" in own else json.dumps(other).encode()]

    rounds = SimpleNamespace(one=lambda: pytest.fail("a round was trained"), loader=None)
    monkeypatch.setattr(island_job, "IslandRounds", lambda *_: rounds)
    monkeypatch.setattr(island_job, "make_validator", lambda *_: None)
    policy = IslandsPolicy("diloco", count=2).resolved()
    joined: Any = SimpleNamespace(policy=policy, inner=INNER, plane=Plane())
    run: Any = SimpleNamespace(loader=lambda *_, **__: None)
    source: Any = SimpleNamespace(train=Rows(lambda n: n), validation=None, collate=None)
    with pytest.raises(ConfigError, match="data.source: 40 of 40 samples .* differ"):
        train_rounds(run, joined, source, Config(), 4)
