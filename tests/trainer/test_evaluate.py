"""Evaluation: sums and counts over every sample once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer_small import Rows, bits, linear, pair, run_of, squares

from shoal.base.errors import ConfigError
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
    assert str(failure.value).startswith("accuracy returned a mean: ")
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
