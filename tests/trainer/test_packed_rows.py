"""Packed rows: loss and gradients of examples alone; models that mix documents are refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shoal.base.errors import ConfigError
from shoal.base.opaque_ops import opaque_ops
from shoal.config.sections import DataSection
from shoal.data.sources import open_source
from shoal.models.catalog import build
from shoal.models.loss import token_loss
from shoal.trainer.packed_rows import check_packing

SEQUENCE = 64
SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}  # fmt: skip


def ours(name: str) -> nn.Module:
    arguments = {"dim": 32, "layers": 2, **({"balance": 0.0} if name == "moe" else {})}
    return build(name, arguments, vocabulary=300, sequence=SEQUENCE)


def foreign(kind: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**settings)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


MODELS = {
    "llama": lambda: ours("llama"),
    "gpt": lambda: ours("gpt"),
    "moe": lambda: ours("moe"),
    "hf llama": lambda: foreign("Llama", **SMALL),
    "hf mistral, a window of 6": lambda: foreign("Mistral", sliding_window=6, **SMALL),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The same examples packed, and one to a row."""
    folder = tmp_path_factory.mktemp("examples")
    rows = [{"prompt": f"say {n}: " * (n % 5), "completion": f"{7**n}"} for n in range(1, 16)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"source": f"jsonl:{folder}/a.jsonl", "tokenizer": "bpe:300", "validation": "0"}
    return [
        open_source(DataSection(packing=packing, sequence=SEQUENCE, **given), 0).train
        for packing in ("on", "off")
    ]


def sums(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int, list[torch.Tensor]]:
    inputs, targets = batch
    outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    total, count = token_loss(outputs, targets)
    total.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return total.detach(), int(count), grads


@pytest.mark.parametrize("as_one", [False, True], ids=["blocks", "one operation"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_unpacked(both: list[Any], name: str, as_one: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    packed, alone = (torch.utils.data.default_collate(list(rows)) for rows in both)
    assert len(packed[1]) < len(alone[1]) / 2
    if as_one:
        with opaque_ops():
            total, count, grads = sums(model, packed)
    else:
        total, count, grads = sums(model, packed)
    wanted, number, others = sums(model, alone)
    assert count == number > 50
    assert abs(total - wanted) <= 1e-12 * abs(wanted)
    norm = torch.stack([g.norm() for g in others]).norm()
    for grad, other in zip(grads, others, strict=True):
        assert (grad - other).norm() <= 1e-12 * norm


def test_without_position_ids_they_differ(both: list[Any]) -> None:
    """The comparison sees a mask that is missing."""
    torch.manual_seed(0)
    model = ours("llama").double()
    inputs, targets = torch.utils.data.default_collate(list(both[0]))
    alone = torch.utils.data.default_collate(list(both[1]))
    total, wanted = sums(model, (inputs["input_ids"], targets))[0], sums(model, alone)[0]
    assert abs(total - wanted) > 1e-6 * abs(wanted)


@pytest.mark.parametrize("name", MODELS)
def test_models_that_keep_documents_apart(name: str) -> None:
    model = MODELS[name]().train()
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    check_packing(model, name, SEQUENCE)
    check_packing(model, name, 3)
    assert model.training
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


class Plain(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


class Running(nn.Module):
    """Takes position ids, and adds up over the whole row all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 8)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids).cumsum(1)


class Counting(Running):
    """Keeps tokens apart, and looks at their places in the row."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids) * torch.arange(input_ids.shape[1])[:, None]


class Failing(Running):
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


SEES = "tokens of one document change what another one gives"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Plain, "its forward takes no input_ids and no position_ids"),
        (Running, SEES),
        (Counting, "a document gives other values behind another one than alone"),
        (Failing, "it fails on one (ValueError: no)"),
        (lambda: foreign("Bloom", vocab_size=300, hidden_size=32, n_layer=1, n_head=4), SEES),
        (lambda: foreign("OPT", vocab_size=300, hidden_size=32, ffn_dim=32, num_hidden_layers=1,
                         num_attention_heads=4, word_embed_proj_dim=32), SEES),
    ],
)  # fmt: skip
def test_models_that_mix_documents_are_refused(make: Any, why: str) -> None:
    model = make()
    with pytest.raises(ConfigError) as caught:
        check_packing(model, "mine", SEQUENCE)
    assert str(caught.value) == (
        f"data.packing = on: mine ({type(model).__name__}) cannot keep documents of a packed row "
        f"apart: {why}; try: data.packing=off"
    )
