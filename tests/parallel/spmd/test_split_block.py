"""A split layer is the layer: outputs, buffers and every gradient, and the collectives it names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from blocks import MLP, GPTBlock, PerHead, Residual
from threads import counts, difference, perturb, simulate, whole_pass
from torch import nn

from proof_rows import chosen, rows
from shoal.base.errors import PlanError
from shoal.models.llama import Llama
from shoal.parallel.spmd import autograd_collectives
from shoal.parallel.spmd.labelling.labels import WHOLE, Split
from shoal.parallel.spmd.labelling.operation_terms import IndivisibleSequence
from shoal.parallel.spmd.split_block import split_block, split_for_inputs
from shoal.trace.graph.layer_graph import UntraceableLayer

EXACT = 1e-12
LLAMA_PAIRS = {"all_reduce forward": 2, "all_reduce backward": 2}
SEQUENCE_PAIRS = {
    "all_gather forward": 2,
    "reduce_scatter backward": 2,
    "reduce_scatter forward": 2,
    "all_gather backward": 2,
}


def sample(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def llama(heads: int = 4, kv_heads: int = 2, dropout: float = 0.0, dim: int = 32) -> nn.Module:
    torch.manual_seed(0)
    model = Llama(
        vocabulary=50, dim=dim, layers=1, heads=heads, kv_heads=kv_heads, hidden=2 * dim,
        sequence=16, dropout=dropout,
    )  # fmt: skip
    block = model.blocks[0].double()
    perturb(block)
    return block


def gpt(layout: str = "split", dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    block = GPTBlock(layout, dropout=dropout).double()
    perturb(block)
    return block


# ---- our Llama


@pytest.mark.parametrize(
    ("kv_heads", "degree", "sequence_dim"),
    rows([(4, 2, 1), (2, 4), (None, 1)], kept=[(4, 2, None), (2, 4, 1)]),
)
def test_llama(kv_heads: int, degree: int, sequence_dim: int | None) -> None:
    block, x = llama(kv_heads=kv_heads), sample(3, 12, 32)
    split = split_block(block, (x,), {}, degree, sequence_dim=sequence_dim)
    assert difference(split, block, (x,)) < EXACT
    assert counts(split) == (LLAMA_PAIRS if sequence_dim is None else SEQUENCE_PAIRS)
    names = {"attention.q.weight": Split(0), "attention.o.weight": Split(1)}
    names |= {"mlp.gate.weight": Split(0), "mlp.up.weight": Split(0), "mlp.down.weight": Split(1)}
    shared = {"attention.k.weight", "attention.v.weight"}
    if kv_heads % degree == 0:
        names |= dict.fromkeys(shared, Split(0))
        shared = set()
    norms = set() if sequence_dim is None else {"attention_norm.weight", "mlp_norm.weight"}
    assert split.parameters == names
    assert split.partial == shared | norms
    assert not split.gathered


def test_llama_counts_are_what_the_axis_counts() -> None:
    block, x = llama(), sample(3, 12, 32)
    for sequence_dim in (None, 1):
        split = split_block(block, (x,), {}, 2, sequence_dim=sequence_dim)
        for one in simulate(split, block, (x,), {}):
            for kind in ("all_reduce", "all_gather", "reduce_scatter"):
                told = [e.payload_bytes for e in split.exchanges if e.kind == kind]
                assert one.axis.counts[kind] == len(told)
                assert one.axis.payload_bytes[kind] == sum(told)


@pytest.mark.parametrize("degree", [3, pytest.param(6, marks=pytest.mark.proof), 8])
def test_other_degrees(degree: int) -> None:
    block, x = llama(heads=6, kv_heads=2, dim=48), sample(3, 12, 48)
    split = split_block(block, (x,), {}, degree)
    assert difference(split, block, (x,)) < EXACT
    assert {"mlp.gate.weight", "mlp.up.weight", "mlp.down.weight"} <= set(split.parameters)
    assert counts(split) == LLAMA_PAIRS


def test_what_stays_whole_has_a_reason() -> None:
    block, x = llama(), sample(3, 12, 32)
    split = split_block(block, (x,), {}, 4)
    assert split.reasons["attention.q.weight"] == "column: dim 0"
    assert split.reasons["attention.o.weight"] == "row: dim 1"
    assert split.reasons["attention.k.weight"].startswith("whole: ")
    assert (
        "needs all of a split value [3×12×2×8] on every rank" in split.reasons["attention.k.weight"]
    )
    assert set(split.reasons) == {name for name, _ in block.named_parameters()}


# ---- fused q, k, v; biases; torch's own layer; a user's modules


WAYS = ("interleaved", "chunked", "split", "sliced", "permuted")


@pytest.mark.parametrize(
    ("layout", "degree", "sequence_dim"),
    rows(
        [WAYS, (2, 3), (None, 1)],
        kept=[
            ("interleaved", 2, 1),
            ("chunked", 3, None),
            ("split", 2, None),
            ("sliced", 3, None),
            ("permuted", 2, None),
        ],
    ),
)
def test_fused_weights(layout: str, degree: int, sequence_dim: int | None) -> None:
    block, x = gpt(layout), sample(2, 12, 48)
    split = split_block(block, (x,), {}, degree, sequence_dim=sequence_dim)
    assert difference(split, block, (x,)) < EXACT
    assert split.parameters["qkv.weight"] == Split(0, 1 if layout == "interleaved" else 3)
    assert split.parameters["qkv.bias"] == split.parameters["qkv.weight"]
    assert counts(split) == (LLAMA_PAIRS if sequence_dim is None else SEQUENCE_PAIRS)
    assert {"out.bias", "down.bias"} <= split.partial


def encoder(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True).double()
    perturb(block)
    return block


@pytest.mark.parametrize("sequence_dim", [pytest.param(None, marks=pytest.mark.proof), 1])
def test_torch_encoder_layer(sequence_dim: int | None) -> None:
    block, x = encoder(), sample(3, 12, 32)
    split = split_block(block, (x,), {}, 4, sequence_dim=sequence_dim)
    assert difference(split, block, (x,)) < EXACT
    assert split.parameters["self_attn.in_proj_weight"] == Split(0, 3)
    assert counts(split) == (LLAMA_PAIRS if sequence_dim is None else SEQUENCE_PAIRS)


def test_a_users_mlp() -> None:
    block, x = MLP().double(), sample(5, 48)
    perturb(block)
    split = split_block(block, (x,), {}, 3)
    assert difference(split, block, (x,)) < EXACT
    assert counts(split) == {"all_reduce forward": 1, "all_reduce backward": 1}


def test_parameters_that_are_used_by_hand() -> None:
    """x @ W.T, exp of a vector beside a split value, a scalar, two results."""
    torch.manual_seed(0)
    block, x = PerHead().double(), sample(3, 12, 48)
    perturb(block)
    split = split_block(block, (x,), {}, 2)
    assert difference(split, block, (x,)) < EXACT
    assert split.parameters == {"inner": Split(0), "scale": Split(0), "outer": Split(1)}


@pytest.mark.parametrize("training", [True, False])
def test_convolutions_and_batch_norm(training: bool) -> None:
    """Per channel; running statistics end up equal and whole on every rank."""
    torch.manual_seed(0)
    block, x = Residual().double().train(training), sample(3, 8, 6, 6)
    perturb(block)
    split = split_block(block, (x,), {}, 2)
    assert difference(split, block, (x,)) < EXACT
    assert split.parameters == {
        "conv1.weight": Split(0), "norm1.weight": Split(0), "norm1.bias": Split(0),
        "conv2.weight": Split(1),
    }  # fmt: skip


class Nothing(nn.Module):
    """A product that nothing can follow in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


