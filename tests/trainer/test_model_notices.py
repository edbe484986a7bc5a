"""BatchNorm under the default micro-batch, and auxiliary losses that the default loss drops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from trainer_small import Rows, pair, run_of

from shoal.models.loss import token_loss
from shoal.trainer.autotune import share_fits, trial_passes
from shoal.trainer.guards.reports.model_notices import auxiliary_loss_lines
from shoal.trainer.metrics_recorder import MetricsRecorder

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
    """What is said of a model whose share is not seen to fit: it then has micro-batches of 2."""
    told: list[str] = []
    monkeypatch.setattr(share_fits, "is_small_share", lambda *_: False)
    monkeypatch.setattr(share_fits, "copy_to_meta", uncopied)
    monkeypatch.setattr(trial_passes, "run_trial_passes", lambda *_: None)
    monkeypatch.setattr(MetricsRecorder, "notice", lambda recorder, text: told.append(text))
    run = run_of(model, batch=16, **given)
    for part in run.model.modules():
        if getattr(part, "frozen", False):
            part.eval()
    for batch in [pair(16)] if own else run.loader(Rows(32)):
        run.step(batch)
    run.close()
    return [line for line in told if not line.startswith("micro-batch: 2 samples, an eighth")]


def uncopied(module: nn.Module) -> nn.Module:
    raise TypeError("not this one")


def test_a_share_that_is_one_pass_gets_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(MetricsRecorder, "notice", lambda recorder, text: told.append(text))
    run = run_of(with_norm(nn.BatchNorm1d(8)), batch=16)
    for batch in run.loader(Rows(32)):
        assert len(batch) == 1
        run.step(batch)
    run.close()
    assert not told


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(8),
        pytest.param(Wide(nn.BatchNorm2d(8), 2), marks=pytest.mark.proof("faults")),
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
        pytest.param(nn.BatchNorm1d(8), {"micro_batch": 16}, marks=pytest.mark.proof("faults")),
        (nn.BatchNorm1d(8), {"own": True}),
        (eval_norm(), {}),
        pytest.param(nn.LayerNorm(8), {}, marks=pytest.mark.proof("faults")),
        (nn.GroupNorm(2, 8), {}),
        (Wide(nn.InstanceNorm2d(8, affine=True), 2), {}),
        (Wide(nn.InstanceNorm2d(8, track_running_stats=True), 2), {"micro_batch": 2}),
        pytest.param(
            Wide(nn.InstanceNorm2d(8, track_running_stats=True), 2),
            {"own": True},
            marks=pytest.mark.proof("faults"),
        ),
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


@pytest.mark.parametrize("dims", [1, pytest.param(3, marks=pytest.mark.proof("faults"))])
def test_running_statistics_of_instance_norm_move_with_every_micro_batch(
    dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the default micro-batch its running mean was 0.77 away from the plain script's."""
    kind = {1: nn.InstanceNorm1d, 3: nn.InstanceNorm3d}[dims]
    (line,) = lines(monkeypatch, with_norm(Wide(kind(8, track_running_stats=True), dims)))
    assert line.startswith(
        "model: 1.norm is an InstanceNorm with running statistics, which move with every "
        "micro-batch: 8 times a step by default; try: micro_batch=16 (train.micro_batch)"
    )


def by_command(run: Any, *overrides: str, data: str) -> list[str]:
    folder, _ = run(
        "model.build=my_norms:build", f"data.source=my_norms:{data}", "train.steps=1", *overrides
    )
    return [
        line for line in (folder / "events.jsonl").read_text().splitlines() if "BatchNorm" in line
    ]


NORMS = """
import os
import torch
from torch import nn
def build(): return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
def data(): return [(torch.randn(4), torch.tensor(i % 3)) for i in range(32)]
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(data())
def stream(): return Stream()
HERE = os.getpid()
class Alone(torch.utils.data.IterableDataset):
    def __iter__(self):
        if os.getpid() != HERE:
            raise RuntimeError("read elsewhere")
        return iter(data())
def alone(): return Alone()
"""


