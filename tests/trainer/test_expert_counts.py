"""experts.jsonl: who counts, when, and that the counts are those of the routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_small import run_of

from shoal.models.catalog import build
from shoal.models.moe import balanced_loss
from shoal.trainer.step import expert_counts

SIZES = {
    "dim": 16, "layers": 2, "heads": 2, "kv_heads": 2, "experts": 4, "hidden": 8, "top_k": 2,
}  # fmt: skip


class Tokens:
    """16 rows of 6 tokens."""

    draws_nothing = True

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.randint(0, 31, (7,), generator=torch.Generator().manual_seed(index))
        return row[:-1], row[1:]


def mixture(**more: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return build("moe", {**SIZES, **more}, vocabulary=31, sequence=6)


def hf_mixture() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=31, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=8,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "experts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def make(folder: Path, model: Any, **settings: Any) -> Any:
    settings = {"batch": 8, "micro_batch": 4, "precision": "fp32", **settings}
    return run_of(model, folder=folder, loss=balanced_loss, **settings)


@pytest.mark.parametrize("policies", [{}, {"recompute": "full"}], ids=str)
def test_each_recorded_step_counts_its_routes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policies: dict[str, Any]
) -> None:
    """Not those of a validation between, nor of a second forward pass; a resume cuts lines back."""
    monkeypatch.setattr(expert_counts, "EVERY", 3)
    run, routed = make(tmp_path, mixture(), **policies), []
    parts = [block.mixture for block in run.model.blocks]

    def train(last: int) -> None:
        while run.step_count < last:
            for batch in run.loader(Tokens()):
                run.step(batch)
                run.evaluate(Tokens())
                if run.step_count == 4:
                    run.save()
                if run.step_count == last:
                    return

    first = run.model.blocks[0].mixture.experts.register_forward_pre_hook(
        lambda part, args: routed.append(args[1]) if part.training else None
    )
    train(1)
    first.remove()
    train(7)
    assert [one["step"] for one in lines(tmp_path)] == [1, 3, 6]
    names = ["blocks.0.mixture.experts", "blocks.1.mixture.experts"]
    assert all(list(one["layers"]) == names for one in lines(tmp_path))
    assert all(sum(row) == 8 * 6 * 2 for one in lines(tmp_path) for row in one["layers"].values())
    passes = routed[::2] if policies else routed  # each runs again in its backward pass
    counts = torch.bincount(torch.cat(passes[:2]).flatten(), minlength=4)
    assert lines(tmp_path)[0]["layers"][names[0]] == counts.tolist()
    assert not parts[0].experts._forward_pre_hooks, "no hook stays"
    assert run.restore()
    train(5)
    assert [one["step"] for one in lines(tmp_path)] == [1, 3]
    train(6)
    assert [one["step"] for one in lines(tmp_path)] == [1, 3, 6]
    run.close()


def test_capacity_and_transformers(tmp_path: Path) -> None:
    """Dropped choices are nobody's; a mixture of transformers that keeps its experts in a stack."""
    run = make(tmp_path / "own", mixture(capacity=0.5), micro_batch=8)
    run.step(next(iter(run.loader(Tokens()))))
    (line,) = lines(tmp_path / "own")
    taken = [int(block.mixture.load.sum()) for block in run.model.blocks]
    assert [sum(row) for row in line["layers"].values()] == taken
    assert max(taken) < 8 * 6 * 2
    other = run_of(
        hf_mixture(), folder=tmp_path / "hf", batch=8, micro_batch=4, precision="fp32",
        loss=lambda y, t: torch.nn.functional.cross_entropy(
            y.logits.flatten(0, 1), t.flatten(), reduction="none"
        ),
    )  # fmt: skip
    other.step(next(iter(other.loader(Tokens()))))
    (line,) = lines(tmp_path / "hf")
    assert list(line["layers"]) == ["model.layers.0.mlp.experts"]
    assert sum(line["layers"]["model.layers.0.mlp.experts"]) == 8 * 6 * 2
    for one in (run, other):
        one.close()


class RoutedLayer(torch.nn.Module):
    """Experts in a list, as a loop calls them; `every`: each one gets all rows."""

    def __init__(self, every: bool) -> None:
        super().__init__()
        self.router, self.every = torch.nn.Linear(8, 4), every
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.seen = torch.zeros(4, dtype=torch.long)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        chosen, mixed = self.router(h).argmax(-1), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = torch.arange(len(h)) if self.every else torch.where(chosen == number)[0]
            self.seen[number] += len(rows)
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(h[rows]))
        return h + mixed


class Routed(torch.nn.Module):
    """Two layers of experts in lists; without a choice the lists are plain ones."""

    def __init__(self, every: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(31, 8), torch.nn.Linear(8, 31)
        self.layers = torch.nn.ModuleList(RoutedLayer(every) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens).flatten(0, 1)
        for layer in self.layers:
            h = layer(h)
        return self.head(h).view(*tokens.shape, 31)


@pytest.mark.parametrize("every", [False, True])
def test_experts_in_a_list_are_counted_and_lists_of_plain_layers_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: bool
) -> None:
    monkeypatch.setattr(expert_counts, "EVERY", 3)
    run = run_of(
        Routed(every), folder=tmp_path, batch=8, micro_batch=4, precision="fp32",
        loss=lambda y, t: torch.nn.functional.cross_entropy(
            y.flatten(0, 1), t.flatten(), reduction="none"
        ),
    )  # fmt: skip
    seen = []
    for _ in range(2):
        for batch in run.loader(Tokens()):
            before = [layer.seen.clone() for layer in run.model.layers]
            run.step(batch)
            pairs = zip(run.model.layers, before, strict=True)
            seen.append([(layer.seen - old).tolist() for layer, old in pairs])
    found = [(one["step"], list(one["layers"].values())) for one in lines(tmp_path)]
    assert found == ([] if every else [(1, seen[0]), (3, seen[2])])
    (counts,) = run.sampled.records
    assert list(counts.lists) == ([] if every else ["layers.0.experts", "layers.1.experts"])
    run.close()


def test_models_without_experts_and_runs_without_a_folder_count_nothing(tmp_path: Path) -> None:
    """A convolution is a stack by its shapes, and no experts."""
    convolution = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 1, bias=False), torch.nn.Flatten())
    run = run_of(convolution, folder=tmp_path, batch=4)
    assert run.sampled is None
    run.close()
    without = make(None, mixture())  # type: ignore[arg-type]
    assert without.sampled is None
    without.close()