def test_nothing_to_split_is_no_error() -> None:
    block, x = Nothing().double(), sample(3, 16)
    split = split_block(block, (x,), {}, 2)
    assert not split.parameters
    assert not split.exchanges
    assert "layer_norm needs all" in split.reasons["inner.weight"]
    assert difference(split, block, (x,)) < EXACT


class Overwrites(nn.Module):
    """Changes its own input: a rank's part of it would be another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        y.mul_(h)
        return self.outer(y)


def test_an_input_that_is_overwritten_stays_whole() -> None:
    block, x, y = Overwrites().double(), sample(3, 8), sample(3, 16).detach()
    split = split_block(block, (x, y), {}, 2)
    assert difference(split, block, (x, y)) < EXACT
    assert not split.parameters
    split = split_block(block, (x, y), {}, 2, overrides={"inner.weight": "column"})
    assert difference(split, block, (x, y)) < EXACT
    assert len(split.gathered) == 1


class Scales(nn.Module):
    """Changes its own input by a small one, and only splits what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP(dim=16, hidden=32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layers(y.mul_(x))


def test_an_input_that_would_be_overwritten_in_a_copy_is_told() -> None:
    """Its gradient is cheapest summed at `x`, so that `y` would become another tensor there."""
    with pytest.raises(UntraceableLayer, match="changes in place what others read, too"):
        split_block(Scales().double(), (sample(3, 1), sample(3, 16).detach()), {}, 2)


# ---- dropout


@pytest.mark.parametrize(
    ("make", "degree", "sequence_dim"),
    rows([(llama, encoder), (2, 4), (None, 1)], kept=[(llama, 4, 1), (encoder, 2, None)]),
)
def test_dropout_draws_the_masks_of_one_process(
    make, degree: int, sequence_dim: int | None
) -> None:
    """Residual and attention dropout, grouped heads on a grid, transposed memory."""
    block, x = make(dropout=0.3), sample(3, 12, 32)
    split = split_block(block, (x,), {}, degree, sequence_dim=sequence_dim)
    assert difference(split, block, (x,)) < EXACT


def test_dropout_differs_by_draw() -> None:
    block, x = gpt(dropout=0.3), sample(2, 12, 48)
    split = split_block(block, (x,), {}, 2)
    assert difference(split, block, (x,), seed=11) < EXACT
    one, other = (whole_pass(split, block, (x,), {}, seed)[0] for seed in (11, 12))
    assert not torch.equal(one.outputs[0], other.outputs[0])


# ---- other inputs, the user's word, refusals


@pytest.mark.parametrize(
    ("dropout", "kv_heads", "sequence_dim"),
    chosen(
        [(0.2, 2, None), (0.2, 2, 1), (0.0, 4, None), (0.0, 4, 1)],
        kept=[(0.2, 2, 1), (0.0, 4, None)],
    ),
)
def test_again_for_other_shapes_and_evaluation(
    dropout: float, kv_heads: int, sequence_dim: int | None
) -> None:
    block = llama(kv_heads=kv_heads, dropout=dropout)
    split = split_block(block, (sample(3, 12, 32),), {}, 4, sequence_dim=sequence_dim)
    for shape, training in (((2, 8, 32), True), ((1, 16, 32), True), ((3, 12, 32), False)):
        block.train(training)
        other = split_for_inputs(split, block, (sample(*shape),), {})
        assert difference(other, block, (sample(*shape),)) < EXACT
        assert other.parameters == split.parameters
        assert other.partial == split.partial
        assert [e.kind for e in other.exchanges] == [e.kind for e in split.exchanges]


def test_again_while_parameters_are_cut() -> None:
    block, x = gpt(), sample(2, 12, 48)
    split = split_block(block, (x,), {}, 2)
    kept = {name: p.detach().clone() for name, p in block.named_parameters()}
    for p in block.parameters():
        p.data = p.data[:1]
    other = split_for_inputs(split, block, (sample(4, 6, 48),), {})
    for name, p in block.named_parameters():
        p.data = kept[name]
    assert difference(other, block, (sample(4, 6, 48),)) < EXACT


def test_a_sequence_that_does_not_divide_is_told() -> None:
    block = llama()
    with pytest.raises(
        IndivisibleSequence, match=r"dim 1 of the input \[3, 7, 32\] is 7: not 2 equal parts"
    ):
        split_block(block, (sample(3, 7, 32),), {}, 2, sequence_dim=1)
    split = split_block(block, (sample(3, 8, 32),), {}, 2, sequence_dim=1)
    with pytest.raises(IndivisibleSequence, match="is 7"):
        split_for_inputs(split, block, (sample(3, 7, 32),), {})


class Fixed(nn.Module):
    """Only reshapes to four heads if the features are there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(32)
        self.normed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        return self.outer(self.norm(h) if self.normed else h)


def test_inputs_that_do_not_work_in_parts_are_told() -> None:
    block, x = Fixed().double(), sample(3, 16)
    split = split_block(block, (x,), {}, 2)
    block.normed = True
    with pytest.raises(UntraceableLayer, match="do not work with the parameters cut as they are"):
        split_for_inputs(split, block, (x,), {})


@pytest.mark.parametrize(
    ("overrides", "labels"),
    [
        ({"attention.*": "whole"}, {"attention.q.weight": WHOLE, "mlp.up.weight": Split(0)}),
        ({"mlp.up.weight": "whole"}, {"mlp.up.weight": WHOLE, "mlp.gate.weight": Split(0)}),
        ({"mlp.down.weight": "column"}, {"mlp.down.weight": Split(0)}),
        ({"attention.q.weight": "row"}, {"attention.q.weight": Split(1)}),
    ],
)
@pytest.mark.parametrize("sequence_dim", [None, pytest.param(1, marks=pytest.mark.proof)])
def test_the_users_word_wins(overrides, labels, sequence_dim: int | None) -> None:
    block, x = llama(kv_heads=4), sample(3, 12, 32)
    split = split_block(block, (x,), {}, 2, sequence_dim=sequence_dim, overrides=overrides)
    assert difference(split, block, (x,)) < EXACT
    for name, label in labels.items():
        assert split.parameters.get(name, WHOLE) == label
    if "whole" in overrides.values():
        assert split.reasons[next(n for n in labels if labels[n] == WHOLE)].startswith(
            "whole: as asked"
        )


def test_a_word_that_cannot_be_done() -> None:
    block, x = MLP(dim=6, hidden=9).double(), sample(3, 6)
    with pytest.raises(
        PlanError, match=r"layers.0.weight \[9, 6\]: cannot be split as column over 2"
    ):
        split_block(block, (x,), {}, 2, overrides={"layers.0.weight": "column"})


def test_nothing_about_the_layer_or_the_generator_changes() -> None:
    block, x = llama(dropout=0.2), sample(3, 12, 32)
    before = {n: p.detach().clone() for n, p in block.named_parameters()}
    state = torch.get_rng_state()
    split_block(block, (x,), {}, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[n]) for n, p in block.named_parameters())
    assert x.grad is None


def test_frozen_parameters_are_not_summed() -> None:
    block, x = llama(kv_heads=1), sample(3, 12, 32)
    block.attention.k.weight.requires_grad_(False)
    split = split_block(block, (x,), {}, 2)
    assert split.partial == {"attention.v.weight"}
    assert difference(split, block, (x,)) < EXACT


def test_backward_sums_are_counted_where_the_sample_needs_gradients() -> None:
    block = MLP().double()
    split = split_block(block, (sample(5, 48).detach(),), {}, 2)
    assert counts(split) == {"all_reduce forward": 1}


# ---- planted bugs: what a start-up check must see


def planted(block: nn.Module, x: torch.Tensor, degree: int = 2) -> float:
    return difference(split_block(block, (x,), {}, degree), block, (x,))


def test_a_missing_backward_sum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_collectives, "enter", lambda value, axis: value)
    block, x = llama(), sample(3, 12, 32)
    split = split_block(block, (x,), {}, 2)
    expected, _ = whole_pass(split, block, (x,), {})
    told = simulate(split, block, (x,), {})[0]
    assert torch.allclose(expected.outputs[0], told.outputs[0], atol=1e-12), "outputs do not tell"
    assert difference(split, block, (x,)) > 1e-2


def test_a_row_bias_that_every_rank_adds_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_collectives, "keep_on_first_rank", lambda value, axis: value)
    assert planted(gpt(), sample(2, 12, 48)) > 1e-2


def test_wrong_segments_are_seen() -> None:
    block, x = gpt(), sample(2, 12, 48)
    split = split_block(block, (x,), {}, 2)
    wrong = {
        name: Split(0) if label.groups == 3 else label for name, label in split.parameters.items()
    }
    assert difference(replace(split, parameters=wrong), block, (x,)) > 1e-2


def test_copied_keys_and_values_whose_gradients_are_not_summed_are_seen() -> None:
    block, x = llama(kv_heads=1), sample(3, 12, 32)
    split = split_block(block, (x,), {}, 2)
    assert split.partial
    assert difference(replace(split, partial=frozenset()), block, (x,)) > 1e-2


def test_a_sum_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = llama(), sample(3, 12, 32)
    split = split_block(block, (x,), {}, 2)
    assert difference(replace(split, partial=frozenset({"mlp_norm.weight"})), block, (x,)) > 1e-3


# ---- the sequence alone is split


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("make", [llama, gpt, encoder, lambda: llama(dropout=0.3)])
def test_whole_parameters_and_a_split_sequence(make, degree: int) -> None:
    """What context parallelism needs: queries stay split, keys and values are gathered."""
    block = make()
    x = sample(2, 12, 48 if make is gpt else 32)
    split = split_block(block, (x,), {}, degree, sequence_dim=1, split_parameters=False)
    assert difference(split, block, (x,)) < EXACT
    assert not split.parameters
    assert counts(split) == {"all_gather forward": 2, "reduce_scatter backward": 2}
    assert split.partial == {name for name, _ in block.named_parameters()}
    other = split_for_inputs(split, block, (sample(3, 8, x.shape[-1]),), {})
    assert difference(other, block, (sample(3, 8, x.shape[-1]),)) < EXACT


class NormedHeads(nn.Module):
    """Queries that are normed over all heads at once (OLMo 2), or low-rank ones behind a norm."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.gain = nn.Linear(32, rank, bias=False), nn.Parameter(torch.ones(rank))
        self.second = nn.Linear(rank, 32, bias=False) if rank < 32 else nn.Identity()
        self.out = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + 1e-6) * self.gain
        heads = self.second(normed).unflatten(-1, (4, 8)).transpose(1, 2)
        heads = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return x + self.out(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("degree", [2, 4])
def test_a_norm_over_all_heads(degree: int) -> None:
    """Its mean is a sum over the ranks: else all queries were whole."""
    torch.manual_seed(0)
    block, x = NormedHeads(32).double(), sample(3, 12, 32)
    perturb(block)
    split = split_block(block, (x,), {}, degree)
    assert difference(split, block, (x,)) < EXACT
    cut = {"first.weight": Split(0), "gain": Split(0), "out.weight": Split(1)}
    assert split.parameters == cut
    small = [one for one in split.exchanges if one.payload_bytes == 3 * 12 * 8]
    assert len(small) == 2, "the mean forward, its gradient backward"
    low = NormedHeads(16).double()
    perturb(low)
    split = split_block(low, (x,), {}, degree)
    assert difference(split, low, (x,)) < EXACT
    assert split.parameters == {"second.weight": Split(0), "out.weight": Split(1)}


class FusedWithNorms(nn.Module):
    """Fused q, k, v with an adapter, divided by the norms of the weights' sum, as DoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.inner, self.outer = nn.Linear(32, 4, bias=False), nn.Linear(4, 96, bias=False)
        self.size = nn.Parameter(torch.ones(96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.outer(self.inner(torch.eye(32, dtype=x.dtype))).T
        norms = torch.linalg.norm(self.qkv.weight + added.detach(), dim=1)
        both = (self.size / norms.detach()).view(1, -1) * (self.qkv(x) + self.outer(self.inner(x)))
        q, k, v = (one.unflatten(-1, (4, 8)).transpose(1, 2) for one in both.split(32, dim=-1))
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(seen.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("degree", [2, 4])
def test_a_fused_weight_and_its_adapter_are_cut_together(degree: int) -> None:
    torch.manual_seed(0)
    block, x = FusedWithNorms().double(), sample(3, 12, 32)
    perturb(block)
    split = split_block(block, (x,), {}, degree)
    assert difference(split, block, (x,)) < EXACT
    fused = dict.fromkeys(("qkv.weight", "outer.weight", "size"), Split(0, 3))
    assert split.parameters == {**fused, "out.weight": Split(1)}
