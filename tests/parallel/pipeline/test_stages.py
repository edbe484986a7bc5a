"""Stages of any module, one after another, are the whole module: loss and every gradient."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from chain import Chain, assert_equal_to_whole
from hf_modules import HF_EXAMPLES
from torch.nn.utils.rnn import pack_padded_sequence
from user_modules import EXAMPLES, Example, made, numbers, tokens

from proof_rows import rows
from shoal.models.catalog import build
from shoal.parallel.pipeline.cut_model import cut_stages
from shoal.parallel.pipeline.partition_model import StageCut
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trace.isolation.meta_inputs import map_tensors, tensors_of

LLAMA = {"vocabulary": 31, "dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 24}
OURS = {
    "our llama": Example(partial(build, "llama", {**LLAMA, "sequence": 8}), tokens, ()),
    "our untied": Example(
        partial(build, "llama", {**LLAMA, "sequence": 8, "tied": False}), tokens, ()
    ),
    "our mlp": Example(
        partial(build, "mlp", {"inputs": 6, "hidden": 16, "layers": 3, "classes": 3}),
        lambda n: numbers(n, 6),
        (),
    ),
    "our resnet": Example(
        partial(build, "resnet", {"image_channels": 1, "channels": 4, "classes": 3, "blocks": 2}),
        lambda n: numbers(n, 1, 8, 8),
        (),
    ),
}
LONG = {name: one for name, one in EXAMPLES.items() if name != "lstm"}
"""Those that have a stage for each of four ranks; two parts are cut on ranks (test_any_module)."""
ALL = {**OURS, **LONG, **{f"hf {name}": one for name, one in HF_EXAMPLES.items()}}


def cut_of(example: Example, module: torch.nn.Module, stages: int, batch: int = 2) -> StageCut:
    inputs = example.inputs(batch)
    run = partial(call_on, example, inputs)
    return cut_stages(ForwardRecord(module, run), stages)


def call_on(example: Example, inputs: object, module: torch.nn.Module) -> object:
    return example.call(module, inputs)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SHORT = [(name, 4) for name in (*OURS, *LONG)]
SHORT += [("hf t5", 4), ("hf llama", 4), ("our untied", 3), ("unet", 3), ("tuples", 3)]
"""Every habit once; of the library a chain and an encoder beside a decoder; stages of unlike size."""


@pytest.mark.parametrize(("name", "stages"), rows([tuple(ALL), (2, 3, 4)], kept=SHORT))
def test_stages_are_the_whole_model(name: str, stages: int) -> None:
    if name.startswith("hf "):
        pytest.importorskip("transformers")
    example = ALL[name]
    module = made(example.build)
    before = copy.deepcopy(module.state_dict())
    cut = cut_of(example, module, stages)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key
    chain = Chain(module, cut)
    calls = [partial(call_on, example, example.inputs(batch)) for batch in (2, 3)]
    whole = assert_equal_to_whole(chain, module, calls)
    for one in (whole, *chain.modules):
        one.eval()
    for batch in (1, 2):
        call = partial(call_on, example, example.inputs(batch))
        with torch.no_grad():
            expected = tensors_of(call(whole))
        got = tensors_of(chain.forward(call))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_packed_sequences_are_walked_and_keep_their_sizes_on_the_host() -> None:
    """PackedSequence checks what it is rebuilt from."""
    packed = pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([2, 3]), True, False)
    assert len(tensors_of([packed])) == 3
    moved = map_tensors(lambda tensor: tensor.to("meta"), packed)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
