"""`shoal plan --explain`: one row per parameter, for every kind of layout, from the model itself."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.base.errors import PlanError
from shoal.base.layouts.layout import Layout
from shoal.cli import main
from shoal.cli.plan_explain import data_parallel_shard, explain_model, requested_layout
from shoal.cli.plan_subject import resolve_subject
from shoal.config.load import load_config
from shoal.data import sources
from shoal.data.files.documents import stdlib_documents

SMALL = ["model.dim=32", "model.layers=3", "data.source=synthetic", "data.sequence=12"]


def rows(*words: str) -> dict[str, dict[str, object]]:
    loaded = load_config(None, [*SMALL, *words])
    explained = explain_model(loaded.config, requested_layout(loaded, "")).record()
    return {row["name"]: row for row in explained["parameters"]}


def test_layers_over_two_ranks() -> None:
    found = rows("layout.tp=2", "layout.sequence_parallel=off", "model.tied=false")
    up, down = found["blocks.1.mlp.up.weight"], found["blocks.1.mlp.down.weight"]
    half = up["shape"][0] // 2  # type: ignore[index]
    assert up["shard"] == f"rows 0:{half} of {2 * half}"
    assert down["shard"] == f"columns 0:{half} of {2 * half}"
    assert (up["collective"], down["collective"]) == (
        "all_reduce of its input's gradient", "all_reduce of its product",
    )  # fmt: skip
    assert up["axis"] == down["axis"] == "tp"
    norm = found["blocks.1.mlp_norm.weight"]
    assert (norm["axis"], norm["shard"]) == ("", "whole")
    assert norm["reason"], "whoever stays whole is told why"
    assert all(row["axis"] or row["reason"] for row in found.values())


def test_axes_together() -> None:
    found = rows("layout.tp=2", "layout.dp_shard=2", "layout.pp=3", "layout.schedule=gpipe")
    up = found["blocks.2.mlp.up.weight"]
    assert up["axis"] == "tp, dp_shard"
    assert " of these rows 0:" in str(up["shard"])
    assert "all_gather before use" in str(up["collective"])
    assert up["stage"] == (2,)
    assert found["blocks.0.mlp.up.weight"]["stage"] == (0,)
    tied = found["embedding.weight"]
    assert tied["stage"] == (0, 2)
    assert "gradients of stages 0, 2 summed" in str(tied["collective"])


def test_messages_of_a_bf16_residual_stream_are_half() -> None:
    """Those of blocks; the embedding's, the last norm's and the loss's stay fp32."""
    words = [*SMALL, "layout.tp=2", "precision.compute=bf16"]
    sent = []
    for residual in ("fp32", "bf16"):
        loaded = load_config(None, [*words, f"precision.residual={residual}"])
        explained = explain_model(loaded.config, Layout(tp=2))
        sent.append({(one.name, one.kind, one.when): one for one in explained.exchanges})
    assert sent[0].keys() == sent[1].keys()
    for at, wide in sent[0].items():
        ratio = wide.payload_bytes / sent[1][at].payload_bytes
        assert ratio == (2 if at[0].startswith("blocks.") else 1), at
    assert any(owner.startswith("blocks.") for owner, _, _ in sent[0])


@pytest.mark.parametrize(
    ("layout", "axis", "shard", "said"),
    [
        (Layout(), "", "whole", ""),
        (Layout(dp_replicate=2), "", "whole", "all_reduce of its gradient over dp_replicate"),
        (Layout(dp_shard=2, zero=1), "", "whole", "all_gather of its new values over dp_shard"),
        (Layout(dp_shard=3, zero=3), "dp_shard", "rows 0:3 of 8", "all_gather before use"),
        (Layout(dp_shard=2, dp_replicate=2, zero=3), "dp_shard", "rows 0:4 of 8",
         "over dp_shard, all_reduce of its gradient over dp_replicate"),
    ],
)  # fmt: skip
def test_what_data_parallel_axes_do(layout: Layout, axis: str, shard: str, said: str) -> None:
    held = data_parallel_shard(layout, (8, 4))
    assert (held.axis, held.shard) == (axis, shard)
    assert said in held.collective


@functools.cache
def printed(*more: str) -> str:
    """What the command prints of a model under fsdp."""
    words = ["plan", "--explain", *SMALL, "layout.strategy=fsdp", "launch.processes=2"]
    done = CliRunner().invoke(main.app, [*words, *more])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command() -> None:
    record = json.loads(printed("--json"))
    assert record["layout"] == "fsdp (dp_shard = 2)"
    assert all(row["axis"] == "dp_shard" for row in record["parameters"])
    shown = printed()
    assert "blocks.0–2.attention.q.weight" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert len(shown.splitlines()) <= 40


