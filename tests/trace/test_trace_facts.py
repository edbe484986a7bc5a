"""Facts of modules nobody has seen before, against arithmetic and against torch itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.base.errors import PlanError
from shoal.base.estimates.transformer_shape import TransformerShape
from shoal.forecast.models.block_parts import Kernels
from shoal.forecast.models.model_facts import resolve_model
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.models.llama import Llama
from shoal.models.loss import token_loss
from shoal.models.mlp import MLP
from shoal.models.resnet import ResNet
from shoal.trace.costs.gpu_kernels import emulate_attention
from shoal.trace.costs.traced_facts import trace_facts
from shoal.trace.isolation.meta_inputs import cast_product_weights
from shoal.trace.isolation.narrow_blocks import NarrowForward

LLAMA_8B = TransformerShape("llama-3-8b", 32, 4096, 32, 8, 14336, 128256)


def build_8b():
    return Llama(
        vocabulary=128256, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336,
        sequence=8192, tied=False,
    )  # fmt: skip


def saved(unit):
    return unit.saved_split_bytes + unit.saved_plain_bytes


def by_name(facts):
    return {unit.name: unit for unit in facts.units}


@pytest.mark.parametrize(
    ("kernels", "rules", "units"), [("gpu", Kernels(), 41), ("cpu", Kernels(), 41)]
)
def test_llama_3_8b_is_what_arithmetic_says(kernels, rules, units):
    """Nothing of its 16 GB is allocated; the two ways of counting were written apart."""
    ids = torch.zeros(1, 8192, dtype=torch.long)
    told = trace_facts(
        build_8b, ids, kernels=kernels, element_bytes=2, loss=token_loss, targets=ids
    )
    said = transformer_facts(LLAMA_8B, 8192, 2, rules)
    block, other = by_name(told)["blocks"], said.units[1]
    assert told.trainable == said.trainable == 8_030_261_248
    assert sum(u.count * u.parameters for u in told.units) == told.trainable
    assert told.forward_flops == said.forward_flops
    assert (block.count, block.parameters, block.plain_parameters) == (32, other.parameters, 8192)
    assert block.forward_flops == other.forward_flops
    assert block.attention_flops == other.attention_flops
    log_sum_exp = 4 * 32 / 4096
    assert saved(block) / (8192 * 4096) == pytest.approx(units + log_sum_exp, rel=0.005)
    assert saved(block) == pytest.approx(saved(other), rel=0.005)
    assert block.saved_split_bytes == pytest.approx(other.saved_split_bytes, rel=1e-6)
    assert sum(block.selective_bytes) == pytest.approx(sum(other.selective_bytes), rel=0.005)
    assert block.input_bytes == other.input_bytes
    assert (told.sequence, told.hidden) == (8192, 4096)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_small_llamas_agree_with_arithmetic_too(tied, element_bytes):
    arguments = {"vocabulary": 512, "dim": 128, "layers": 3, "heads": 8, "kv_heads": 2}
    given = resolve_model("llama", {**arguments, "tied": tied}, sequence=256).arguments
    shape = TransformerShape("t", 3, 128, 8, 2, given["hidden"], 512, tied=tied)
    ids = torch.zeros(4, 256, dtype=torch.long)
    told = trace_facts(
        lambda: Llama(**given), ids, kernels="gpu", element_bytes=element_bytes,
        loss=token_loss, targets=ids,
    )  # fmt: skip
    said = transformer_facts(shape, 256, element_bytes)
    units = by_name(told)
    assert told.trainable == said.trainable
    assert told.forward_flops == said.forward_flops
    if element_bytes == 2:  # in fp32 GPUs have no flash kernel for grouped heads: k, v are copied
        assert saved(units["blocks"]) == pytest.approx(saved(said.units[1]), rel=0.02)
    assert units["loss"].tied_to == ("embedding" if tied else "")
    assert (units["loss"].parameters == 0) is tied


def bytes_autograd_keeps(module, example):
    """The same question to torch, with real tensors: distinct storages, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in [*module.parameters(), *module.buffers()]}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(example)  # alive until the sum, or addresses would be used twice
    assert outputs is not None
    return sum(kept.values())


