"""Llama computes what its formulas say: causal, grouped, rotary, tied, repeatable."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.base.errors import ConfigError
from shoal.models import attention
from shoal.models.attention import causal_attention
from shoal.models.catalog import build
from shoal.models.generate import generate
from shoal.models.llama import Llama, apply_rotary, rotary_table
from shoal.models.loss import token_loss
from shoal.models.norm import RMSNorm


def small(**changes: object) -> Llama:
    torch.manual_seed(3)
    arguments = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": 50, **changes}
    model = build("llama", arguments, sequence=64)
    assert isinstance(model, Llama)
    return model.double()


def qkv(seq: int, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seq)
    shapes = [(2, n, seq, 8) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with key/value heads repeated, one matrix product and a mask."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    seq = q.shape[2]
    future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("seq", [1, 7, 128, 300])
@pytest.mark.parametrize("flash", [False, True])
def test_attention_is_the_formula(seq: int, flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if flash:
        monkeypatch.setattr(attention, "FLASH_FROM", 0)
    given = qkv(seq)
    ours, theirs = causal_attention(*given), by_formula(*given)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    upstream = torch.randn(ours.shape, dtype=torch.float64)
    for mine, other in zip(
        torch.autograd.grad(ours, given, upstream),
        torch.autograd.grad(theirs, given, upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_bf16_uses_larger_blocks_and_agrees() -> None:
    q, k, v = (x.detach() for x in qkv(700))
    ours = causal_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    torch.testing.assert_close(ours.double(), by_formula(q, k, v), rtol=0, atol=0.05)


def test_attention_dropout_drops_whole_weights() -> None:
    q, k, _ = (x.detach() for x in qkv(200))
    ones = torch.ones_like(k)
    torch.manual_seed(0)
    sums = causal_attention(q, k, ones, dropout=0.5)[..., 0]
    assert 0.9 < float(sums.mean()) < 1.1
    assert float(sums.std()) > 0.01


def test_rms_norm_gradients() -> None:
    norm = RMSNorm(6, 1e-5).double()
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    expected = F.rms_norm(x, (6,), norm.weight, 1e-5)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-13)
    assert torch.autograd.gradcheck(norm, (x,))
    upstream = torch.randn(2, 3, 6, dtype=torch.float64)
    for mine, other in zip(
        torch.autograd.grad(norm(x), (x, norm.weight), upstream),
        torch.autograd.grad(expected, (x, norm.weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_rms_norm_backward_inside_autocast_stays_exact() -> None:
    norm, x = RMSNorm(64, 1e-5), torch.randn(5, 64, requires_grad=True)
    outside = torch.autograd.grad(norm(x).square().sum(), (x, norm.weight))
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(norm(x).square().sum(), (x, norm.weight))
    for a, b in zip(outside, inside, strict=True):
        assert torch.equal(a, b)


def test_rotary_scores_depend_on_distance_only() -> None:
    like = torch.zeros((), dtype=torch.float64)
    cos, sin = rotary_table(20, 8, 10000.0, like)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 20, 1, 8)
    scores = apply_rotary(q, cos, sin)[0, :, 0] @ apply_rotary(k, cos, sin)[0, :, 0].T
    for distance in (-5, 0, 3):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-12)
    assert float((scores.diagonal(3)[0] - scores.diagonal(0)[0]).abs()) > 1e-3
    torch.testing.assert_close(apply_rotary(q, cos, sin).norm(dim=-1), q.norm(dim=-1))


def test_rotary_table_is_exact_in_bf16_positions() -> None:
    exact, _ = rotary_table(512, 8, 10000.0, torch.zeros((), dtype=torch.float64))
    rounded, _ = rotary_table(512, 8, 10000.0, torch.zeros((), dtype=torch.bfloat16))
    torch.testing.assert_close(rounded.double(), exact, rtol=0, atol=2**-8)


def test_the_future_does_not_matter() -> None:
    model = small()
    tokens = torch.randint(50, (2, 40))
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % 50
    before, after = model(tokens).hidden, model(changed).hidden
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=0, atol=1e-13)
    assert not torch.allclose(before[:, 25], after[:, 25])


def test_grouped_heads_equal_repeated_ones() -> None:
    grouped, full = small(), small(kv_heads=4)
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("attention.k.weight", "attention.v.weight")):
            state[name] = state[name].view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32)
    full.load_state_dict(state)
    tokens = torch.randint(50, (2, 17))
    torch.testing.assert_close(grouped(tokens).logits(), full(tokens).logits(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_head_shares_storage(tied: bool) -> None:
    model = small(tied=tied)
    same = model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert same is tied
    assert not model.head.weight.is_meta
    assert ("head.weight" in dict(model.named_parameters())) is not tied


def test_initial_weights() -> None:
    model = small(dim=128, layers=8, tied=False)
    for name, weight in model.state_dict().items():
        if weight.dim() == 2:
            writes_to_stream = name.endswith(("attention.o.weight", "mlp.down.weight"))
            expected = 0.02 / 4 if writes_to_stream else 0.02
            assert float(weight.std()) == pytest.approx(expected, rel=0.05), name
    tokens = torch.randint(50, (2, 16))
    with torch.no_grad():
        total, count = token_loss(model(tokens), tokens.roll(-1, 1))
    assert float(total / count) == pytest.approx(math.log(50), rel=0.05)


def test_every_leaf_can_draw_its_weights_again() -> None:
    model = small(layers=8)
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    assert float(model.state_dict()["blocks.0.mlp.down.weight"].std()) == pytest.approx(
        0.02 / 4, rel=0.1
    )
    assert not list(model.buffers())  # nothing that meta-device initialisation could forget


def test_dropout_repeats_under_a_seed_and_rests_in_eval() -> None:
    model, tokens = small(dropout=0.2), torch.randint(50, (2, 16))

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        hidden: Tensor = model(tokens).hidden
        return hidden

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    model.eval()
    assert torch.equal(run(1), run(2))


def learn(model: Llama, loss: Tensor, lr: float) -> None:
    weights = list(model.parameters())
    with torch.no_grad():
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.sub_(gradient, alpha=lr)


def test_learns_and_bf16_follows_fp32() -> None:
    tokens = torch.randint(50, (4, 33), generator=torch.Generator().manual_seed(0))
    losses: dict[bool, list[float]] = {}
    for half in (False, True):
        model = small().float()
        losses[half] = []
        for _ in range(8):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                total, count = token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            learn(model, total / count, 1.0)
            losses[half].append(float(total.detach() / count))
    assert losses[False][-1] < losses[False][0] - 0.3
    assert losses[True] == pytest.approx(losses[False], rel=0.02)


def test_too_many_tokens() -> None:
    with pytest.raises(ConfigError) as caught:
        small()(torch.zeros(1, 65, dtype=torch.int64))
    assert str(caught.value) == (
        "data.sequence = 65: longer than model.sequence 64; set model.sequence=65"
    )


def test_generating_leaves_every_part_in_its_mode() -> None:
    model = small(dropout=0.5).train()
    model.blocks[0].eval()
    modes = [part.training for part in model.modules()]
    generate(model, torch.zeros(1, 2, dtype=torch.int64), 1, 0.0)
    assert [part.training for part in model.modules()] == modes


def test_generate() -> None:
    model, prompt = small(dropout=0.5), torch.randint(50, (2, 5))
    likeliest = generate(model, prompt, 3, 0.0, window=64)
    assert model.training
    assert likeliest.shape == (2, 8)
    assert torch.equal(likeliest[:, :5], prompt)
    model.eval()
    expected = model(likeliest[:, :7]).logits()[:, -1].argmax(-1)
    assert torch.equal(likeliest[:, 7], expected)
    texts = [
        generate(model, prompt, 70, 1.0, torch.Generator().manual_seed(s), window=8)
        for s in (1, 1, 2)
    ]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
