"""Bad numbers never reach the weights; formats; which steps are skipped, and what is said of it."""

from __future__ import annotations

import copy
import json
import logging
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainer_small import assert_same_bits, bits, busy, linear, pair, run_of

from shoal.base.errors import ConfigError, TrainingError


def poisoned(value: float = math.nan) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = pair()
    x[5, 2] = value
    return x, y


def optimizer_bits(run) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{key}": torch.as_tensor(value).clone()
        for number, state in enumerate(run.optimizer.state.values())
        for key, value in state.items()
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_sample_moves_nothing(value: float, tmp_path: Path) -> None:
    """Weights, momentum and BatchNorm's buffers keep every bit; the next good step works."""
    run = run_of(busy(), folder=tmp_path, micro_batch=4)
    run.step(pair())
    weights, momentum = bits(run.model), optimizer_bits(run)
    result = run.step(poisoned(value))
    assert result.skipped
    assert result.reason == "non-finite loss or gradient"
    assert math.isnan(result.loss)
    assert_same_bits(bits(run.model), weights)
    assert_same_bits(optimizer_bits(run), momentum)
    assert run.step_count == 2
    assert not run.step(pair()).skipped
    assert int(run.model.layers[0][1].num_batches_tracked) == 4
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    skipped = next(e for e in events if e["event"] == "step_skipped")
    assert (skipped["step"], skipped["ranks"], skipped["in_a_row"]) == (2, [0], 1)


def test_the_event_names_micro_batches_and_samples(tmp_path: Path) -> None:
    class Rows:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int):
            x, y = pair()
            return x[index] * (math.nan if index == 3 else 1.0), y[index]

    run = run_of(linear(), folder=tmp_path, batch=8, micro_batch=2)
    for batch in run.loader(Rows()):
        run.step(batch)
    line = (tmp_path / "events.jsonl").read_text().splitlines()[-1]
    culprit = json.loads(line)["culprits"][0]
    assert culprit["micro_batches"] == [0, 1, 2, 3]
    assert 3 in [i for ids in culprit["samples"] for i in ids]


def test_gradients_may_break_where_the_loss_does_not() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sqrt(self.w).expand(len(x), 2)  # √0 is 0, its derivative infinite

    run = run_of(Root())
    result = run.step((torch.ones(4, 1), torch.zeros(4, 2)))
    assert result.skipped
    assert run.model.w.tolist() == [0.0, 0.0]


def test_a_count_that_is_no_number_skips() -> None:
    """Weights of samples may hold NaN: it breaks the count, not the sum."""
    run = run_of(linear(), loss=lambda o, t: ((o - t).sum(), torch.tensor(math.nan)))
    result = run.step(pair())
    assert result.skipped
    assert result.reason == "non-finite loss or gradient"


def test_too_many_in_a_row_end_the_run() -> None:
    run = run_of(linear(), skip_limit=3)
    run.step(pair())
    run.step(poisoned())
    run.step(poisoned())
    run.step(pair())  # a good one begins the count anew
    weights = bits(run.model)
    run.step(poisoned())
    run.step(poisoned())
    with pytest.raises(TrainingError) as failure:
        run.step(poisoned())
    assert str(failure.value) == (
        "step 7: non-finite loss or gradient on rank 0, 3 steps in a row (skip_limit); the weights "
        "are those of step 4; look at these samples, lower the optimizer's lr, or set clip"
    )
    assert failure.value.exit_code == 3
    assert_same_bits(bits(run.model), weights)


def test_a_step_without_a_valid_target_is_skipped() -> None:
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none", ignore_index=-100)

    run = run_of(linear(), loss=loss, skip_limit=2)
    batch = (torch.randn(8, 4), torch.full((8,), -100))
    weights = bits(run.model)
    result = run.step(batch)
    assert result.skipped
    assert result.reason == "the loss counted no target"
    assert result.targets == 0
    assert_same_bits(bits(run.model), weights)
    with pytest.raises(TrainingError, match="2 steps in a row .* every target is ignored"):
        run.step(batch)


def test_an_empty_share_is_a_step_without_targets() -> None:
    run = run_of(linear())
    assert run.step((torch.zeros(0, 4), torch.zeros(0, 2))).skipped