@pytest.mark.parametrize("positions", [64, 2560])  # products, flash
def test_autocast_keeps_what_a_real_step_keeps(positions):
    def build():
        return Llama(
            vocabulary=64, dim=64, layers=3, heads=8, kv_heads=2, hidden=192,
            sequence=positions, tied=False,
        )  # fmt: skip

    ids = torch.zeros(2, positions, dtype=torch.long)
    facts = trace_facts(build, ids, element_bytes=2, autocast=True)
    module = cast_product_weights(build(), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        kept = bytes_autograd_keeps(module, ids)
    assert 2 * sum(u.count * saved(u) for u in facts.units) == kept


def test_bf16_residuals_keep_what_a_real_step_keeps():
    def build():
        return Llama(
            vocabulary=64, dim=64, layers=3, heads=8, kv_heads=2, hidden=192, sequence=64, tied=False,
        )  # fmt: skip

    ids = torch.zeros(2, 64, dtype=torch.long)
    facts = trace_facts(build, ids, element_bytes=2, autocast=True, residual="bf16")
    module = cast_product_weights(build(), torch.bfloat16)
    for name, block in module.blocks.named_children():
        block.to(torch.bfloat16)
        NarrowForward(name, block, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        kept = bytes_autograd_keeps(module, ids)
    assert 2 * sum(u.count * saved(u) for u in facts.units) == kept
    wide = trace_facts(build, ids, element_bytes=2, autocast=True)
    assert saved(wide.units[1]) - saved(facts.units[1]) == 10 * 64 * 64, "10 bytes per number"
    assert facts.units[1].input_bytes * 2 == wide.units[1].input_bytes


def test_autocast_on_a_gpu_is_narrow_in_torchs_own_layers_too():
    def facts(**how):
        return trace_facts(encoder, torch.rand(6, 10, 32), kernels="gpu", **how).units[0]

    wide, mixed, narrow = facts(), facts(element_bytes=2, autocast=True), facts(element_bytes=2)
    assert saved(narrow) < saved(mixed) < saved(wide)
    assert wide.forward_flops == mixed.forward_flops == narrow.forward_flops
    assert wide.attention_flops == mixed.attention_flops == narrow.attention_flops


class Nested(nn.Module):
    """Two towers in a ModuleDict, positions of its own, and work between the layers."""

    def __init__(self):
        super().__init__()
        wide = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.towers = nn.ModuleDict(
            {"wide": wide, "bare": nn.ModuleList([nn.Linear(8, 8, False)] * 2)}
        )
        self.positions = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        x = x * self.positions
        for layer in self.towers["wide"]:
            x = layer(x).relu()
        for layer in self.towers["bare"]:
            x = x + torch.tanh(layer(x))
        return x


def sequential():
    linear = [part for _ in range(4) for part in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), *linear, nn.Linear(16, 3))


def convolutions():
    stage = [
        part
        for _ in range(3)
        for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    ]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *stage, nn.Flatten(), nn.Linear(8 * 64, 10))


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 5)


MODELS = {
    "sequential": (sequential, (6, 8)),
    "convolutions": (convolutions, (6, 3, 8, 8)),
    "encoder": (encoder, (6, 10, 32)),
    "nested": (Nested, (6, 8)),
    "mlp": (lambda: MLP(inputs=64, hidden=32, layers=4, classes=10), (6, 8, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_and_parameters_of_plain_modules(name):
    build, shape = MODELS[name]
    module, example = build(), torch.rand(shape)
    facts = trace_facts(module, example)
    assert facts.trainable == sum(p.numel() for p in module.parameters())
    assert sum(u.count * u.parameters for u in facts.units) == facts.trainable
    told = sum(u.count * saved(u) for u in facts.units) * shape[0]
    assert told == pytest.approx(bytes_autograd_keeps(module, example), rel=0.01)
    assert all(u.working_bytes > 0 for u in facts.units if u.name != "inputs")
    assert facts.units == trace_facts(build, example).units  # a builder allocates nothing


def test_flops_are_those_of_torch():
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("sequential", "convolutions", "mlp"):
        build, shape = MODELS[name]
        with FlopCounterMode(display=False) as counter:
            build()(torch.rand(shape))
        facts = trace_facts(build, torch.rand(shape))
        assert facts.forward_flops * shape[0] == pytest.approx(counter.get_total_flops())


def test_a_recurrent_layer_counts_its_products():
    """One operation on a CPU, many on a GPU's trace; the same work."""
    for kernels in ("cpu", "gpu"):
        facts = trace_facts(
            lambda: nn.LSTM(8, 16, 2, batch_first=True), torch.rand(6, 5, 8), kernels=kernels
        )
        assert facts.forward_flops == 2 * 5 * (64 * 8 + 64 * 16 + 64 * 16 + 64 * 16)


def test_attention_counts_on_a_cpu_where_torch_counts_none():
    facts = trace_facts(encoder, torch.rand(6, 10, 32))
    assert [u.attention_flops for u in facts.units] == [4 * 32 * 10 * 10]


def test_our_resnet():
    model = ResNet(**resolve_model("resnet").arguments)
    facts = trace_facts(
        model, torch.rand(2, 3, 32, 32) if _colours(model) == 3 else torch.rand(2, 1, 8, 8)
    )
    assert sum(u.count * u.parameters for u in facts.units) == sum(
        p.numel() for p in model.parameters()
    )
    assert facts.forward_flops > 0


def _colours(model):
    return next(p for p in model.parameters() if p.dim() == 4).shape[1]


def test_equal_units_are_one_row_and_different_ones_are_not():
    facts = trace_facts(sequential, torch.rand(2, 8))
    assert [(u.count, u.parameters) for u in facts.units] == [(1, 144), (4, 272), (1, 51)]
    rates = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(p)) for p in (0.0, 0.1, 0.2)])
    assert [u.count for u in trace_facts(rates, torch.rand(2, 8)).units] == [1, 2]