def test_the_layout_is_the_runs() -> None:
    def layout(*words: str, on: str = "") -> Layout:
        return requested_layout(load_config(None, [*SMALL, *words]), on)

    assert layout("layout.tp=2", "layout.pp=2").processes == 4
    assert layout("layout.strategy=3d", on="8xH100-80GB").processes == 8
    assert layout("layout.strategy=dp").threads == 2
    with pytest.raises(PlanError, match="try: layout.dp_replicate=2"):
        layout("layout.tp=2", "launch.processes=4")
    with pytest.raises(PlanError, match="more stages than the 3 blocks"):
        rows("layout.pp=4")


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(PlanError, match="matches no parameter"):
        rows("layout.tp=2", "layout.split=*.upp.weight=whole")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ["model.name=llama", "model.dim=32", "model.layers=3"], marks=pytest.mark.proof
        ),
        ["model.name=gpt", "model.dim=32", "model.layers=2"],
        ["model.name=moe", "model.dim=32", "model.layers=2"],
        ["model.name=resnet", "data.source=digits"],
        ["model.build=in_turns:build", "model.loss=in_turns:loss", "data.source=digits"],
    ],
    ids=lambda words: words[0],
)
def test_flops_by_module_are_the_plans(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sum, to the last one, of our own models and of one that is traced."""
    (tmp_path / "in_turns.py").write_text(IN_TURNS)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = ["data.source=synthetic", "data.sequence=12", "launch.processes=2"]
    loaded = load_config(None, [*given, "layout.strategy=ddp", *words])
    explained = explain_model(loaded.config, Layout(dp_replicate=2))
    planned = resolve_subject(loaded, "").case.model.forward_flops
    assert sum(row.flops for row in explained.flops) == pytest.approx(planned, rel=1e-12)
    assert list(explained.flops) == sorted(explained.flops, key=lambda row: -row.flops)
    if "in_turns" in words[0]:
        # 64 → 48 → 48 → 10: the inner layer three times, its weight once more by a function.
        counted = {row.kind: (row.modules, row.flops) for row in explained.flops}
        assert counted == {
            "Linear": (3, 2.0 * (64 * 48 + 3 * 48 * 48 + 48 * 10)),
            "Turns": (1, 2.0 * 48 * 48),
        }
        looking = load_config(None, [*given, *words, "model.looks=true"])
        assert explain_model(looking.config, Layout(dp_replicate=2)).flops == explained.flops


@pytest.mark.parametrize("words", [[], ["data.sequence=16"]], ids=["open", "given"])
def test_a_model_of_ones_own_is_planned_on_rows_that_are_named(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = stdlib_documents()[:30]  # tokenizing all of them takes 6 s
    monkeypatch.setattr(sources, "stdlib_documents", lambda: few)
    (tmp_path / "ids.py").write_text(
        "from torch import nn\n\n\ndef build():\n"
        "    return nn.Sequential(nn.Embedding(2048, 8), nn.Linear(8, 2048))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load_config(None, ["launch.processes=1", "model.build=ids:build", *words])
    notes = resolve_subject(loaded, "1xRTX4090-24GB").notes
    line = "data.source and data.sequence not given: text rows of 128 tokens"
    assert (line in notes) == (not words)


IN_TURNS = """
import torch
from torch import nn
from torch.nn import functional as F

class Turns(nn.Module):
    def __init__(self, looks):
        super().__init__()
        self.looks = looks
        self.inner, self.parts = nn.Linear(48, 48), nn.ModuleList([nn.Linear(64, 48), nn.Linear(48, 10)])
    def forward(self, images):
        if self.looks and images.sum() > 1e9:  # needs values: no twin without data can say
            return images
        hidden = self.parts[0](images.flatten(1))
        for _ in range(3):
            hidden = self.inner(hidden)
        return self.parts[1](F.linear(hidden, self.inner.weight))

def build(looks=False):
    return Turns(looks)

def loss(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")
"""


def test_the_table_ends_with_the_sum() -> None:
    lines = printed().splitlines()
    start = lines.index("a forward pass of one sample, products and attention, by module:")
    kinds = [line.split()[0] for line in lines[start + 1 : start + 5]]
    assert kinds == ["loss", "Projection", "Attention", "in"]
    assert lines[start + 4].endswith("100.0%")