@pytest.mark.parametrize(
    ("data", "overrides", "told"),
    [
        ("data", ["train.batch=16"], 0),  # one pass
        ("stream", ["train.batch=16"], 0),  # of which a copy of the process takes some
        ("alone", ["train.batch=16"], 1),  # of which no sample can be looked at: an eighth
        ("stream", ["train.batch=16", "train.micro_batch=2"], 0),
        pytest.param(
            *("stream", ["train.batch=16", "train.accumulate=4"], 0),
            marks=pytest.mark.proof("faults"),
        ),
    ],
    ids=str,
)
def test_by_command_only_what_nobody_chose_is_told(
    run: Any, tmp_path: Any, data: str, overrides: list[str], told: int
) -> None:
    (tmp_path / "my_norms.py").write_text(NORMS)
    assert len(by_command(run, *overrides, data=data)) == told


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
    monkeypatch.setattr(MetricsRecorder, "notice", lambda recorder, text: told.append(text))
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


def tiny(kind: str, **changes: Any) -> nn.Module:
    """A mixture of transformers, as small as its configuration allows."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "d_model": 16,
             "num_local_experts": 4, "moe_intermediate_size": 8, "num_layers": 1, "num_heads": 2,
             "shared_expert_intermediate_size": 8, "num_experts_per_tok": 2, "d_kv": 8, "d_ff": 8,
             "n_heads": 2, "n_layers": 1, "max_seq_len": 16, "num_decoder_layers": 1}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")
    known = config().to_dict()
    given = {key: value for key, value in {**sizes, **changes}.items() if key in known}
    model = {"SwitchTransformers": "ForConditionalGeneration"}.get(kind, "ForCausalLM")
    with torch.device("meta"):
        return getattr(transformers, kind + model)(config(**given))


@pytest.mark.proof("faults")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Qwen2Moe", "router_aux_loss_coef = 0.001"),
        ("Olmoe", "router_aux_loss_coef = 0.01"),
        ("Phimoe", "router_aux_loss_coef = 0.001"),
        ("GraniteMoe", "router_aux_loss_coef = 0.001"),
        ("JetMoe", "aux_loss_coef = 0.01"),
        ("SwitchTransformers", "router_z_loss_coef = 0.001"),
        ("Dbrx", "moe_loss_weight = 0.01"),
    ],
)
def test_other_mixtures_of_transformers(kind: str, said: str) -> None:
    more = {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2}} if kind == "Dbrx" else {}
    (line,) = auxiliary_loss_lines(tiny(kind, **more), token_loss)
    assert said in line
    assert "adds nothing" in line


def test_keys_of_a_configuration_may_be_numbers() -> None:
    """Aria's are: its model ended in a traceback."""

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"queries": {1225: 128}, "router_aux_loss_coef": 0.1, "num_experts": 4}

    model = nn.Linear(2, 2)
    model.config = Config()  # type: ignore[assignment]
    (line,) = auxiliary_loss_lines(model, token_loss)
    assert "router_aux_loss_coef = 0.1" in line


class WithAuxiliary(nn.Module):
    """A mixture of the user's own, which returns its balance loss beside the logits."""

    def __init__(self, form: str, cut: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.cut = form, cut
        self.embed, self.router, self.head = nn.Embedding(8, 6), nn.Linear(6, 3), nn.Linear(6, 8)

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.embed(ids)
        balance = self.router(hidden).softmax(-1).mean((0, 1)).square().sum()
        logits = self.head(hidden) + self.router(hidden).sum()
        balance = balance.detach() if self.cut else balance
        if self.form == "dict":
            return {"logits": logits, "aux_loss": balance, "loss": None}
        return SimpleNamespace(logits=logits, router_z_loss=balance, count=balance.detach())


@pytest.mark.parametrize(
    ("form", "cut", "named"),
    [("dict", False, "aux_loss"), ("object", False, "router_z_loss"), ("dict", True, "")],
)
def test_a_loss_of_the_models_own_that_the_default_loss_drops(
    form: str, cut: bool, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(MetricsRecorder, "notice", lambda recorder, text: told.append(text))
    run = run_of(WithAuxiliary(form, cut), None, token_loss)
    ids = torch.arange(24).view(3, 8) % 8
    for _ in range(2):
        run.step((ids, ids.flip(1)))
    found = [line for line in told if "adds nothing" in line]
    assert len(found) == bool(named)
    assert all(f"its outputs hold {named}, a loss with a gradient" in line for line in found)
