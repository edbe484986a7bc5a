"""Mixtures: exact by count, every sample once, the same after a resume and on any layout."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from shoal.base.errors import ConfigError
from shoal.config.mixture_syntax import split_mixture
from shoal.config.paths import check_data_path
from shoal.config.sections import DataSection
from shoal.data.loading.loader import Loader
from shoal.data.loading.weighted_mixture import WeightedMixture, deal_round
from shoal.data.sources import open_source

WEIGHTS = [(1, 1), (7, 3), (1, 99), (5, 3, 2), (3, 2, 1), (1, 1, 1, 1), (97, 2, 1), (10, 9, 3, 1)]


class Numbers(Dataset[Any]):
    draws_nothing = True

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return self.first + index


def mixed() -> WeightedMixture:
    return WeightedMixture([Numbers(0, 50), Numbers(1000, 9), Numbers(2000, 31)], [5, 3, 2])


@pytest.mark.parametrize("parts", WEIGHTS)
def test_of_the_first_n_each_has_its_share_to_the_sample(parts: tuple[int, ...]) -> None:
    whole = sum(parts)
    counts = [0] * len(parts)
    for number, source in enumerate(deal_round(parts) * 3, 1):
        counts[source] += 1
        for count, part in zip(counts, parts, strict=True):
            assert number * part // whole <= count <= -(-number * part // whole), (number, counts)
    assert counts == [3 * part for part in parts]


def handed_out(loader: Loader, steps: int) -> list[int]:
    """Values of the next steps of one rank, over the ends of epochs."""
    seen: list[int] = []
    batches = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    for batch in itertools.islice(batches, steps):
        seen += [int(n) for value in batch.values for n in value]
    return seen


def loader(position: int = 0, rank: int = 0, degree: int = 1, **more: Any) -> Loader:
    given: dict[str, Any] = {"batch": 8, "micro_batch": 2, "seed": 3, **more}
    return Loader(mixed(), rank=rank, degree=degree, position=position, **given)


def test_every_source_goes_round_on_its_own() -> None:
    data = mixed()
    assert len(data) == 31, "9 samples at 3 of 10 last for 31"
    order = data.stream_order(0, 400, seed=3).tolist()
    values = [data[index] for index in order]
    for dataset, part in zip(data.datasets, data.parts, strict=True):
        mine = [n for n in values if dataset.first <= n < dataset.first + 1000]
        assert len(mine) == 40 * part
        rounds = [mine[at : at + dataset.size] for at in range(0, len(mine), dataset.size)]
        whole = set(range(dataset.first, dataset.first + dataset.size))
        assert all(set(one) == whole for one in rounds if len(one) == dataset.size)
        assert rounds[0] != sorted(rounds[0])
    assert data.stream_order(0, 400, seed=4).tolist() != order
    plain = data.stream_order(0, 10, seed=3, shuffle=False).tolist()
    assert [data[n] for n in plain if data[n] < 1000] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_resume_and_resize_lose_no_sample(workers: int) -> None:
    """One rank, stopped and gone on with on four, then on two, gives what one alone gives."""
    alone = handed_out(loader(), 24)
    first = loader(workers=workers)
    seen = [handed_out(first, 5)]
    for degree, steps in ((4, 7), (2, 12)):
        state = json.loads(json.dumps(first.state()))
        ranks = [loader(rank=rank, degree=degree, workers=workers) for rank in range(degree)]
        for rank in ranks:
            rank.restore(state)
        seen.append([n for rank in ranks for n in handed_out(rank, steps)])
        assert len({rank.position for rank in ranks}) == 1
        first = ranks[0]
    stops = list(itertools.accumulate(map(len, seen), initial=0))
    assert stops[-1] == len(alone)
    for part, start, stop in zip(seen, stops, stops[1:], strict=False):
        assert sorted(part) == sorted(alone[start:stop])


def test_what_a_user_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    for name in "ab":
        rows = [{"text": f"{name} is said {n} times, and {n * n} times again"} for n in range(300)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    chats = [{"prompt": f"say {n}: ", "completion": f"{n}"} for n in range(60)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(r) + "\n" for r in chats))
    text = f"mix:0.5*jsonl:{tmp_path}/a.jsonl + 0.3*jsonl:{tmp_path}/b.jsonl+.2*jsonl:{tmp_path}/c.jsonl"
    section = DataSection(source=text, tokenizer="bpe:300", sequence=32, validation="0.1")
    source = open_source(section, 0)
    assert source.kind == "tokens"
    assert source.train.parts == [5, 3, 2]
    assert source.vocabulary == source.tokenizer.get_vocab_size() <= 300
    firsts = [source.train[int(n)][0] for n in source.train.stream_order(0, 40, seed=0)]
    letters = [source.tokenizer.decode(ids.tolist()) for ids in firsts]
    assert sum("b is" in text for text in letters) == 12
    assert sum("say" in text for text in letters) == 8
    assert len(source.validation) > 3
    inputs, targets = source.validation[len(source.validation) - 1]
    assert inputs.shape == targets.shape == torch.Size([32])
    assert source.description.startswith(f"mixture, {len(source.train)} samples an epoch: 5/10 of ")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("mix:", "mixes nothing; try: mix:0.7*SOURCE+0.3*SOURCE"),
        ("mix:stdlib", "stdlib has no weight; write mix:0.7*SOURCE+0.3*SOURCE"),
        ("mix:0.7*stdlib+digits", "digits has no weight; write mix:0.7*SOURCE+0.3*SOURCE"),
        ("mix:x*jsonl:a+0.5*jsonl:b", "x is no weight of jsonl:a, a number above 0 is; try: "
         "0.5*jsonl:a"),
        ("mix:0.5*jsonl:a+x*jsonl:b", "x is no weight of jsonl:b, a number above 0 is; try: "
         "0.5*jsonl:b"),
        ("mix:1*stdlib+1/3*text:a+b", "1/3 is no weight of text:a+b, a number above 0 is; try: "
         "0.5*text:a+b"),
        ("mix:1*stdlib + -1*digits", "-1 is no weight of digits, a number above 0 is; try: "
         "0.5*digits"),
        ("mix:*stdlib", "nothing is no weight of stdlib, a number above 0 is; try: 0.5*stdlib"),
        ("mix:0.5jsonl:a", "0.5jsonl:a has no * after its weight; try: 0.5*jsonl:a"),
        ("mix:1*stdlib+0.5jsonl:a", "0.5jsonl:a has no * after its weight; try: 0.5*jsonl:a"),
        ("mix:0.5*jsonl:a", "mixes one source; try: data.source=jsonl:a"),
        ("mix:1*stdlib", "mixes one source; try: data.source=stdlib"),
        ("mix:1*stdlib+0*digits", "a weight of 0 takes nothing; try: leave digits out"),
        ("mix:1*stdlib+1*mix:1*digits", "mixtures do not nest; try: one mix: of all sources"),
        ("mix:0.1234567*stdlib+0.8765433*digits", "weights of this ratio take 10000000 samples to "
         "be kept exactly, and at most 100000 are counted; try: mix:0.123*stdlib+0.877*digits"),
    ],
)  # fmt: skip
def test_what_is_no_mixture_is_one_line(source: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_data_path(source)
    assert str(caught.value) == f"data.source = {source}: {text}"


def test_a_part_that_is_not_there_is_told_as_alone() -> None:
    with pytest.raises(ConfigError, match=r"^data.source = stdlb: not one of .*; try: stdlib$"):
        check_data_path("mix:1*digits+1*stdlb")
    with pytest.raises(ConfigError, match=r"^data.source = mux:1\*a: not one of .*try: mix:1\*a$"):
        check_data_path("mux:1*a")


def test_parts_that_do_not_mix() -> None:
    here = DataSection(source="mix:1*synthetic+1*digits")
    with pytest.raises(ConfigError) as caught:
        open_source(here, 0)
    assert str(caught.value) == (
        "data.source: the mixture's part digits gives samples, synthetic gives tokens"
    )


def test_a_second_source_of_another_kind() -> None:
    with pytest.raises(ConfigError) as caught:
        open_source(DataSection(source="mix:1*synthetic+1*synthetic", validation="digits"), 0)
    assert str(caught.value) == (
        "data.validation = digits: gives samples, data.source = mix:1*synthetic+1*synthetic "
        "gives tokens"
    )


def test_ratios_are_in_least_terms() -> None:
    assert (
        split_mixture("70*a+30*b", "x")
        == split_mixture("0.7*a + 0.3*b", "x")
        == [
            (7, "a"),
            (3, "b"),
        ]
    )
