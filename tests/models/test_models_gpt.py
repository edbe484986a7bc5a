"""GPT and ViT compute what their formulas say: causal or not, learnt positions, fused qkv."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.base.errors import ConfigError
from shoal.models.catalog import build
from shoal.models.generate import generate
from shoal.models.gpt import GPT
from shoal.models.loss import token_loss
from shoal.models.vit import ViT


def small(**changes: object) -> GPT:
    torch.manual_seed(3)
    arguments = {"dim": 32, "layers": 2, "heads": 4, "vocabulary": 50, **changes}
    model = build("gpt", arguments, sequence=64)
    assert isinstance(model, GPT)
    return model.double()


def images(**changes: object) -> ViT:
    torch.manual_seed(3)
    model = build("vit", {"dim": 32, "layers": 2, "classes": 5, **changes})
    assert isinstance(model, ViT)
    return model.double()


def block_by_formula(block: nn.Module, h: Tensor, heads: int, causal: bool) -> Tensor:
    """A block written out: heads one by one, a mask, a softmax."""
    state = dict(block.named_parameters())
    dim, seq = h.shape[-1], h.shape[1]
    x = F.layer_norm(h, (dim,), state["attention_norm.weight"], state["attention_norm.bias"], 1e-5)
    qkv = x @ state["attention.qkv.weight"].T + state["attention.qkv.bias"]
    width, outputs = dim // heads, []
    for head in range(heads):
        q, k, v = (qkv[..., n * dim + head * width :][..., :width] for n in range(3))
        scores = q @ k.transpose(1, 2) / math.sqrt(width)
        if causal:
            scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
        outputs.append(scores.softmax(-1) @ v)
    h = h + torch.cat(outputs, -1) @ state["attention.out.weight"].T + state["attention.out.bias"]
    x = F.layer_norm(h, (dim,), state["mlp_norm.weight"], state["mlp_norm.bias"], 1e-5)
    u = x @ state["mlp.up.weight"].T + state["mlp.up.bias"]
    u = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    return h + u @ state["mlp.down.weight"].T + state["mlp.down.bias"]


def disturb(model: nn.Module) -> None:
    """Biases and norms away from 0 and 1, where they would hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def test_gpt_is_its_formula() -> None:
    model = small()
    disturb(model)
    tokens = torch.randint(50, (2, 9))
    h = model.embedding.weight[tokens] + model.positions.weight[:9]
    for block in model.blocks:
        h = block_by_formula(block, h, 4, causal=True)
    h = F.layer_norm(h, (32,), model.norm.weight, model.norm.bias, 1e-5)
    logits = h @ model.embedding.weight.T
    torch.testing.assert_close(model(tokens).logits(), logits, rtol=0, atol=1e-12)


def test_vit_is_its_formula() -> None:
    model = images(image_channels=3, image_size=6, norm_epsilon=1e-5)
    disturb(model)
    batch = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    cut = [
        batch[:, :, row : row + 2, column : column + 2].flatten(1)
        for row in range(0, 6, 2)
        for column in range(0, 6, 2)
    ]
    h = torch.stack(cut, 1) @ model.patches.weight.flatten(1).T + model.patches.bias
    token = model.class_token.weight.expand(2, 1, -1)
    h = torch.cat((token, h), 1) + model.positions.weight
    for block in model.blocks:
        h = block_by_formula(block, h, 4, causal=False)
    h = F.layer_norm(h[:, 0], (32,), model.norm.weight, model.norm.bias, 1e-5)
    logits = h @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(batch), logits, rtol=0, atol=1e-12)


def test_initial_weights() -> None:
    for model in (small(dim=128, layers=8, tied=False), images(dim=128, layers=8, patch=4)):
        for name, weight in model.state_dict().items():
            if name.endswith("bias"):
                assert not weight.any(), name
            elif "norm" in name:
                assert (weight == 1).all(), name
            else:
                writes_to_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
                expected = 0.02 / 4 if writes_to_stream else 0.02
                if name == "patches.weight":
                    expected = 1 / math.sqrt(16)
                spread = 0.05 if weight.numel() > 2000 else 0.2
                assert float(weight.std()) == pytest.approx(expected, rel=spread), name


def test_first_losses_are_those_of_a_guess() -> None:
    tokens = torch.randint(50, (4, 33))
    total, count = token_loss(small()(tokens[:, :-1]), tokens[:, 1:])
    assert float(total.detach() / count) == pytest.approx(math.log(50), rel=0.02)
    labels = torch.arange(40) % 5
    total, count = token_loss(images()(torch.randn(40, 1, 8, 8, dtype=torch.float64)), labels)
    assert float(total.detach() / count) == pytest.approx(math.log(5), rel=0.05)


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_learns_with_finite_gradients_everywhere(name: str) -> None:
    model: nn.Module = (small if name == "gpt" else images)(dropout=0.1)
    tokens = torch.randint(50, (4, 33))
    batch = (tokens[:, :-1], tokens[:, 1:])
    if name == "vit":
        batch = (torch.randn(20, 1, 8, 8, dtype=torch.float64), torch.arange(20) % 5)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(12):
        total, count = token_loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        (total / count).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert all(p.grad.any() for p in model.parameters())
        optimizer.step()
        losses.append(float(total.detach() / count))
    assert losses[-1] < losses[0] - 0.3


def test_every_leaf_can_draw_its_weights_again() -> None:
    for model in (small(layers=8), images(layers=8)):
        disturb(model)
        drawn = {id(p) for m in model.modules() if hasattr(m, "reset_parameters")
                 for p in m.parameters(recurse=False)}  # fmt: skip
        assert drawn == {id(p) for p in model.parameters()}
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        narrow = model.state_dict()["blocks.0.mlp.down.weight"]
        assert float(narrow.std()) == pytest.approx(0.02 / 4, rel=0.1)
        assert not list(model.buffers())  # nothing that meta-device initialisation could forget


def test_wrong_shapes_get_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        small()(torch.zeros(1, 65, dtype=torch.int64))
    assert str(caught.value) == (
        "data.sequence = 65: longer than model.sequence 64; set model.sequence=65"
    )
    with pytest.raises(ConfigError) as caught:
        images()(torch.zeros(1, 3, 32, 32, dtype=torch.float64))
    assert str(caught.value) == (
        "model.image_size = 8: the data's samples are [3, 32, 32], not [1, 8, 8]; try: "
        "model.image_size=32 model.image_channels=3"
    )
    with pytest.raises(ConfigError, match="square images are needed"):
        images()(torch.zeros(1, 1, 8, 9, dtype=torch.float64))


def test_generates() -> None:
    model = small()
    model.eval()
    longer = generate(model, torch.randint(50, (2, 5)), 3, 0.0, window=64)
    assert torch.equal(longer[:, 7], model(longer[:, :7]).logits()[:, -1].argmax(-1))
