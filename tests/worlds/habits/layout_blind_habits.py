"""Habits of layers and models whose authors had one device: strides, shapes, attributes, patches."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrize

from habits.habit_sides import CLASSES, Block, Chain, Script, X, Y, adamw, net, squares
from habits.habit_table import habit

DRAWN = torch.Generator().manual_seed(77)
PICTURES = torch.randn(64, 2, 4, 4, generator=DRAWN, dtype=torch.float64)
FIVES = torch.randn(64, 5, 6, generator=DRAWN, dtype=torch.float64)
"""Sequences of five tokens: as many as rank 0 has samples."""
LENGTHS = torch.randint(1, 6, (64,), generator=DRAWN)


def train(script: Script, kind: Any, batch: Any = None, **more: Any) -> Any:
    batch = batch or script.batch
    run = script.begin(net(kind), sample=batch(0), **more)
    script.train(run, batch=batch)
    return run


# ---- how a weight lies in memory


class Convolutional(nn.Module):
    """Two convolutions and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.two(self.one(x).relu()).relu().mean((2, 3)))


@habit("models", sums=True)
def weights_in_channels_last(script: Script) -> None:
    """`model.to(memory_format=torch.channels_last)`: strides that are no row-major ones."""

    def batch(step: int) -> Any:
        x, y = script.share(step, PICTURES, Y)
        return x.contiguous(memory_format=torch.channels_last), y

    model = net(Convolutional).to(memory_format=torch.channels_last)
    run = script.begin(model, adamw, sample=batch(0))
    script.train(run, batch=batch)


@habit("models", sums=True)
def a_weight_that_is_a_transpose(script: Script) -> None:
    """`nn.Parameter(torch.randn(6, 16).T)`, as converters from JAX make it."""

    class Transposed(Chain):
        def __init__(self) -> None:
            super().__init__()
            for block in self.layers:
                block.up.weight = nn.Parameter(block.up.weight.detach().T.contiguous().T)

    train(script, Transposed, optimizer=adamw)


