"""The chunked loss gives the numbers of plain cross-entropy and never holds all logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.base.errors import ConfigError
from shoal.models.loss import Unprojected, default_chunk_rows, linear_cross_entropy, token_loss

ROWS, DIM, VOCABULARY = 11, 6, 13


def inputs(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight (both want gradients) and targets, of which every third is ignored."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, DIM, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCABULARY, DIM, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCABULARY, (rows,), generator=generator)
    targets[::3] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("chunk_rows", [1, 4, 11, 64, None])
def test_equals_plain_cross_entropy(chunk_rows: int | None) -> None:
    hidden, weight, targets = inputs()
    expected = plain(hidden, weight, targets)
    total, count = linear_cross_entropy(hidden, weight, targets, chunk_rows=chunk_rows)
    assert count.dtype == torch.int64
    assert int(count) == int((targets != -100).sum())
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-12)
    ours = torch.autograd.grad(total, (hidden, weight))
    theirs = torch.autograd.grad(expected, (hidden, weight))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_gradcheck() -> None:
    hidden, weight, targets = inputs(rows=5)

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, targets, chunk_rows=2)[0]

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_upstream_scales_and_a_second_backward_is_right() -> None:
    hidden, weight, targets = inputs()
    total, _ = linear_cross_entropy(hidden, weight, targets, chunk_rows=4)
    once = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    tripled = torch.autograd.grad(3 * total, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(total, (hidden, weight))
    for a, b, c in zip(once, tripled, again, strict=True):
        torch.testing.assert_close(3 * a, b)
        assert torch.equal(a, c)


def test_upstream_one_copies_nothing() -> None:
    """`.grad` is the very buffer that the forward pass filled."""
    hidden, weight, targets = inputs()
    total, _ = linear_cross_entropy(hidden, weight, targets)
    node: Any = total.grad_fn
    made = [saved.data_ptr() for saved in node.saved_tensors]
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert [hidden.grad.data_ptr(), weight.grad.data_ptr()] == made


@pytest.mark.parametrize("train", [True, False])
def test_never_holds_all_logits(train: bool) -> None:
    rows, vocabulary, chunk = 512, 64, 16
    hidden = torch.randn(rows, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,))
    with Largest() as seen, torch.set_grad_enabled(train):
        total, _ = linear_cross_entropy(hidden, weight, targets, chunk_rows=chunk)
        if train:
            (total * 0.5).backward()
    assert seen.elements == rows * 8  # hidden's own gradient is the largest; logits are 8 × that
    with Largest() as control:
        plain(hidden, weight, targets)
    assert control.elements == rows * vocabulary


def test_default_chunk_is_small() -> None:
    assert default_chunk_rows(2048, "cpu") * 2048 * 4 == 8 * 2**20
    assert default_chunk_rows(10**6, "cpu") == 256


def test_stable_for_huge_logits() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    total, _ = linear_cross_entropy(hidden, weight, torch.tensor([1, 2]))
    expected = plain(hidden, weight, torch.tensor([1, 2]))
    torch.testing.assert_close(total, expected)
    total.backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


def test_autocast_bf16() -> None:
    hidden, weight, targets = inputs(torch.float32)
    exact = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = linear_cross_entropy(hidden, weight, targets, chunk_rows=4)
        ours = torch.autograd.grad(total, (hidden, weight))
    assert total.dtype == torch.float32
    for mine, other in zip(ours, exact, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05)
    assert not torch.equal(ours[0], exact[0])  # the products were bf16 indeed


def test_autocast_leaves_fp64_alone() -> None:
    hidden, weight, targets = inputs()
    exact = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = linear_cross_entropy(hidden, weight, targets, chunk_rows=4)
        ours = torch.autograd.grad(total, (hidden, weight))
    for mine, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_autocast_fp16_makes_gradients_in_fp32() -> None:
    """An fp16 product would flush these gradients to zero before any loss scaling could help."""
    hidden = torch.full((1, 4), 1e-9, requires_grad=True)
    weight = torch.zeros(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        total, _ = linear_cross_entropy(hidden, weight, torch.tensor([0]))
    total.backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[1], torch.full((4,), 5e-10), rtol=1e-6, atol=0)


def test_bf16_weights_and_hidden() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    total, _ = linear_cross_entropy(hidden, weight, targets, chunk_rows=4)
    total.backward()
    assert total.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_frozen_weight_and_frozen_hidden() -> None:
    hidden, weight, targets = inputs()
    expected = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))
    total, _ = linear_cross_entropy(hidden, weight.detach(), targets)
    torch.testing.assert_close(torch.autograd.grad(total, hidden)[0], expected[0])
    total, _ = linear_cross_entropy(hidden.detach(), weight, targets)
    torch.testing.assert_close(torch.autograd.grad(total, weight)[0], expected[1])


def test_tied_weight_gets_both_gradients() -> None:
    _, weight, targets = inputs()
    tokens = torch.arange(ROWS) % VOCABULARY
    total, _ = linear_cross_entropy(F.embedding(tokens, weight), weight, targets)
    expected = plain(F.embedding(tokens, weight), weight, targets)
    torch.testing.assert_close(
        torch.autograd.grad(total, weight)[0], torch.autograd.grad(expected, weight)[0]
    )


def test_all_ignored_and_no_rows() -> None:
    hidden, weight, targets = inputs()
    total, count = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    assert float(total.detach()) == 0
    assert int(count) == 0
    assert not any(g.any() for g in torch.autograd.grad(total, (hidden, weight)))
    total, count = linear_cross_entropy(hidden[:0], weight, targets[:0])
    assert float(total.detach()) == 0
    assert int(count) == 0
    assert not torch.autograd.grad(total, weight)[0].any()


def test_ignored_rows_do_not_poison() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        hidden[0] = torch.nan
    total, _ = linear_cross_entropy(hidden, weight, targets)
    assert bool(total.isfinite())


def test_another_ignore_index() -> None:
    hidden, weight, targets = inputs()
    padded = targets.masked_fill(targets == -100, 0)
    total, count = linear_cross_entropy(hidden, weight, padded, ignore_index=0)
    expected = F.cross_entropy(hidden @ weight.T, padded, ignore_index=0, reduction="sum")
    torch.testing.assert_close(total, expected)
    assert int(count) == int((padded != 0).sum())


def test_meta_device() -> None:
    total, _ = linear_cross_entropy(
        torch.empty(4, 8, device="meta"),
        torch.empty(16, 8, device="meta"),
        torch.zeros(4, dtype=torch.int64, device="meta"),
    )
    assert total.shape == ()


@pytest.mark.parametrize("wrong", [VOCABULARY, -1])
def test_target_outside_the_vocabulary(wrong: int) -> None:
    hidden, weight, targets = inputs()
    targets[1] = wrong
    for outputs in (Unprojected(hidden, weight), hidden @ weight.T):
        with pytest.raises(ConfigError) as caught:
            token_loss(outputs, targets)
        assert str(caught.value) == (
            f"targets hold {wrong}: outside the model's vocabulary of 13 (0 … 12); "
            f"set model.vocabulary, or model.classes, to what the data need"
        )


def test_token_loss_takes_every_kind_of_output() -> None:
    hidden, weight, targets = inputs()
    unprojected = Unprojected(hidden.view(1, ROWS, DIM), weight)
    logits = unprojected.logits()
    expected = plain(hidden, weight, targets)
    count = int((targets != -100).sum())
    for outputs in (unprojected, logits, {"logits": logits}, SimpleNamespace(logits=logits)):
        total, counted = token_loss(outputs, targets.view(1, ROWS))
        torch.testing.assert_close(total, expected)
        assert int(counted) == count
    image_logits = torch.randn(3, 10, dtype=torch.bfloat16)
    total, counted = token_loss(image_logits, torch.tensor([1, 2, 3], dtype=torch.int32))
    assert total.dtype == torch.float32
    assert int(counted) == 3


def test_token_loss_says_what_it_needs() -> None:
    with pytest.raises(ConfigError) as caught:
        token_loss(torch.randn(4, 10), torch.randn(4, 10))
    assert str(caught.value) == (
        "model.loss: the default loss needs integer targets of shape [4] for this model's outputs, "
        "got float32 [4, 10]; give model.loss=pkg.mod:function"
    )
    with pytest.raises(ConfigError) as caught:
        token_loss([1, 2], torch.tensor([1]))
    assert str(caught.value) == (
        "model.loss: the default loss reads a tensor or `.logits`, the model returned list; "
        "give model.loss=pkg.mod:function"
    )


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_bf16_logits_on_a_cpu_give_the_numbers_of_plain_cross_entropy(scale: float) -> None:
    """Loss, gradient and the gradient of a gradient; ignored targets, all of them too."""
    generator = torch.Generator().manual_seed(7)
    for ignored in (0, 3, ROWS):
        values = torch.randn(ROWS, VOCABULARY, generator=generator).bfloat16()
        targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
        targets[:ignored] = -100
        ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
        total, count = token_loss(ours, targets)
        wanted = F.cross_entropy(theirs.float(), targets, reduction="sum")
        assert (total.dtype, int(count)) == (torch.float32, ROWS - ignored)
        torch.testing.assert_close(total, wanted, rtol=1e-6, atol=1e-6)
        (mine,) = torch.autograd.grad(scale * total, ours, retain_graph=True)
        (other,) = torch.autograd.grad(scale * wanted, theirs, retain_graph=True)
        torch.testing.assert_close(mine, other, rtol=2**-7, atol=1e-6)
        (first,) = torch.autograd.grad(scale * total, ours, create_graph=True)
        (second,) = torch.autograd.grad(scale * wanted, theirs, create_graph=True)
        (mine,) = torch.autograd.grad(first.float().square().sum(), ours)
        (other,) = torch.autograd.grad(second.float().square().sum(), theirs)
        torch.testing.assert_close(mine, other, rtol=2**-6, atol=1e-5)


def test_a_wrong_target_of_bf16_logits_is_named() -> None:
    logits = torch.zeros(3, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ConfigError, match=str(VOCABULARY)):
        token_loss(logits, torch.tensor([0, VOCABULARY, 1]))
