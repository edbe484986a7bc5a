"""Evaluation: sums and counts over every sample once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer_small import Rows, bits, linear, pair, run_of, squares

from shoal.base.errors import ConfigError
from shoal.data.digits import EvenSubset
from shoal.data.mixed_source import ConcatenatedParts
from shoal.models.loss import token_loss


class Labelled:
    """23 samples: no multiple of any micro-batch, so a padded tail would show."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.x = torch.randn(23, 4, generator=generator)
        self.y = torch.randint(0, 2, (23,), generator=generator)

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int):
        return self.x[index], self.y[index]


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(-1) == targets


def test_every_sample_counts_once() -> None:
    data = Labelled()
    run = run_of(linear(), loss=token_loss, batch=8, micro_batch=4)
    values = run.evaluate(data, {"accuracy": right})
    with torch.no_grad():
        outputs = run.model(data.x)
    assert values["loss"] == pytest.approx(F.cross_entropy(outputs, data.y).item(), rel=1e-6)
    assert values["accuracy"] == pytest.approx(float(right(outputs, data.y).float().mean()))
    assert values["targets"] == 23
    own = run.evaluate(DataLoader(data, 7), {"accuracy": right})
    assert own == pytest.approx(values, rel=1e-6)
    listed = run.evaluate([(data.x[:20], data.y[:20]), (data.x[20:], data.y[20:])])
    assert listed["loss"] == pytest.approx(values["loss"], rel=1e-6)


def test_evaluation_leaves_the_run_as_it_was() -> None:
    ends = []
    for looks in (False, True):
        run = run_of(linear(), batch=6, micro_batch=2)
        for batch in run.loader(Rows()):
            run.step(batch)
            if looks:
                run.evaluate(Rows(7))
                assert run.model.training
                assert torch.is_grad_enabled()
        ends.append((bits(run.model), run.feed.state))
    assert ends[0][1] == ends[1][1]
    for name, tensor in ends[0][0].items():
        assert torch.equal(tensor, ends[1][0][name])


def test_metrics_keep_the_contract_and_are_named() -> None:
    run = run_of(linear())
    with pytest.raises(ConfigError) as failure:
        run.evaluate([pair()], {"accuracy": lambda o, t: (o - t).mean()})
    assert str(failure.value).startswith("accuracy returned one number without a count: ")
    with pytest.raises(ConfigError, match="metrics hold the name loss, which the result has"):
        run.evaluate([pair()], {"loss": squares})


def test_nothing_to_evaluate_is_nan() -> None:
    values = run_of(linear()).evaluate([])
    assert values["targets"] == 0
    assert values["loss"] != values["loss"]


@pytest.mark.parametrize("call", ["evaluate", "steps"])
def test_a_collate_that_nothing_would_call_is_refused(call: str) -> None:
    """A list is one of batches; its samples went to the model one by one, in a traceback."""
    run = run_of(linear())
    with pytest.raises(ConfigError, match=rf"run\.{call}: a list is taken as batches .* collate="):
        list(getattr(run, call)([1, 2], collate=list))
    run.close()


def ce_sum(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A sum and a count, as losses of a user's own give them; `ignore` 1 is no target."""
    counted = targets[:, 0] != -100
    return ((outputs - targets)[counted] ** 2).sum(), int(counted.sum())


class Ignored(Rows):
    """Every third sample has no target."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        return x, torch.full_like(y, -100.0) if index % 3 == 1 else y


def across(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Couples the samples of a micro-batch, so that parts do not add up to the whole."""
    return ((outputs - outputs.mean(0) - targets) ** 2).sum(), len(targets)


class Listed:
    """A map-style dataset of samples in a list."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@pytest.mark.parametrize("loss", [squares, ce_sum, across], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("held", [0, 11])
def test_sources_of_a_mixture_add_up_to_the_whole(loss: Any, held: int) -> None:
    """Micro-batches of 4 end within parts of 7, 10 and 3; the whole has the same bits as a list."""
    parts = [Ignored(7), Ignored(10), Ignored(3)]
    mixed: Any = ConcatenatedParts(parts, ["text:a", "b", "text:a"])
    rows = [mixed[i] for i in range(20)]
    places = range(20)
    if held:
        mixed = EvenSubset(mixed, held, True)
        places = [mixed.whole_index(i) for i in range(held)]
        rows = [rows[i] for i in places]
    run = run_of(linear(), loss=loss, batch=8, micro_batch=4)
    values = run.evaluate(mixed)
    told = run.validated_by_source
    assert run.evaluate(Listed(rows)) == values
    assert run.validated_by_source == {}
    assert list(told) == ["text:a", "b"]
    assert sum(one["targets"] for one in told.values()) == values["targets"]
    sums = [one["loss"] * one["targets"] for one in told.values()]
    assert sum(sums) == pytest.approx(values["loss"] * values["targets"], rel=1e-12)
    if loss is not across:
        own = run.evaluate(
            Listed([row for row, at in zip(rows, places, strict=True) if 7 <= at < 17])
        )
        assert told["b"]["targets"] == own["targets"]
        assert told["b"]["loss"] == pytest.approx(own["loss"], rel=1e-6)


def test_a_source_without_targets_and_outputs_without_rows() -> None:
    parts: list[Any] = [Rows(6), [(x, torch.full_like(y, -100.0)) for x, y in Rows(3)]]
    run = run_of(linear(), loss=ce_sum, batch=8, micro_batch=4)
    run.evaluate(ConcatenatedParts(parts, ["a", "b"]))
    assert run.validated_by_source["b"] == {"loss": None, "targets": 0}
    flat = run_of(linear(), loss=ce_sum, batch=8, micro_batch=4)
    flat.evaluate(
        ConcatenatedParts([Rows(6), Rows(3)], ["a", "b"]),
        collate=lambda rows: tuple(
            torch.cat([row[at].expand(2, -1) for row in rows]) for at in (0, 1)
        ),
    )
    assert flat.validated_by_source == {}, "two rows a sample: which are whose is not known"