@habit("models", sums=True)
def an_empty_weight(script: Script) -> None:
    """`nn.Linear(0, 6)` for features that a dataset does not have."""

    class Optional(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(0, 6)

        def forward(self, x: Any) -> Any:
            return super().forward(x + self.extra(x[:, :0]))

    train(script, Optional, optimizer=adamw)


@habit("models", sums=True)
def complex_weights_of_a_spectral_layer(script: Script) -> None:
    """Fourier neural operators: a weight of complex numbers between `rfft` and `irfft`."""

    class Spectral(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.modes = nn.Parameter(0.3 * torch.randn(4, dtype=torch.complex128))

        def forward(self, x: Any) -> Any:
            return super().forward(x + torch.fft.irfft(torch.fft.rfft(x) * self.modes, n=6))

    run = train(script, Spectral)
    script.note(torch.view_as_real(run.state_dict()["modes"].cpu()))


@habit("models", sums=True)
def pairs_of_numbers_read_as_complex_ones(script: Script) -> None:
    """Rotations by `view_as_complex`, of a real weight [3, 2]."""

    class Rotated(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.turns = nn.Parameter(torch.randn(3, 2))

        def forward(self, x: Any) -> Any:
            pairs = torch.view_as_complex(x.reshape(len(x), 3, 2))
            turned = torch.view_as_real(pairs * torch.view_as_complex(self.turns))
            return super().forward(turned.flatten(1))

    train(script, Rotated)


# ---- what the field puts beside samples


class Masked(nn.Module):
    """Encoder layers that get a mask [token, token] beside the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Any, mask: Any) -> Any:
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x.mean(1))


def masked_batch(script: Script, mask: torch.Tensor) -> Any:
    def batch(step: int) -> Any:
        x, y = script.share(step, FIVES, Y)
        return {"x": x, "mask": mask}, y

    return batch


@habit("loops", sums=True)
def a_causal_mask_beside_as_many_samples(script: Script) -> None:
    """`model(x, mask=…)`: the mask has as many rows as rank 0 has samples."""
    mask = torch.triu(torch.full((5, 5), -torch.inf, dtype=torch.float64), 1)
    train(script, Masked, masked_batch(script, mask), call="kwargs")


@habit("loops", sums=True)
def a_padding_mask_of_each_sample(script: Script) -> None:
    """`src_key_padding_mask` [sample, token] of the batch's lengths."""

    class Padded(Masked):
        def forward(self, x: Any, gone: Any) -> Any:
            for layer in self.layers:
                x = layer(x, src_key_padding_mask=gone)
            kept = (~gone).unsqueeze(-1)
            return self.head((x * kept).sum(1) / kept.sum(1))

    def batch(step: int) -> Any:
        x, y, lengths = script.share(step, FIVES, Y, LENGTHS)
        return {"x": x, "gone": torch.arange(5) >= lengths[:, None]}, y

    train(script, Padded, batch, call="kwargs")


@habit("loops", sums=True)
def positions_of_one_row_for_all_samples(script: Script) -> None:
    """`position_ids` [1, token], which the model broadcasts."""

    class Positioned(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(5, 6)

        def forward(self, x: Any, position_ids: Any) -> Any:
            return super().forward((x + self.places(position_ids)).mean(1))

    def batch(step: int) -> Any:
        x, y = script.share(step, FIVES, Y)
        return {"x": x, "position_ids": torch.arange(5)[None]}, y

    train(script, Positioned, batch, call="kwargs")


@habit("models", sums=True)
def padded_sequences_packed_for_an_lstm(script: Script) -> None:
    """`pack_padded_sequence` with the lengths of the batch, and the last hidden state."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Any, lengths: Any) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
            return self.head(self.cell(packed)[1][0][-1])

    def batch(step: int) -> Any:
        x, y, lengths = script.share(step, FIVES, Y, LENGTHS)
        return {"x": x, "lengths": lengths}, y

    train(script, Recurrent, batch, call="kwargs")


@habit("loops", sums=True)
def bags_of_words_by_offsets(script: Script) -> None:
    """`nn.EmbeddingBag(flat, offsets)`: the flat list has no row for each sample."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(6, 8, mode="sum"), nn.Linear(8, 3)

        def forward(self, flat: Any, offsets: Any) -> Any:
            return self.head(self.bag(flat, offsets))

    def batch(step: int) -> Any:
        lengths, y = script.share(step, LENGTHS, Y)
        flat = torch.cat([torch.arange(int(n)) for n in lengths])
        return {"flat": flat, "offsets": lengths.cumsum(0) - lengths}, y

    train(script, Bags, batch, call="kwargs")


@habit("loops", sums=False)
def boxes_with_the_number_of_their_image(script: Script) -> None:
    """YOLO's targets: one table [box, (image, numbers)], here with as many boxes as images."""

    def loss(o: Any, boxes: Any) -> Any:
        return (o[boxes[:, 0].long()] - boxes[:, 1:]).square().sum(), len(o)

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        images = (torch.arange(len(x)) * 2 % len(x)).double()
        return x, torch.cat([images[:, None], y], 1)

    train(script, Chain, batch, loss=loss)


@habit("loops", sums=True)
def a_batch_encoding_of_transformers(script: Script) -> None:
    """What tokenizers and collators return: a `UserDict` with names of columns."""
    from transformers import BatchEncoding

    class Named(Chain):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch["x"])

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        made = {"x": x, "y": y}
        return made if script.plain else BatchEncoding(made)

    train(script, Named, batch, loss=lambda o, b: squares(o, b["y"]))


@habit("loops", sums=True)
def a_nested_tensor_as_the_batch(script: Script) -> None:
    """Sequences of unlike lengths in `torch.nested`, pooled by the model."""

    class Pooled(Chain):
        def forward(self, x: Any) -> Any:
            rows = [one.mean(0) for one in x.unbind()]
            return super().forward(torch.stack(rows))

    def batch(step: int) -> Any:
        x, y, lengths = script.share(step, FIVES, Y, LENGTHS)
        rows = [one[:n] for one, n in zip(x, lengths.tolist(), strict=True)]
        return torch.nested.nested_tensor(rows, layout=torch.jagged), y

    train(script, Pooled, batch)


@habit("loops", sums=True)
def a_sparse_matrix_of_features(script: Script) -> None:
    """One-hot or TF-IDF rows as `torch.sparse_coo`: the model multiplies it."""

    class Sparse(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(6, 6)

        def forward(self, x: Any) -> Any:
            return super().forward(torch.sparse.mm(x, self.into.weight.T) + self.into.bias)

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        return (x * (x > 0)).to_sparse(), y

    train(script, Sparse, batch)


# ---- what a forward pass reads beside its inputs


class Configured(Chain):
    """A block's factor comes from a configuration object that all of the script shares."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(factor=1.0)

    def forward(self, x: Any) -> Any:
        for block in self.layers:
            x = self.config.factor * block(x)
        return self.head(x)


@habit("models", sums=True)
def a_configuration_changed_in_the_middle(script: Script) -> None:
    run = script.begin(net(Configured))
    for step in range(3):
        run.model.config.factor = 1.0 / (1 + step)
        script.note(run.step(script.batch(step)).loss)


class Scaling(Block):
    """A residual branch with a number of Python as its factor."""

    factor = 1.0

    def forward(self, x: Any) -> Any:
        return x + self.factor * self.down(F.gelu(self.up(x)))


class ScalingChain(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Scaling() for _ in range(4)))


@habit("models", sums=True)
def a_number_set_on_each_block(script: Script) -> None:
    """`for m in model.modules(): m.factor = …`, as schedules of drop path and of norms do."""
    run = script.begin(net(ScalingChain))
    for step in range(3):
        for one in run.model.modules():
            if isinstance(one, Scaling):
                one.factor = 1.0 / (1 + step)
        script.note(run.step(script.batch(step)).loss)


WARM = {"factor": 1.0}


class WarmBlock(Block):
    def forward(self, x: Any) -> Any:
        return x + WARM["factor"] * self.down(F.gelu(self.up(x)))


@habit("models", sums=True)
def a_global_number_read_in_forward(script: Script) -> None:
    class Warm(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(WarmBlock() for _ in range(4)))

    WARM["factor"] = 1.0
    run = script.begin(net(Warm))
    for step in range(3):
        WARM["factor"] = 1.0 / (1 + step)
        script.note(run.step(script.batch(step)).loss)


class Activated(Block):
    """Its activation is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.act: nn.Module = nn.GELU()

    def forward(self, x: Any) -> Any:
        return x + self.down(self.act(self.up(x)))


class ActivatedChain(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Activated() for _ in range(4)))


@habit("models", sums=True)
def an_activation_replaced_in_the_middle(script: Script) -> None:
    run = script.begin(net(ActivatedChain))
    for step in range(3):
        if step == 1:
            for one in run.model.modules():
                if isinstance(one, Activated):
                    one.act = nn.Tanh()
        script.note(run.step(script.batch(step)).loss)


def halved(self: Any, x: Any) -> Any:
    return x + 0.5 * self.down(F.gelu(self.up(x)))


@habit("models", sums=True)
def a_forward_patched_before_the_start(script: Script) -> None:
    """`block.forward = MethodType(faster, block)`, as attention patches do."""
    model = net()
    for block in model.layers:
        block.forward = types.MethodType(halved, block)
    script.train(script.begin(model))


@habit("models", sums=True)
def a_forward_patched_in_the_middle(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        if step == 1:
            for one in run.model.modules():
                if isinstance(one, Block):
                    one.forward = types.MethodType(halved, one)
        script.note(run.step(script.batch(step)).loss)


@habit("models", sums=True)
def a_block_dropped_in_the_middle(script: Script) -> None:
    """`model.layers = model.layers[:3]`: the last block has no gradient any more."""
    run = script.begin()
    for step in range(3):
        if step == 1:
            run.model.layers = run.model.layers[:3]
        o = run.step(script.batch(step))
        script.note(o.loss)
    script.run.state_dict = dict  # it has fewer names now


class Brighter(Chain):
    """Another factor where gradients are off, as samplers and inference paths have it."""

    def forward(self, x: Any) -> Any:
        if not torch.is_grad_enabled():
            x = 1.1 * x
        return super().forward(x)


@habit("models", sums=True)
def a_branch_on_the_mode_of_gradients(script: Script) -> None:
    run = train(script, Brighter)
    script.note(run.evaluate(torch.utils.data.TensorDataset(X[:16], Y[:16]))["loss"])


class Validated(Chain):
    """Returns probabilities in evaluation mode, scores in training mode."""

    def forward(self, x: Any) -> Any:
        out = super().forward(x)
        return out if self.training else out.softmax(-1)


@habit("models", sums=True)
def outputs_of_another_kind_in_evaluation(script: Script) -> None:
    run = train(script, Validated)
    script.note(run.evaluate(torch.utils.data.TensorDataset(X[:16], Y[:16]))["loss"])
    script.note(run.predict(X[:4]))


@habit("models", sums=False)
def inputs_scaled_if_one_is_large(script: Script) -> None:
    """`if x.abs().max() > 2.5: x = x / x.abs().max()`: one sample decides for the batch."""

    class Guarded(Chain):
        def forward(self, x: Any) -> Any:
            largest = x.abs().max()
            return super().forward(x / largest if largest > 2.5 else x)

    train(script, Guarded)


@habit("models", sums=False)
def outputs_divided_by_the_rows_of_the_batch(script: Script) -> None:
    class Divided(Chain):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 4 / len(x)

    train(script, Divided)


@habit("models", sums=True)
def inputs_changed_in_place_by_the_model(script: Script) -> None:
    """`x.mul_(0.5)` in forward writes the user's batch, which the next epoch reads again."""

    class Writing(Chain):
        def forward(self, x: Any) -> Any:
            return super().forward(x.mul_(0.5))

    def fresh(step: int) -> Any:
        return tuple(one.clone() for one in script.batch(step))

    run, kept = script.begin(net(Writing), sample=fresh(0)), fresh(0)
    for _ in range(3):
        script.note(run.step(kept).loss)


@habit("models", sums=False)
def a_norm_over_parts_of_the_batch(script: Script) -> None:
    """Ghost batch norm: `x.chunk(2)`, statistics of each chunk."""

    class Ghost(Chain):
        def forward(self, x: Any) -> Any:
            parts = [(one - one.mean(0)) / (one.var(0, correction=0) + 1).sqrt()
                     for one in x.chunk(2)]  # fmt: skip
            return super().forward(torch.cat(parts))

    train(script, Ghost)


# ---- layers


@habit("models", sums=False)
def an_embedding_with_a_limit_on_norms(script: Script) -> None:
    """`nn.Embedding(max_norm=…)`: the forward pass writes the rows that it looks up."""

    class Limited(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 6, max_norm=1.0, padding_idx=0)

        def forward(self, ids: Any) -> Any:
            return super().forward(self.table(ids))

    train(script, Limited, lambda step: script.share(step, torch.arange(64), Y))


@habit("models", sums=True)
def a_weight_that_is_kept_positive(script: Script) -> None:
    """A parametrization by softplus, elementwise."""

    class Positive(nn.Module):
        def forward(self, weight: Any) -> Any:
            return F.softplus(weight)

    class Model(Chain):
        def __init__(self) -> None:
            super().__init__()
            for block in self.layers:
                parametrize.register_parametrization(block.down, "weight", Positive())

    train(script, Model)


class Symmetric(nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight.triu() + weight.triu(1).T


class Tempered(Chain):
    """A symmetric matrix before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)
        parametrize.register_parametrization(self.into, "weight", Symmetric())

    def forward(self, x: Any) -> Any:
        return super().forward(self.into(x))


@habit("models", sums=True)
def a_symmetric_weight(script: Script) -> None:
    train(script, Tempered)


@habit("models", sums=True)
def a_parametrization_removed_in_the_middle(script: Script) -> None:
    run = script.begin(net(Tempered))
    for step in range(3):
        if step == 1:
            parametrize.remove_parametrizations(run.model.into, "weight")
        script.note(run.step(script.batch(step)).loss)
    script.note(run.predict(X[:4]))
    script.run.state_dict = dict  # it has other names now


@habit("models", sums=True)
def the_old_weight_norm(script: Script) -> None:
    """`torch.nn.utils.weight_norm`: a pre-forward hook makes the weight anew."""

    class Model(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(6, 6)
            for block in self.layers:
                nn.utils.weight_norm(block.up)  # type: ignore[no-untyped-call]
            nn.utils.weight_norm(self.into)  # type: ignore[no-untyped-call]

        def forward(self, x: Any) -> Any:
            return super().forward(self.into(x))

    train(script, Model)


@habit("models", sums=True)
def an_ensemble_by_vmap(script: Script) -> None:
    """Two members of one form, stacked by `torch.func`, in the forward pass."""

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            members = [nn.Linear(6, 3).double() for _ in range(2)]
            params, _ = stack_module_state(members)  # type: ignore[arg-type]
            self.own = nn.ParameterDict({name: nn.Parameter(p) for name, p in params.items()})
            self.form, self.into = [nn.Linear(6, 3).double().to("meta")], Block()

        def forward(self, x: Any) -> Any:
            def call(params: Any, x: Any) -> Any:
                return functional_call(self.form[0], params, (x,))

            return vmap(call, (0, None))(dict(self.own), self.into(x)).mean(0)

    train(script, Ensemble)


@habit("models", sums=True)
def a_part_in_a_plain_list(script: Script) -> None:
    """Layers in a list of Python: no parameters of the model, so nothing trains them."""

    class Hidden(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.lost = [nn.Linear(6, 6).double()]

        def forward(self, x: Any) -> Any:
            return super().forward(x + self.lost[0](x))

    train(script, Hidden)


@habit("models", sums=True)
def a_train_method_that_leaves_norms_in_evaluation(script: Script) -> None:
    """Detectors: `train()` is overridden, so that BatchNorm keeps its statistics."""

    class Kept(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: Any) -> Any:
            return super().forward(self.norm(x))

    model = net(Kept)
    model.train()
    run = script.begin(model)
    script.train(run)
    script.note(run.evaluate(torch.utils.data.TensorDataset(X[:16], Y[:16]))["loss"])
    script.note(run.step(script.batch(3)).loss)


@habit("models", sums=True)
def forces_by_autograd_in_forward(script: Script) -> None:
    """Potentials of molecules: the forward pass differentiates its energy by its inputs."""

    class Potential(Chain):
        def forward(self, x: Any) -> Any:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = super().forward(x).square().sum(-1)
                (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
            return energy, force

    def loss(o: Any, y: Any) -> Any:
        energy, force = o
        return (energy - y[:, 0]).square().sum() + 0.1 * force.square().sum(), len(y)

    run = train(script, Potential, loss=loss)
    script.note(run.evaluate(torch.utils.data.TensorDataset(X[:16], Y[:16]))["loss"])


@habit("models", sums=True)
def a_flow_with_the_determinant_of_a_weight(script: Script) -> None:
    """Glow: `slogdet` of a 1 × 1 convolution counts once for each sample."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.eye(6) + 0.1 * torch.randn(6, 6))
            self.net = Block()

        def forward(self, x: Any) -> Any:
            z = self.net(x @ self.mix)
            return z, torch.linalg.slogdet(self.mix)[1].expand(len(x))

    def loss(o: Any, y: Any) -> Any:
        return (0.5 * o[0].square().sum() - o[1].sum()), len(y)

    train(script, Flow, loss=loss)


@habit("models", sums=True)
def weights_made_by_another_network(script: Script) -> None:
    """A hypernetwork: each sample has a matrix of its own."""

    class Hyper(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.make = nn.Linear(6, 36)

        def forward(self, x: Any) -> Any:
            own = self.make(x).view(len(x), 6, 6)
            return super().forward(torch.bmm(own, x.unsqueeze(-1))[..., 0])

    train(script, Hyper)


class Loaded(Chain):
    """Two experts with a bias that follows their load, without an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.register_buffer("bias", torch.zeros(2))
        self.register_buffer("load", torch.zeros(2), persistent=False)

    def forward(self, x: Any) -> Any:
        x = self.layers(x)
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).argmax(-1)
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.load += F.one_hot(chosen, 2).sum(0)
        parts = torch.stack([one(x) for one in self.experts], 1)
        rows = torch.arange(len(x))
        return self.head(x + scores[rows, chosen, None] * parts[rows, chosen])


def follow(script: Script, gather: Any) -> None:
    run = script.begin(net(Loaded))
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        load = gather(run.model.load)
        run.model.bias += 0.5 * (load.mean() - load).sign()
        run.model.load.zero_()


@habit("models", sums=False)
def a_bias_of_experts_by_the_load_of_a_rank(script: Script) -> None:
    follow(script, lambda load: load.clone())


@habit("models", sums=True)
def a_bias_of_experts_by_the_load_of_all_ranks(script: Script) -> None:
    """As torchtitan: counts of all ranks, summed before the bias moves."""

    def gather(load: torch.Tensor) -> torch.Tensor:
        found = load.clone()
        if not script.plain and torch.distributed.is_initialized():
            torch.distributed.all_reduce(found)
        return found

    follow(script, gather)


@habit("models", sums=False)
def experts_with_a_capacity(script: Script) -> None:
    """Each expert takes half of the batch at most, in order; the rest passes by."""

    class Limited(Loaded):
        def forward(self, x: Any) -> Any:
            x = self.layers(x)
            scores = self.router(x).sigmoid()
            chosen = scores.argmax(-1)
            place = F.one_hot(chosen, 2).cumsum(0)[torch.arange(len(x)), chosen]
            kept = (place <= (len(x) + 1) // 2)[:, None]
            parts = torch.stack([one(x) for one in self.experts], 1)
            rows = torch.arange(len(x))
            return self.head(x + kept * scores[rows, chosen, None] * parts[rows, chosen])

    train(script, Limited)


@habit("models", sums=True)
def a_buffer_filled_by_the_loop(script: Script) -> None:
    """`model.tau.fill_(…)` before each step, the same on all ranks."""

    class Cooled(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("tau", torch.ones(()))

        def forward(self, x: Any) -> Any:
            return super().forward(x / self.tau)

    run = script.begin(net(Cooled))
    for step in range(3):
        run.model.tau.fill_(1.0 + step)
        script.note(run.step(script.batch(step)).loss)


@habit("models", sums=True)
def a_buffer_replaced_by_the_loop(script: Script) -> None:
    """`block.scale = torch.tensor(…)` puts another tensor into the place of the buffer."""

    class Buffered(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x: Any) -> Any:
            return x + self.scale * self.down(F.gelu(self.up(x)))

    class Model(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Buffered() for _ in range(4)))

    run = script.begin(net(Model))
    for step in range(3):
        for one in run.model.modules():
            if isinstance(one, Buffered):
                one.scale = torch.full((6,), 1.0 / (1 + step), dtype=torch.float64)
        script.note(run.step(script.batch(step)).loss)


@habit("models", sums=True)
def a_reference_by_the_model_without_adapters(script: Script) -> None:
    """peft: the same model with its adapters switched off gives the reference, without gradients."""

    class Adapted(Chain):
        enabled = True

        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)

        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            out = self.head(hidden)
            return out + self.up(self.down(hidden)) if self.enabled else out

    run = script.begin(net(Adapted))
    for step in range(2):
        for micro in run.micro_batches(script.batch(step)):
            run.model.enabled = False
            with torch.no_grad():
                old = run.model(micro.inputs).log_softmax(-1)
            run.model.enabled = True
            new = run.model(micro.inputs)
            far = F.kl_div(new.log_softmax(-1), old, reduction="sum", log_target=True)
            run.backward(squares(new, micro.targets)[0] + 0.1 * far, len(new))
        script.note(run.update().loss)


@habit("models", sums=True)
def forced_by_the_step(script: Script) -> None:
    """Scheduled sampling: the loop decides before each step whether the decoder sees targets."""

    class Decoder(nn.Module):
        forced = True

        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(2, 8), nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            hidden, seen, outputs = x.new_zeros(len(x), 8), x[:, :2], []
            for place in range(3):
                hidden = self.cell(seen, hidden)
                outputs.append(self.head(hidden))
                seen = x[:, 2 * place : 2 * place + 2] if self.forced else outputs[-1]
            return torch.stack(outputs, 1)

    def loss(o: Any, y: Any) -> Any:
        return (o - y[:, :, None]).square().sum(), len(y)

    run = script.begin(net(Decoder), loss=loss, sample=script.batch(0))
    for step in range(3):
        run.model.forced = step % 2 == 0
        script.note(run.step(script.batch(step)).loss)


@habit("loops", sums=True)
def episodes_as_samples(script: Script) -> None:
    """Prototypical networks: each sample is an episode with a support set and queries."""

    class Prototypes(Chain):
        def forward(self, x: Any) -> Any:
            features = self.layers(x)
            support, query = features[:, :3], features[:, 3:]
            return -torch.cdist(query, support).flatten(1)

    def loss(o: Any, label: Any) -> Any:
        scores = o.view(len(o), 2, 3).flatten(0, 1)
        return F.cross_entropy(scores, label.flatten(), reduction="sum"), label.numel()

    def batch(step: int) -> Any:
        x, label = script.share(step, FIVES, CLASSES)
        return x, torch.stack([label, (label + 1) % 3], 1)

    train(script, Prototypes, batch, loss=loss)
