"""Layers of the transformers library, unmodified: what is split, and that it is exact.

float64; the library casts to float32 in norms, rotary tables and eager softmax, whose rounding
shows where parts are summed in another order.
"""

from __future__ import annotations

import pytest
import torch
from hf_modules import HF_EXAMPLES
from threads import counts, difference
from torch import nn
from user_modules import made

from proof_rows import chosen, rows
from shoal.parallel.spmd.labelling.labels import Split
from shoal.parallel.spmd.split_block import split_block, split_for_inputs
from shoal.trace.graph.layer_graph import UntraceableLayer

transformers = pytest.importorskip("transformers")

EXACT, CASTS = 1e-12, 1e-6


def captured(kind: str, batch: int = 3, block: str | None = None):
    """(layer, args, kwargs) as the model calls it."""
    example = HF_EXAMPLES[kind]
    model = made(example.build)
    layer = model.get_submodule(block or example.blocks[0])
    found: list = []

    def note(module: nn.Module, args, kwargs) -> None:
        found.append((args, kwargs))

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    example.call(model, example.inputs(batch))
    handle.remove()
    return layer, *found[0]


# model, degree → parameters split, all-reduces forward, backward, tolerance
TABLE = [
    ("gpt2", 2, 6, 2, 2, EXACT),
    ("gpt2", 4, 6, 2, 2, EXACT),
    ("llama", 2, 7, 2, 2, CASTS),
    ("llama", 4, 5, 2, 2, CASTS),  # two key/value heads: k and v stay whole
    ("qwen3", 2, 7, 2, 2, CASTS),
    ("qwen3", 4, 5, 2, 2, CASTS),
    ("gemma2", 2, 7, 2, 2, CASTS),
    ("gemma2", 4, 5, 2, 2, CASTS),
    ("mistral", 2, 7, 2, 2, CASTS),
    ("phi3", 2, 4, 2, 2, CASTS),
    ("bert", 2, 10, 2, 2, EXACT),
    ("bert", 4, 10, 2, 2, EXACT),
    ("vit", 2, 10, 2, 2, EXACT),
    ("vit", 4, 10, 2, 2, EXACT),
    ("falcon", 2, 2, 1, 1, EXACT),  # one key/value head, fused: the feed-forward part only
    ("bloom", 2, 6, 2, 2, EXACT),
    ("bloom", 4, 6, 2, 2, EXACT),
    ("mamba", 2, 9, 2, 2, CASTS),
    ("mamba", 4, 9, 2, 2, CASTS),
]
SHORT = [("gpt2", 4), ("llama", 4), ("phi3", 2), ("vit", 4), ("falcon", 2), ("bloom", 4)]
SHORT += [("mamba", 4)]
"""Fused and separate weights, unequal segments, shared key heads, biases, an encoder, a state space."""


@pytest.mark.parametrize(
    ("kind", "degree", "cuts", "forward", "backward", "near"), chosen(TABLE, SHORT)
)
def test_table(kind: str, degree: int, cuts: int, forward: int, backward: int, near: float) -> None:
    layer, args, kwargs = captured(kind)
    split = split_block(layer, args, kwargs, degree)
    assert difference(split, layer, args, kwargs) < near
    assert len(split.parameters) == cuts
    assert counts(split) == {"all_reduce forward": forward, "all_reduce backward": backward}
    assert not split.gathered


def test_heads_of_q_k_and_v_in_one_are_cut_each() -> None:
    layer, args, kwargs = captured("phi3")
    split = split_block(layer, args, kwargs, 2)
    assert split.parameters["self_attn.qkv_proj.weight"] == Split(0, (2, 1, 1))
    said = "column: dim 0 in segments of 2 : 1 : 1"
    assert split.reasons["self_attn.qkv_proj.weight"] == said


SEQUENCES = ("gpt2", "llama", "qwen3", "gemma2", "bert", "falcon", "bloom")


@pytest.mark.parametrize("kind", rows([SEQUENCES], kept=[("gemma2",), ("bert",)]))
def test_sequence_parallel(kind: str) -> None:
    layer, args, kwargs = captured(kind)
    split = split_block(layer, args, kwargs, 2, sequence_dim=1)
    assert difference(split, layer, args, kwargs) < CASTS
    assert split.inputs[0] == split.outputs[0] == Split(1)
    assert not any(e.kind == "all_reduce" for e in split.exchanges)


T5 = ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")


@pytest.mark.parametrize("block", rows([T5], kept=[("encoder.block.0",), ("decoder.block.1",)]))
def test_t5(block: str) -> None:
    """Position bias as a result of the first layer and an input of the others; cross attention."""
    layer, args, kwargs = captured("t5", block=block)
    split = split_block(layer, args, kwargs, 2)
    assert difference(split, layer, args, kwargs) < EXACT
    found = counts(split)
    assert found["all_reduce forward"] == (3 if "decoder" in block else 2)
    assert found["all_gather backward"] == 1, "the position bias, cut by head"
    assert not split.gathered


@pytest.mark.parametrize("kind", rows([("gpt2", "llama", "bloom", "mamba")], kept=[("bloom",)]))
def test_again_for_another_batch(kind: str) -> None:
    layer, args, kwargs = captured(kind)
    split = split_block(layer, args, kwargs, 2)
    _, args, kwargs = captured(kind, batch=2)
    other = split_for_inputs(split, layer, args, kwargs)
    assert difference(other, layer, args, kwargs) < CASTS
    assert other.partial == split.partial


def test_side_results_stay_split_until_they_are_read() -> None:
    """Bloom's layer also returns its attention weights, which nobody reads."""
    layer, args, kwargs = captured("bloom")
    split = split_block(layer, args, kwargs, 2)
    assert split.outputs[1] == Split(1)


def test_routing_by_numbers_cannot_be_traced() -> None:
    layer, args, kwargs = captured("mixtral")
    with pytest.raises(UntraceableLayer):
        split_block(layer, args, kwargs, 2, opaque=False)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "kind",
    rows(
        [("gpt2", "llama", "qwen3", "mistral", "bert", "bloom", "t5")], kept=[("qwen3",), ("t5",)]
    ),
)
def test_a_split_sequence_with_whole_parameters(kind: str) -> None:
    layer, args, kwargs = captured(kind)
    split = split_block(layer, args, kwargs, 2, sequence_dim=1, split_parameters=False)
    assert difference(split, layer, args, kwargs) < CASTS
    assert counts(split)["all_gather forward"] == 2
