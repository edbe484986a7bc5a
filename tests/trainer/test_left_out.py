"""A sample that no try can read is left out of its step, named, and counted, up to a cap."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_small import Rows, linear, run_of

from proof_rows import chosen
from shoal.base.errors import ClusterError
from shoal.data.loading import read_retries
from shoal.data.loading.read_retries import UnreadableSample
from shoal.data.loading.step_samples import StepBatch
from shoal.trainer.step.rank_share import choose_spare_micro_batch, count_passes
from shoal.view.diagnose import diagnose
from shoal.view.summary import summarise_run


class Torn(Rows):
    """Some samples lie where the disk is damaged; `again`: those that a second try reads."""

    def __init__(self, torn: tuple[int, ...] = (), again: tuple[int, ...] = ()) -> None:
        super().__init__(16)
        self.torn, self.again = torn, set(again)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index in self.torn or index in self.again:
            self.again.discard(index)
            raise OSError(errno.EIO, "Input/output error", f"part-{index}.bin")
        return super().__getitem__(index)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_retries, "PAUSES_S", (0.001, 0.001, 0.001))


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [one for one in found if one["event"] == name]


def weights(run: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in run.model.parameters()]


@pytest.mark.parametrize(
    ("workers", "micro_batch"), chosen([(0, 1), (0, 2), (2, 1), (2, 2)], [(0, 1), (2, 2)])
)
def test_the_mean_is_over_the_others(tmp_path: Path, workers: int, micro_batch: int) -> None:
    """The step's weights are those of a step over exactly the samples that could be read."""
    run = run_of(linear(), folder=tmp_path, batch=8, micro_batch=micro_batch, seed=3)
    batch = next(iter(run.loader(Torn((2, 9)), workers=workers)))
    ids = [index for ids in batch.sample_ids for index in ids]
    lost = [one.sample for one in batch.left_out]
    assert sorted(ids + lost) == sorted(set(ids + lost)), "each once"
    assert len(ids) + len(lost) == 8
    assert set(lost) == {2, 9} - set(next_ids(16, 8, 3)[8:])
    sizes = [len(value[0]) for value in batch.values]
    assert sizes == [len(own) for own in batch.sample_ids]
    assert min(sizes) > 0
    result = run.step(batch)

    rows = Rows(16)
    other = run_of(linear(), batch=len(ids), seed=3)
    expected = other.step((rows.inputs[ids], rows.targets[ids]))
    assert result.targets == expected.targets == 2 * len(ids)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    for here, there in zip(weights(run), weights(other), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-7)
    told = events(tmp_path, "sample_left_out")
    assert [one["sample"] for one in told] == lost
    assert all(f"part-{one['sample']}.bin" in one["error"] for one in told)


