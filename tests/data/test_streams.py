"""Shards as 64 streams: every sample once on any layout, each stream one rank's, few bytes read."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.base.errors import ConfigError, UserError
from shoal.base.plans.batches import default_turn
from shoal.data.loading.loader import Loader
from shoal.data.streams.stream_order import BLOCK, STREAMS, StreamOrder
from shoal.data.streams.webdataset import TarSamples, open_shards

SIZES = {
    "even": [130] * 70,
    "few shards": [400, 7, 911],
    "one": [1000],
    "fewer samples than streams": [5, 6],
    "empty ones": [0, 0, 300, 0, 17, 0],
    "large": [9000, 70_001, 4, 60_000],
}


def write(at: Path, shards: int, each: int, size: int = 40) -> str:
    """Shards of `each` samples, two files each; returns the pattern."""
    at.mkdir()
    number = itertools.count()
    for shard in range(shards):
        with tarfile.open(at / f"s-{shard:03}.tar", "w") as tar:
            for _ in range(each):
                n = next(number)
                for ending, data in (("bin", bytes([n % 251]) * size), ("cls", b"%d" % (n % 3))):
                    info = tarfile.TarInfo(f"a.b/{n:06}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return str(at / "*.tar")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_an_epoch_is_every_sample_once_and_parts_of_it_are_the_same(
    sizes: list[int], micro_batch: int
) -> None:
    order, n = StreamOrder(sizes, micro_batch), sum(sizes)
    epochs = [order(e * n, (e + 1) * n, 5).tolist() for e in range(2)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    cuts = [n, *range(n, 2 * n, 9973), n + 1, 2 * n]
    parts = [order(a, b, 5).tolist() for a, b in itertools.pairwise(sorted(cuts))]
    assert list(itertools.chain(*parts)) == epochs[1]
    assert StreamOrder(sizes, micro_batch)(n, 2 * n, 6).tolist() != epochs[1]


@pytest.mark.parametrize("degree", [1, 2, 4, 8, 64])
def test_each_stream_is_read_by_one_rank_from_front_to_back(degree: int) -> None:
    sizes, micro_batch = [173] * 1700, 4
    order, n = StreamOrder(sizes, micro_batch), sum(sizes)
    rank = np.arange(n) // micro_batch % degree
    stream, _ = order.streams(np.arange(n))
    full = n // (STREAMS * micro_batch) * STREAMS * micro_batch
    readers = {(s, r) for s, r in zip(stream[:full].tolist(), rank[:full].tolist(), strict=True)}
    assert len(readers) == STREAMS
    shards = order(0, n, 0) // 173
    own = [set(shards[:full][rank[:full] == r].tolist()) for r in range(degree)]
    assert sum(map(len, own)) <= 1700 + STREAMS, "a second reader only where streams meet"
    row = shards[stream == 0]
    for shard in set(row.tolist()):
        places = np.flatnonzero(row == shard)
        assert places[-1] - places[0] <= 2 * BLOCK, "begun and soon done with"


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_one_pass_of_several_turns_reads_each_stream_by_one_rank(degree: int) -> None:
    """The default: a turn is an eighth of the batch, a micro-batch a rank's whole share of it."""
    sizes, batch = [173] * 1700, 32
    order, n = StreamOrder(sizes, default_turn(batch)), sum(sizes)
    rank = np.arange(n) // (batch // degree) % degree
    stream, _ = order.streams(np.arange(n))
    full = n // (STREAMS * 4) * STREAMS * 4
    readers = {(s, r) for s, r in zip(stream[:full].tolist(), rank[:full].tolist(), strict=True)}
    assert len(readers) == STREAMS


def test_few_shards_are_mixed_as_well() -> None:
    """Of one shard that is sorted by 64 classes a micro-batch of 8 has several."""
    classes = StreamOrder([100_000], 8)(0, 100_000, 0).reshape(-1, 8) * 64 // 100_000
    assert np.mean([len(set(some)) for some in classes.tolist()]) > 5


def test_a_degree_that_does_not_divide_the_streams_is_one_line(tmp_path: Path) -> None:
    data = TarSamples(write(tmp_path / "s", 2, 6))
    with pytest.raises(ConfigError, match=r"degree of 3 does not divide 64; try: a degree of 2"):
        Loader(data, batch=6, micro_batch=2, seed=0, degree=3)
    Loader(data, batch=6, micro_batch=2, seed=0, degree=3, shuffle=False)


def handed_out(loaders: list[Loader], steps: int) -> list[int]:
    """Sample numbers of some steps over all ranks."""
    ids: list[int] = []
    for loader in loaders:
        for batch in itertools.islice(loader, steps):
            ids += [n for some in batch.sample_ids for n in some]
    return ids


