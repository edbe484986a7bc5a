"""Habits of models: norms, ties, checkpoints, hooks, buffers, branches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from habits.habit_sides import CLASSES, Block, Chain, Script, X, net, squares
from habits.habit_table import habit


def train(script: Script, kind: Any, **more: Any) -> Any:
    run = script.begin(net(kind), **more)
    script.train(run)
    return run


class Frozen(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[:2].requires_grad_(False)


@habit("models", sums=True)
def a_frozen_trunk(script: Script) -> None:
    train(script, Frozen)


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].down.weight = self.layers[0].down.weight


@habit("models", sums=True)
def tied_weights(script: Script) -> None:
    train(script, Tied)


class Recomputed(Chain):
    reentrant = False

    def forward(self, x: Any) -> Any:
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Reentrant(Recomputed):
    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return super().forward(self.into(x))


@habit("models", sums=True)
def a_checkpoint_of_ones_own(script: Script) -> None:
    train(script, Recomputed)


@habit("models", sums=True)
def a_reentrant_checkpoint(script: Script) -> None:
    train(script, Reentrant)


class Normalised(Chain):
    """BatchNorm over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Any) -> Any:
        return super().forward(self.norm(x))


class Synchronised(Normalised):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(6)


@habit("models", sums=False)
def batch_norm(script: Script) -> None:
    """Statistics of the whole batch in plain PyTorch, of micro-batches here."""
    train(script, Normalised)


@habit("models", sums=False)
def batch_norm_without_a_given_micro_batch(script: Script) -> None:
    train(script, Normalised, micro_batch=None)


@habit("models", sums=False)
def synchronised_batch_norm(script: Script) -> None:
    if script.plain:
        train(script, Normalised)
    else:
        train(script, Synchronised, micro_batch=None)


@habit("models", sums=False)
def batch_norm_with_the_argument_for_all_ranks(script: Script) -> None:
    train(script, Normalised, **({} if script.plain else {"sync_batch_norm": True}), **WHOLE_BATCH)


class Images(nn.Module):
    """Convolutions with BatchNorm, converted as scripts of torch's DDP do."""

    momentum: float | None = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4, momentum=self.momentum), nn.ReLU(),
            nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4, affine=False), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(24, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(x.unsqueeze(1)).flatten(1))


class Averaged(Images):
    momentum = None


def converted(script: Script, kind: Any) -> None:
    model = net(kind)
    if not script.plain:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    script.train(script.begin(model, **WHOLE_BATCH))


WHOLE_BATCH = {"micro_batch": None}


@habit("models", sums=False)
def converted_batch_norms(script: Script) -> None:
    converted(script, Images)


@habit("models", sums=False)
def converted_batch_norms_that_average(script: Script) -> None:
    converted(script, Averaged)


@habit("models", sums=False)
def a_running_statistic_of_instance_norm(script: Script) -> None:
    class Instance(Images):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1] = nn.InstanceNorm1d(4, track_running_stats=True)
            self.layers[4] = nn.Identity()

    train(script, Instance)


@habit("models", sums=True)
def gradients_of_the_inputs_of_every_block(script: Script) -> None:
    """A full backward hook of a block sees the gradient of its input, also of a stage's first."""
    missing: list[str] = []
    run = script.begin()
    for name, block in list(run.model.layers.named_children())[1:]:

        def hook(module: Any, before: Any, after: Any, name: str = name) -> None:
            if before[0] is None:
                missing.append(name)

        block.register_full_backward_hook(hook)
    script.train(run)
    script.note(len(missing))


@habit("models", sums=True)
def batch_norm_in_evaluation_mode(script: Script) -> None:
    class Kept(Normalised):
        def __init__(self) -> None:
            super().__init__()
            self.train()

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.norm.eval()
            return self

    train(script, Kept)


class Counting(Chain):
    """A buffer of the root that counts rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.rows += len(x)
        return super().forward(x)


@habit("models", sums=True)
def a_buffer_that_counts_samples(script: Script) -> None:
    train(script, Counting)


class Tracking(Chain):
    """A buffer with a running mean of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x)


@habit("models", sums=False)
def a_running_mean_of_inputs(script: Script) -> None:
    train(script, Tracking)


class WeightNormed(Chain):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.head)


@habit("models", sums=True)
def weight_norm(script: Script) -> None:
    train(script, WeightNormed)


