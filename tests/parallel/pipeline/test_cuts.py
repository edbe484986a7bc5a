"""What crosses between stages, and what each keeps, is what the model needs and no more."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hf_modules import HF_EXAMPLES
from torch import nn
from user_modules import EXAMPLES, Example, made

from proof_rows import chosen, rows
from shoal.parallel.pipeline.cut_model import cut_stages
from shoal.parallel.pipeline.partition_model import StageCut
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trace.isolation.meta_inputs import tensors_of


def cut_of(example: Example, stages: int) -> tuple[nn.Module, StageCut]:
    module = made(example.build)

    def run(inputs: Any, one: nn.Module) -> Any:
        return example.call(one, inputs)

    look = partial(run, example.inputs(2))
    return module, cut_stages(ForwardRecord(module, look), stages)


CHAINS = (*HF_EXAMPLES, "nested", "encoder", "gpt", "mlp")


@pytest.mark.parametrize(
    "name", rows([CHAINS], kept=[("bert",), ("mixtral",), ("nested",), ("gpt",), ("mlp",)])
)
def test_a_chain_sends_one_tensor(name: str) -> None:
    if name in HF_EXAMPLES:
        pytest.importorskip("transformers")
    _, cut = cut_of({**HF_EXAMPLES, **EXAMPLES}[name], 4)
    if name != "t5":
        assert [len(crossing) for crossing in cut.crossings] == [0, 1, 1, 1]


def test_skips_travel_through() -> None:
    _, cut = cut_of(EXAMPLES["unet"], 3)
    names = [[cut.calls[call].name for call, _ in crossing] for crossing in cut.crossings]
    assert names == [[], ["enter", "down.0", "down.1"], ["enter", "down.0", "up.0"]]


def test_an_encoder_and_a_decoder() -> None:
    pytest.importorskip("transformers")
    _, cut = cut_of(HF_EXAMPLES["t5"], 3)
    names = [[cut.calls[call].name for call, _ in crossing] for crossing in cut.crossings]
    state = ["encoder.final_layer_norm"]
    # The decoder's block hands on its state and two position biases.
    assert names == [[], state, state + 3 * ["decoder.block.1"]]
    assert cut.ties == {"shared.weight": (0, 1, 2)}


@pytest.mark.parametrize(
    ("name", "tied"),
    chosen(
        [("gpt2", "transformer.wte.weight"), ("bert", "bert.embeddings.word_embeddings.weight")],
        kept=[("gpt2",)],
    ),
)
def test_tied_heads_are_ties(name: str, tied: str) -> None:
    pytest.importorskip("transformers")
    _, cut = cut_of(HF_EXAMPLES[name], 4)
    assert cut.ties == {tied: (0, 3)}


def test_every_parameter_and_buffer_lives_somewhere() -> None:
    for example in EXAMPLES.values():
        module, cut = cut_of(example, 2)
        state = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
        assert frozenset().union(*cut.keep) == state


@pytest.mark.parametrize(
    "name", rows([("unet", "gpt", "nested", "encoder")], kept=[("unet",), ("gpt",)])
)
def test_a_cut_is_told_to_another_rank(name: str) -> None:
    module, cut = cut_of(EXAMPLES[name], 2)
    told = json.loads(json.dumps(cut.to_json()))
    again = StageCut.from_json(told, module, torch.device("cpu"))
    for key in ("crossings", "keep", "ties", "between"):
        assert getattr(again, key) == getattr(cut, key)
    for one, other in zip(again.calls, cut.calls, strict=True):
        plain = [(c.name, c.stage, c.block, c.devices, c.written) for c in (one, other)]
        assert plain[0] == plain[1]
        for mine, theirs in ((one.inputs, other.inputs), (one.outputs, other.outputs)):
            assert forms(mine) == forms(theirs)


def forms(tree: Any) -> list[Any]:
    return [(t.shape, t.dtype, t.device.type) for t in tensors_of(tree)]


def test_what_only_a_class_can_make_is_not_told() -> None:
    _, cut = cut_of(EXAMPLES["mlp"], 2)
    odd = replace(cut.calls[0], outputs=OrderedDict(state=cut.calls[0].outputs))
    assert replace(cut, calls=(odd, *cut.calls[1:])).to_json() is None