def test_bf16_keeps_fp32_weights() -> None:
    seen = []
    model = linear()
    model[0].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    run = run_of(model, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), precision="bf16")
    first = run.step(pair()).loss
    for _ in range(20):
        last = run.step(pair()).loss
    assert set(seen) == {torch.bfloat16}
    assert last < first
    assert run.plan.compute == "bf16"
    for piece in run.program.local.values():
        assert piece.parameter.dtype == torch.float32
        assert piece.parameter.grad.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, "what forward passes read"
    assert {t.dtype for t in optimizer_bits(run).values()} == {torch.float32}
    assert torch.isfinite(torch.tensor(run.evaluate([pair()])["loss"]))
    assert model(pair()[0]).dtype == torch.bfloat16, "outside of a step the model works as well"
    kept = [piece.parameter.detach().clone() for piece in run.program.local.values()]
    told = list(run.model.state_dict().values())
    assert {t.dtype for t in told} == {torch.float32}, "the masters, not their narrow copies"
    for tensor, master in zip(told, kept, strict=True):
        assert torch.equal(tensor, master)
    run.close()
    for parameter, master in zip(model.parameters(), kept, strict=True):
        assert torch.equal(parameter, master), (
            "a closed run leaves the weights as wide as they came"
        )


def test_fp64_takes_batches_as_they_are() -> None:
    run = run_of(linear(), precision="fp64")
    run.step(pair())
    assert {p.dtype for p in run.model.parameters()} == {torch.float64}


def test_a_precision_that_is_not_built() -> None:
    with pytest.raises(ConfigError) as failure:
        run_of(linear(), precision="fp23")
    assert str(failure.value) == (
        "precision = fp23: not one of auto, fp64, fp32, bf16, fp16; try: fp32"
    )


def test_halves_of_a_step_in_the_wrong_order() -> None:
    run = run_of(linear())
    with pytest.raises(ConfigError, match=r"^run.update was called before run.forward_backward"):
        run.update()
    run.forward_backward(pair())
    with pytest.raises(ConfigError, match="was called twice without run.update between"):
        run.forward_backward(pair())
    run.update()


def test_a_failed_step_leaves_no_trace(tmp_path: Path) -> None:
    """After an error the same step can be taken again: no half statistics, no half gradients."""
    fails = {"at": 1}

    def loss(outputs, targets):
        fails["at"] -= 1
        if fails["at"] == -1:
            raise ValueError("by chance")
        return (outputs - targets) ** 2

    model, twin = busy(), copy.deepcopy(busy())
    run, other = run_of(model, loss=loss, micro_batch=4), run_of(twin, micro_batch=4)
    with pytest.raises(ValueError, match="by chance"):
        run.step(pair())
    run.step(pair())
    other.step(pair())
    assert_same_bits(bits(model), bits(twin))


def shown(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    """The lines of the terminal with a word."""
    return [one for one in map(logging.LogRecord.getMessage, caplog.records) if word in one]


def test_the_first_skip_and_their_number_are_on_the_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A loop of one's own displays no events: a run of NaN looked like a good one."""
    run = run_of(linear())
    for batch in (pair(), poisoned(), pair(), poisoned(), pair()):
        run.step(batch)
    run.close()
    assert shown(caplog, "skipped") == [
        "shoal: step 2 skipped, the weights did not move: non-finite loss or gradient on rank 0; "
        "later ones are counted at the end",
        "shoal: 2 of 5 steps skipped",
    ]


def test_a_run_that_moved_nothing_ends_with_that_line(caplog: pytest.LogCaptureFixture) -> None:
    run = run_of(linear())
    run.step(poisoned())
    with pytest.raises(TrainingError, match="steps 1 – 1: all were skipped: .*; no weight moved; "):
        run.close()
    assert shown(caplog, "skipped")[1:] == ["shoal: 1 of 1 steps skipped: no weight moved"]


def test_samples_of_a_skip_are_one_list_and_a_good_run_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = run_of(linear(), batch=8, micro_batch=4, loss=lambda o, t: (o - t) ** 2 * math.nan)
    (batch,) = run.loader([tuple(one) for one in zip(*pair(), strict=True)])
    run.step(batch)
    (line,) = shown(caplog, "skipped")
    assert "on rank 0, micro-batches 0–1, samples " in line
    assert "[" not in line
    caplog.clear()
    run = run_of(linear())
    run.step(pair())
    run.close()
    assert shown(caplog, "step") == []