class TornStream:
    """The same rows, which can only be read from front to back."""

    def __init__(self, torn: tuple[int, ...]) -> None:
        self.rows, self.next = Torn(torn), 0

    def __iter__(self) -> Any:
        while self.next < len(self.rows):
            self.next += 1
            yield self.rows[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_goes_on_behind_it(tmp_path: Path, workers: int) -> None:
    run = run_of(linear(), folder=tmp_path, batch=8, micro_batch=2, seed=3)
    batches = iter(run.loader(TornStream((2, 9)), workers=workers))
    run.step(next(batches))
    run.step(next(batches))
    kept = [[n for n in span if n not in (2, 9)] for span in (range(8), range(8, 16))]
    rows, other = Rows(16), run_of(linear(), batch=7, seed=3)
    for ids in kept:
        other.step((rows.inputs[ids], rows.targets[ids]))
    for here, there in zip(weights(run), weights(other), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-7)
    told = events(tmp_path, "sample_left_out")
    assert [(one["sample"], one["step"]) for one in told] == [(2, 1), (9, 2)]
    assert run.skips.lost == 2


def next_ids(samples: int, count: int, seed: int) -> list[int]:
    from shoal.data.loading.sample_order import samples_at

    return samples_at(0, samples, samples, seed, shuffle=True)[1].tolist()


def test_a_run_that_goes_on_counts_on_and_stops_past_the_cap(tmp_path: Path) -> None:
    """Saved after one loss, restored: the same weights as unbroken, and the cap is the run's."""
    order = next_ids(16, 16, 3)
    torn = (order[1], order[9], order[12])  # steps 1, 3 and 4
    settings: dict[str, Any] = {"batch": 4, "micro_batch": 2, "seed": 3, "unreadable": 2}
    whole = run_of(linear(), folder=tmp_path / "whole", **settings)
    steps = iter(whole.loader(Torn(torn)))
    for _ in range(3):
        whole.step(next(steps))
    assert whole.skips.lost == 2

    folder = tmp_path / "broken"
    first = run_of(linear(), folder=folder, **settings)
    loader = iter(first.loader(Torn(torn)))
    first.step(next(loader))
    first.step(next(loader))
    first.save()
    again = run_of(linear(), folder=folder, **settings)
    assert again.restore()
    assert again.skips.lost == 1
    loader = iter(again.loader(Torn(torn)))
    again.step(next(loader))
    for here, there in zip(weights(again), weights(whole), strict=True):
        assert torch.equal(here, there)
    with pytest.raises(ClusterError) as caught:
        again.step(next(loader))
    line = str(caught.value)
    assert "\n" not in line
    assert f"part-{order[12]}.bin" in line
    assert "3 samples" in line
    assert "; 3 samples of this run could not be read, unreadable = 2 may be left out" in line

    found = diagnose(folder)
    assert [one.kind for one in found] == ["sample_left_out"] * 3
    assert "part-" in found[0].what
    assert "3 samples that could not be read" in summarise_run(folder, 200)


def test_none_is_left_out_where_none_may_be(tmp_path: Path) -> None:
    run = run_of(linear(), folder=tmp_path, batch=8, micro_batch=2, seed=3, unreadable=0)
    with pytest.raises(ClusterError, match=r"sample 2 .*part-2\.bin"):
        list(run.steps(Torn((2,))))
    assert run.skips.lost == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_second_try_is_told_and_loses_nothing(tmp_path: Path, workers: int) -> None:
    run = run_of(linear(), folder=tmp_path, batch=8, micro_batch=2, seed=3)
    list(run.steps(Torn((), again=(2, 3, 4)), workers=workers))
    clean = run_of(linear(), batch=8, micro_batch=2, seed=3)
    list(clean.steps(Torn()))
    for here, there in zip(weights(run), weights(clean), strict=True):
        assert torch.equal(here, there)
    told = [one["text"] for one in events(tmp_path, "notice") if "is tried again" in one["text"]]
    assert len(told) == 2, "the first and the second; the third is not"
    assert "part-" in told[0]
    assert {one.kind for one in diagnose(tmp_path)} == {"loader"}


def test_a_rank_that_has_nothing_to_join_with_says_so() -> None:
    """Under fsdp, in a run's first step: it must pass as often as others, and has no sample."""
    lost = UnreadableSample(7, 2, 0, 5, "OSError: gone", left_out=True)
    batch = StepBatch((), 0, 8, 4, 0, (), left_out=(lost,))
    layout = SimpleNamespace(zero=3)
    program: Any = SimpleNamespace(
        data=SimpleNamespace(size=2, rank=1), together=True, plan=SimpleNamespace(layout=layout)
    )
    rounds, fewest = count_passes(program, batch, 0)
    with pytest.raises(ClusterError, match="sample 7 .* gone; rank 1 has no other sample yet"):
        choose_spare_micro_batch(program, batch, None, None, rounds, fewest)
    assert choose_spare_micro_batch(program, batch, None, "kept", rounds, fewest) == "kept"


def test_the_first_loss_and_their_number_are_on_the_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order = next_ids(16, 16, 3)
    settings: dict[str, Any] = {"batch": 4, "micro_batch": 2, "seed": 3, "unreadable": 2}
    run = run_of(linear(), **settings)
    for batch in run.loader(Torn((order[1], order[9]))):
        run.step(batch)
    run.close()
    first, last = [m for m in (r.getMessage() for r in caplog.records) if "could not be read" in m]
    assert first.startswith(f"shoal: step 1: sample {order[1]} (epoch 0, position ")
    assert first.endswith("; later ones are counted at the end")
    assert last == "shoal: 2 samples that could not be read were left out"