class InnerWeightNormed(Chain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.layers:
            parametrizations.weight_norm(block.up)


@habit("models", sums=True)
def weight_norm_inside_of_blocks(script: Script) -> None:
    train(script, InnerWeightNormed)


class Orthogonal(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6, bias=False)
        parametrizations.orthogonal(self.into)

    def forward(self, x: Any) -> Any:
        return super().forward(self.into(x))


@habit("models", sums=True)
def an_orthogonal_layer(script: Script) -> None:
    train(script, Orthogonal)


class Unused(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(3, 3)


@habit("models", sums=True)
def an_unused_layer(script: Script) -> None:
    train(script, Unused)


class Detached(Chain):
    def forward(self, x: Any) -> Any:
        return self.head(self.layers(x).detach())


@habit("models", sums=True)
def a_trunk_cut_off_by_detach(script: Script) -> None:
    """Right numbers: it trains as little in plain PyTorch, and a line says so."""
    train(script, Detached)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.cell(x.reshape(len(x), 3, 2))[0][:, -1])


@habit("models", sums=True)
def an_lstm(script: Script) -> None:
    train(script, Recurrent)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(24, 3)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.one(x.unsqueeze(1)))
        return self.head(self.norm(F.relu(self.two(x))).flatten(1))


@habit("models", sums=True)
def a_convolution(script: Script) -> None:
    train(script, Convolutional)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(2, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        x = self.into(x.reshape(len(x), 3, 2))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@habit("models", sums=True)
def encoder_layers_of_torch(script: Script) -> None:
    train(script, Attentive)


class Looked(nn.Module):
    """An embedding, and a bag of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 6)
        self.body = Chain()

    def forward(self, ids: Any) -> Any:
        return self.body(self.table(ids))


@habit("models", sums=True)
def an_embedding(script: Script) -> None:
    def batch(step: int) -> Any:
        ids, y = script.share(step, CLASSES, X[:, :3])
        return ids, y

    run = script.begin(net(Looked), sample=batch(0))
    script.train(run, batch=batch)


@habit("models", sums=True)
def layers_skipped_by_step(script: Script) -> None:
    class Skipping(Chain):
        skipped = -1

        def forward(self, x: Any) -> Any:
            for place, block in enumerate(self.layers):
                if place != self.skipped:
                    x = block(x)
            return self.head(x)

    model = net(Skipping)
    run = script.begin(model)
    for step in range(4):
        run.model.skipped = step % 4 - 1
        script.note(run.step(script.batch(step)).loss)


@habit("models", sums=True)
def a_head_by_task(script: Script) -> None:
    """Rows of task a and of task b each take their own head."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.ModuleList([Block(), Block()])
            self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

        def forward(self, x: Any) -> Any:
            for block in self.trunk:
                x = block(x)
            found = x.new_zeros(len(x), 3)
            for place, head in enumerate(self.heads):
                rows = (x[:, 0] > 0) == bool(place)
                if rows.any():
                    found = found.index_put((rows.nonzero()[:, 0],), head(x[rows]))
            return found

    train(script, Heads)


@habit("models", sums=True)
def a_method_of_the_model_beside_forward(script: Script) -> None:
    """`run.model.encode(x)`, as dual encoders have it."""

    class Encoder(Chain):
        def encode(self, x: Any) -> Any:
            return self.layers(x)

    run = script.begin(net(Encoder))
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
    with torch.no_grad():
        script.note(run.model.encode(X[:4]).sum())


@habit("models", sums=True)
def a_forward_of_the_model_between_steps(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        with torch.no_grad():
            script.note(run.model(X[:4]).sum())


@habit("models", sums=True)
def gradients_of_inputs_by_a_full_backward_hook(script: Script) -> None:
    seen: list[torch.Tensor] = []
    run = script.begin()
    run.model.layers[0].up.register_full_backward_hook(
        lambda module, before, after: seen.append(after[0].detach().clone()) and None
    )
    script.train(run)
    assert seen or script.layout in ("tp", "pp")


@habit("models", sums=True)
def a_forward_hook_that_changes_outputs(script: Script) -> None:
    run = script.begin()
    run.model.layers[1].register_forward_hook(lambda module, inputs, outputs: outputs * 0.5)
    script.train(run)


@habit("models", sums=True)
def a_hook_given_before_the_start(script: Script) -> None:
    model = net()
    model.layers[1].register_forward_hook(lambda module, inputs, outputs: outputs * 0.5)
    script.train(script.begin(model))


@habit("models", sums=True)
def a_parameter_of_the_root(script: Script) -> None:
    class Scaled(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            return super().forward(x) * self.scale

    train(script, Scaled)


@habit("models", sums=True)
def a_weight_used_outside_of_its_layer(script: Script) -> None:
    class Transposed(Chain):
        def forward(self, x: Any) -> Any:
            x = super().forward(x)
            return x @ self.head.weight @ self.head.weight.T

    train(script, Transposed)


@habit("models", sums=True)
def mixture_of_experts_with_an_auxiliary_loss(script: Script) -> None:
    """The router's auxiliary loss is a sum over samples too."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(6, 2)
            self.experts = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Any) -> Any:
            weights = self.router(x).softmax(-1)
            mixed = sum(weights[:, n, None] * one(x) for n, one in enumerate(self.experts))
            return self.head(mixed), weights

    def loss(o: Any, y: Any) -> Any:
        outputs, weights = o
        return squares(outputs, y)[0] + 0.1 * (weights * weights.log()).sum(), len(y)

    train(script, Mixture, loss=loss)