def test_frozen_parameters_keep_nothing():
    frozen = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    for layer in list(frozen)[:2]:
        layer.requires_grad_(False)
    facts = trace_facts(frozen, torch.rand(2, 8))
    first, second = facts.units
    assert (first.count, first.parameters, first.frozen_parameters, saved(first)) == (2, 0, 72, 0)
    assert (second.count, second.parameters, second.frozen_parameters) == (2, 72, 0)
    assert facts.trainable == 144


class Shared(nn.Module):
    """One block used four times, and an output that reads the input's weight."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for _ in range(4):
            x = torch.tanh(self.block(x))
        return self.last(x)


def test_shared_weights_count_once():
    facts = trace_facts(Shared, torch.rand(2, 8))
    assert facts.trainable == sum(u.count * u.parameters for u in facts.units) == 72 + 72 + 8
    assert [(u.name, u.count, u.tied_to) for u in facts.units] == [
        ("first", 1, ""), ("block", 1, ""), ("block", 3, "block"), ("last", 1, "first"),
    ]  # fmt: skip


def test_the_loss_holds_twelve_bytes_per_logit_in_bf16():
    words, tokens = 5000, 64

    def loss(logits, targets):
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")

    facts = trace_facts(
        lambda: nn.Sequential(nn.Embedding(words, 16), nn.Linear(16, words)),
        torch.zeros(2, tokens, dtype=torch.long),
        element_bytes=2, loss=loss, targets=torch.zeros(2, tokens, dtype=torch.long),
    )  # fmt: skip
    assert by_name(facts)["loss"].loss_bytes == pytest.approx(12 * words * tokens, rel=0.001)
    assert facts.sequence == tokens


class Picks(nn.Module):
    def forward(self, x):
        return x[x.sum(-1) > 0]


class Looks(nn.Module):
    """Its constructor and its forward pass look at values: only the second is hopeless."""

    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(r)) for r in rates)
        self.router = Picks()

    def forward(self, x):
        for block in self.body:
            x = block(x)
        return self.router(x)


class Asks(nn.Module):
    """A block that asks something of positions, which follow from shapes alone."""

    def __init__(self, ask):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.ask = ask

    def forward(self, x):
        return self.inner(x) if self.ask(torch.arange(x.shape[1], device=x.device)) else x


def written_over(positions, value):
    view = positions.clone()[1:]
    view.copy_(value.expand(view.shape))
    return view.sum() > 0


@pytest.mark.parametrize(
    "ask",
    [
        lambda positions: (positions.diff() == 1).all(),
        lambda positions: int((positions + 1).cumsum(-1)[-1]) == 10,
        lambda positions: positions.clone().add_(1).max().item() == 4,
        lambda positions: written_over(positions, torch.ones((), dtype=torch.long, device="meta")),
    ],
    ids=["a mask", "a length", "in place", "written over"],
)
def test_values_that_follow_from_shapes_are_known(ask):
    """As transformers' decoders ask before they make a mask; the plain block's facts are the same."""
    found = trace_facts(Asks(ask), torch.rand(2, 4, 8), kernels="gpu", element_bytes=2)
    plain = trace_facts(Asks(lambda _: True), torch.rand(2, 4, 8), kernels="gpu", element_bytes=2)
    assert found.trainable == plain.trainable == 72
    assert found.forward_flops == plain.forward_flops > 0


@pytest.mark.parametrize(
    "ask",
    [
        lambda positions: (positions + torch.empty(4, dtype=torch.long, device="meta")).max() > 3,
        lambda positions: written_over(positions, torch.empty((), dtype=torch.long, device="meta")),
        lambda positions: (torch.rand(4, device="meta") > 0.5).all(),
    ],
    ids=["an input", "written over", "a draw"],
)
def test_values_of_inputs_and_draws_stay_unknown(ask):
    with pytest.raises(PlanError, match="cannot be traced by shapes alone"):
        trace_facts(Asks(ask), torch.rand(2, 4, 8), kernels="gpu", element_bytes=2)


def test_a_decoder_of_transformers_is_traced_for_gpus():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        vocab_size=50, use_cache=False,
    )  # fmt: skip
    facts = trace_facts(
        lambda: transformers.LlamaForCausalLM(config), torch.zeros(2, 8, dtype=torch.long),
        kernels="gpu", element_bytes=2, autocast=True,
    )  # fmt: skip
    assert facts.trainable == sum(
        p.numel() for p in transformers.LlamaForCausalLM(config).parameters()
    )


@pytest.mark.parametrize("kernels", ["cpu", "gpu"])
def test_a_module_that_looks_at_values_is_named(kernels):
    with pytest.raises(
        PlanError, match=r"model: router \(Picks\) cannot be traced.*shoal compare"
    ) as failure:
        trace_facts(Looks, torch.rand(2, 8), kernels=kernels)
    assert "\n" not in str(failure.value)


def test_other_mistakes_are_one_line_too():
    def broken():
        raise RuntimeError("no such file\nsecond line")

    with pytest.raises(PlanError, match="model.build: cannot be built.*no such file"):
        trace_facts(broken, torch.rand(2, 8))
    with pytest.raises(PlanError, match="gives int"):
        trace_facts(lambda: 3, torch.rand(2, 8))
    with pytest.raises(PlanError, match="try: gpu"):
        trace_facts(MLP, torch.rand(2, 8), kernels="gp")
    with pytest.raises(PlanError, match="autocast is narrow"):
        trace_facts(MLP, torch.rand(2, 8), autocast=True)
    with pytest.raises(PlanError, match="element_bytes = 3"):
        trace_facts(MLP, torch.rand(2, 8), element_bytes=3)
    with pytest.raises(PlanError, match="hold no tensor"):
        trace_facts(nn.Linear(8, 8), {})
    with pytest.raises(PlanError, match="0 .Linear. cannot be traced"):
        trace_facts(nn.Sequential(nn.Linear(8, 8)), torch.rand(2, 9))
    with pytest.raises(PlanError, match="the loss cannot be traced"):
        trace_facts(nn.Linear(8, 8), torch.rand(2, 8), loss=lambda outputs: outputs.sum().item())


def test_a_trace_leaves_the_module_alone():
    module = sequential()
    ran = []
    module[0].register_forward_hook(lambda *_: ran.append(1))
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in module.state_dict().items()}
    trace_facts(module, torch.rand(2, 8))
    assert not ran
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert "forward" not in vars(module[0])
    assert all(p.grad is None for p in module.parameters())
    assert module(torch.rand(2, 8)).shape == (2, 3)
    assert before.shape == torch.get_rng_state().shape


def test_a_hundred_unknown_layers_in_seconds(programs):
    """Seconds of one core, without torch's import: a busy machine does not count."""
    program = """
import time
import torch
from torch import nn
from shoal.trace.costs.traced_facts import trace_facts
layer = lambda: nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True)
model = lambda: nn.Sequential(nn.Embedding(50000, 2048), *[layer() for _ in range(100)])
facts = trace_facts(model, torch.zeros(1, 2048, dtype=torch.long))
assert facts.blocks == 101 and facts.trainable == 102_400_000 + 100 * 50_358_272
assert time.process_time() < 10
"""
    done = programs.run("-c", program, timeout=300)
    assert done.returncode == 0, done.stderr


def test_attention_of_values_of_another_width_has_their_width() -> None:
    """As in latent attention: keys with rotary parts are wider than values."""
    query, key = torch.empty(2, 2, 4, 8, 24, dtype=torch.bfloat16, device="meta").unbind()
    value = torch.empty(2, 4, 8, 16, dtype=torch.bfloat16, device="meta")
    assert emulate_attention(query, key, value, is_causal=True).shape == (2, 4, 8, 16)
    assert emulate_attention(query, key, key, is_causal=True).shape == (2, 4, 8, 24)