@pytest.mark.parametrize("workers", [0, 1])
def test_once_each_over_a_resume_on_another_world(tmp_path: Path, workers: int) -> None:
    data = TarSamples(
        write(tmp_path / "s", 5, 41), decode=lambda sample: int(sample["__key__"][-6:])
    )

    def world(degree: int) -> list[Loader]:
        given: dict[str, Any] = {"batch": 16, "micro_batch": 2, "seed": 3, "workers": workers}
        return [Loader(data, rank=r, degree=degree, **given) for r in range(degree)]

    first = world(2)
    seen = handed_out(first, 5)
    state = first[0].state()
    second = world(4)
    for loader in second:
        loader.restore(state)
    seen += handed_out(second, 4)
    third = world(1)
    third[0].restore(second[3].state())
    seen += handed_out(third, 100)
    assert Counter(seen) == Counter(range(205))
    alone = handed_out(world(1), 100)
    assert sorted(alone[:80]) == sorted(seen[:80])
    values = [int(v) for batch in world(1)[0] for value in batch.values for v in value]
    assert values == alone


def test_another_micro_batch_in_mid_epoch_loses_no_sample(tmp_path: Path) -> None:
    """Of the default on other ranks, and after memory ran out: turns stay what they were."""
    data = TarSamples(write(tmp_path / "s", 5, 41), decode=lambda sample: 0)
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for degree, micro_batch, turn, steps in (
        (1, 24, 3, 2), (2, 12, 3, 1), (4, 6, 3, 2), (1, 6, 6, 1), (2, 4, 4, 1), (1, 2, 2, 100),
    ):  # fmt: skip
        loaders = [
            Loader(
                data, batch=24, micro_batch=micro_batch, turn=turn, seed=3, rank=r, degree=degree
            )
            for r in range(degree)
        ]
        for loader in loaders:
            if state is not None:
                loader.restore(state)
        seen += handed_out(loaders, steps)
        state = loaders[0].state()
        assert state["turn"] == 3, "the first start's, whatever a later one says"
    assert Counter(seen) == Counter(range(205))


def test_a_sample_is_its_files_and_no_other_bytes_are_read(tmp_path: Path) -> None:
    pattern = write(tmp_path / "s", 3, 30, 12_000)
    whole = sum(path.stat().st_size for path in tmp_path.glob("s/*.tar"))

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read()
    data = TarSamples(pattern)
    samples = [data[n] for n in range(len(data))]
    assert whole * 0.8 < read() - before <= 1.1 * whole
    assert [s["__key__"] for s in samples] == [f"a.b/{n:06}" for n in range(90)]
    assert all(s["bin"] == bytes([n % 251]) * 12_000 for n, s in enumerate(samples))
    assert samples[7].keys() == {"__key__", "bin", "cls"}


def test_what_is_no_shard_is_one_line(tmp_path: Path) -> None:
    pattern = write(tmp_path / "s", 2, 6)
    data = TarSamples(pattern)
    path = tmp_path / "s" / "s-001.tar"
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(UserError, match=r"s-001\.tar: ends \d+ bytes early; it was cut"):
        list(Loader(data, batch=12, micro_batch=12, seed=0, shuffle=False, collate=list))
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tmp_path / "s" / "s-000.tar")
    with pytest.raises(ConfigError, match=r"s-001\.tar: is no plain tar \(.*\); try: unpack it"):
        TarSamples(pattern)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"s-001\.tar: is no plain tar"):
        TarSamples(pattern)
    with tarfile.open(path, "w") as tar:
        tar.add(__file__, "a/7.py")
    with pytest.raises(ConfigError, match=r"sample a/7 has no \.cls, the class's number; try: "):
        open_shards(pattern, 8, 0.1, "data.source")


READER = """
import sys
from pathlib import Path
from shoal.data.loading.loader import Loader
from shoal.data.streams.webdataset import TarSamples

def read():
    return int(Path("/proc/self/io").read_text().split()[1])

pattern, rank, degree, position, steps = sys.argv[1], *map(int, sys.argv[2:])
began = read()
data = TarSamples(pattern)
loader = Loader(data, batch=64, micro_batch=4, seed=1, rank=rank, degree=degree, position=position, collate=len)
for number, batch in enumerate(loader, 1):
    if number == steps:
        break
print(loader.position, read() - began, flush=True)
"""


@pytest.mark.proof
def test_all_processes_together_read_the_data_once(tmp_path: Path) -> None:
    """Two ranks, then four from where they stopped, as the kernel counts what they read."""
    pattern = write(tmp_path / "s", 8, 400, 24_000)
    whole = sum(path.stat().st_size for path in tmp_path.glob("s/*.tar"))
    assert whole >= 64 * 2**20

    def world(degree: int, position: int, steps: int) -> tuple[int, int]:
        numbers = [str(n) for n in (degree, position, steps)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", READER, pattern, str(rank), *numbers],
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(degree)
        ]  # fmt: skip
        told = [[int(word) for word in one.communicate(timeout=300)[0].split()] for one in ranks]
        assert len({position for position, _ in told}) == 1
        return told[0][0], sum(count for _, count in told)

    position, first = world(2, 0, 20)
    end, second = world(4, position, 0)
    assert end == 3200
    assert whole * 0.9 < first + second <= 1.1 * whole
