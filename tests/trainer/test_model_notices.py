"""BatchNorm under the default micro-batch, and auxiliary losses that the default loss drops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from trainer_small import Rows, pair, run_of

from shoal.models.loss import token_loss
from shoal.trainer.model_notices import auxiliary_loss_lines
from shoal.trainer.recorder import Recorder

LINE = (
    "model: 1 is a BatchNorm, whose statistics are those of a micro-batch: 2 samples by default, of "
    "the 16 that a rank has in a step; try: micro_batch=16 (train.micro_batch), or GroupNorm"
)


def with_norm(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 2))


class Wide(nn.Module):
    """A norm over images in the place of one over rows."""

    def __init__(self, norm: nn.Module, dims: int) -> None:
        super().__init__()
        self.norm, self.dims = norm, dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(
            x.reshape(*x.shape, *[1] * self.dims).expand(-1, -1, *[2] * self.dims)
        ).mean(dim=tuple(range(2, 2 + self.dims)))


def lines(
    monkeypatch: pytest.MonkeyPatch, model: Any, own: bool = False, **given: Any
) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(Recorder, "notice", lambda recorder, text: told.append(text))
    run = run_of(model, batch=16, **given)
    for part in run.model.modules():
        if getattr(part, "frozen", False):
            part.eval()
    for batch in [pair(16)] if own else run.loader(Rows(32)):
        run.step(batch)
    run.close()
    return told


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(8),
        Wide(nn.BatchNorm2d(8), 2),
        Wide(nn.BatchNorm3d(8), 3),
        nn.SyncBatchNorm(8),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_the_default_micro_batch_is_told_once(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = lines(monkeypatch, with_norm(norm))
    assert (
        LINE.replace("model: 1", "model: 1.norm" if isinstance(norm, Wide) else "model: 1") in line
    )


def eval_norm(**how: Any) -> nn.Module:
    norm = nn.BatchNorm1d(8, **how)
    norm.frozen = True  # type: ignore[assignment]
    return norm


@pytest.mark.parametrize(
    ("norm", "how"),
    [
        (nn.BatchNorm1d(8), {"micro_batch": 2}),
        (nn.BatchNorm1d(8), {"micro_batch": 16}),
        (nn.BatchNorm1d(8), {"own": True}),
        (eval_norm(), {}),
        (nn.LayerNorm(8), {}),
        (nn.GroupNorm(2, 8), {}),
        (Wide(nn.InstanceNorm2d(8, affine=True, track_running_stats=True), 2), {}),
    ],
    ids=str,
)
def test_what_changes_nothing_gets_no_line(
    norm: Any, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not lines(monkeypatch, with_norm(norm), **how)


def test_a_frozen_norm_without_running_statistics_still_takes_a_batchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (line,) = lines(monkeypatch, with_norm(eval_norm(track_running_stats=False)))
    assert LINE in line


def by_command(run: Any, *overrides: str) -> list[str]:
    folder, _ = run(
        "model.build=my_norms:build", "data.source=my_norms:data", "train.steps=1", *overrides
    )
    return [
        line for line in (folder / "events.jsonl").read_text().splitlines() if "BatchNorm" in line
    ]


NORMS = """
import torch
from torch import nn
def build(): return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
def data(): return [(torch.randn(4), torch.tensor(i % 3)) for i in range(32)]
"""


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["train.batch=16"], 1),
        (["train.batch=16", "train.micro_batch=2"], 0),
        (["train.batch=16", "train.accumulate=4"], 0),
    ],
    ids=str,
)
def test_by_command_only_what_nobody_chose_is_told(
    run: Any, tmp_path: Any, overrides: list[str], told: int
) -> None:
    (tmp_path / "my_norms.py").write_text(NORMS)
    assert len(by_command(run, *overrides)) == told


def mixture(**changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    config = transformers.MixtralConfig(**sizes, **heads, num_local_experts=4, **changes)
    return transformers.MixtralForCausalLM(config)


def test_an_auxiliary_loss_that_is_dropped_is_told() -> None:
    (line,) = auxiliary_loss_lines(mixture(router_aux_loss_coef=0.5), token_loss)
    assert line.startswith("model: router_aux_loss_coef = 0.5 of its configuration adds nothing: ")
    assert "try: output_router_logits=True" in line
    (line,) = auxiliary_loss_lines(nn.Sequential(mixture(router_aux_loss_coef=0.5)), token_loss)
    assert "router_aux_loss_coef = 0.5" in line


def test_own_loops_hear_of_it_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(24).view(3, 8)
    told: list[str] = []
    monkeypatch.setattr(Recorder, "notice", lambda recorder, text: told.append(text))
    run = run_of(mixture(router_aux_loss_coef=0.5), None, token_loss)
    run.step((ids, ids.flip(1)))
    assert len([line for line in told if "router_aux_loss_coef = 0.5" in line]) == 1


def test_who_adds_it_or_has_none_gets_no_line() -> None:
    def own(outputs: Any, targets: torch.Tensor) -> Any:
        total, count = token_loss(outputs, targets)
        return total + 0.5 * outputs.aux_loss * count, count

    assert not auxiliary_loss_lines(mixture(router_aux_loss_coef=0.5), own)
    assert not auxiliary_loss_lines(mixture(router_aux_loss_coef=0.0), token_loss)
    assert not auxiliary_loss_lines(nn.Linear(2, 2), token_loss)
