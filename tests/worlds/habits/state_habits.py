"""Habits of models and losses that remember, couple samples, or speak to each other beside outputs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint_sequential

import shoal
from habits.habit_sides import CLASSES, Block, Chain, Script, X, Y, net, squares
from habits.habit_table import habit
from habits.loss_habits import classes, train

# ---- losses


@habit("losses", sums=True)
def activations_by_a_hook_in_the_loss(script: Script) -> None:
    """A forward hook keeps a block's output, and the loss adds its squares."""
    model = net()
    kept: dict[str, torch.Tensor] = {}
    model.layers[1].register_forward_hook(lambda m, i, o: kept.update(hidden=o) and None)

    def loss(o: Any, y: Any) -> Any:
        return squares(o, y)[0] + 0.1 * kept["hidden"].square().sum(), len(y)

    train(script, loss, model=model)


@habit("losses", sums=True)
def an_auxiliary_loss_kept_on_the_module(script: Script) -> None:
    """`self.extra` of the last forward pass, as mixtures and quantisers have it."""

    class Kept(Chain):
        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            self.extra = hidden.square().sum()
            return self.head(hidden)

    model = net(Kept)
    train(script, lambda o, y: (squares(o, y)[0] + 0.1 * model.extra, len(y)), model=model)


@habit("losses", sums=True)
def uncertainty_weights_in_the_outputs(script: Script) -> None:
    """Kendall: a learned weight of each task, which the model returns beside its outputs."""

    class Weighted(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.logs = nn.Parameter(torch.zeros(2))

        def forward(self, x: Any) -> Any:
            return super().forward(x), self.logs

    def loss(o: Any, y: Any) -> Any:
        out, logs = o
        one, two = (out - y).square().sum(), out.abs().sum()
        total = (-logs[0]).exp() * one + (-logs[1]).exp() * two + logs.sum() * len(y)
        return total, len(y)

    train(script, loss, model=net(Weighted))


@habit("losses", sums=True)
def a_loss_that_reads_a_parameter_of_the_model(script: Script) -> None:
    class Weighted(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.log = nn.Parameter(torch.zeros(()))

    model = net(Weighted)

    def loss(o: Any, y: Any) -> Any:
        return (-model.log).exp() * squares(o, y)[0] + model.log * len(y), len(y)

    train(script, loss, model=model)


@habit("losses", sums=False)
def a_weight_that_grows_with_calls_of_the_loss(script: Script) -> None:
    """KL annealing: `self.calls += 1` in the loss counts micro-batches, not steps."""

    class Annealed:
        calls = 0

        def __call__(self, o: Any, y: Any) -> Any:
            self.calls += 1
            return squares(o, y)[0] + 0.05 * self.calls * o.abs().sum(), len(y)

    train(script, Annealed())


@habit("losses", sums=False)
def a_baseline_that_follows_the_rewards(script: Script) -> None:
    """REINFORCE with a running mean of the batch, kept by the loss."""

    class Baseline:
        mean = 0.0

        def __call__(self, o: Any, y: Any) -> Any:
            self.mean = 0.9 * self.mean + 0.1 * float(y[:, 0].mean())
            gain = (y[:, 0] - self.mean).unsqueeze(1)
            return -(gain * o.log_softmax(-1)).sum(), len(y)

    train(script, Baseline())


@habit("losses", sums=False)
def a_queue_of_outputs_in_the_loss(script: Script) -> None:
    """Negatives of earlier batches, in a deque."""
    queue: deque[torch.Tensor] = deque(maxlen=3)

    def loss(o: Any, y: Any) -> Any:
        total = squares(o, y)[0]
        for old in queue:
            total = total + 0.1 * (F.normalize(o, dim=-1) @ F.normalize(old, dim=-1).T).sum()
        queue.append(o.detach())
        return total, len(y)

    train(script, loss)


@habit("losses", sums=True)
def a_weight_by_step_in_the_loss(script: Script) -> None:
    """The script sets it before each step: the same for all micro-batches."""
    weight = {"kl": 0.0}

    def loss(o: Any, y: Any) -> Any:
        return squares(o, y)[0] + weight["kl"] * o.abs().sum(), len(y)

    run = script.begin(loss=loss)
    for step in range(3):
        weight["kl"] = 0.1 * step
        script.note(run.step(script.batch(step)).loss)


@habit("losses", sums=False)
def noise_on_labels_in_the_loss(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        return (o - y - 0.1 * torch.randn_like(y)).square().sum(), len(y)

    train(script, loss)


@habit("losses", sums=True)
def weights_of_samples_in_the_targets(script: Script) -> None:
    """Importance weights: the count is their sum."""

    def loss(o: Any, targets: Any) -> Any:
        y, weight = targets
        return ((o - y).square().sum(-1) * weight).sum(), weight.sum()

    def batch(step: int) -> Any:
        x, y, weight = script.share(step, X, Y, X[:, 5].abs())
        return x, (y, weight)

    train(script, loss, batch)


@habit("losses", sums=False)
def dice_over_the_batch(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        p, t = o.sigmoid(), (y > 0).double()
        ratio = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
        return ratio, 1

    train(script, loss)


@habit("losses", sums=True)
def dice_by_sample(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        p, t = o.sigmoid(), (y > 0).double()
        return (1 - (2 * (p * t).sum(-1) + 1) / (p.sum(-1) + t.sum(-1) + 1)).sum(), len(y)

    train(script, loss)


@habit("losses", sums=False)
def redundancy_over_the_batch(script: Script) -> None:
    """Barlow Twins: a correlation of columns over the batch."""

    def loss(o: Any, y: Any) -> Any:
        a = (o - o.mean(0)) / (o.std(0, correction=0) + 0.1)
        b = (y - y.mean(0)) / (y.std(0, correction=0) + 0.1)
        return (a.T @ b / len(y) - torch.eye(3).double()).square().sum(), 1

    train(script, loss)


@habit("losses", sums=False)
def hardest_triplets_in_the_batch(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        far = torch.cdist(o, o)
        same = y[:, None] == y[None]
        worst = (far * same).amax(1) - (far + 1e3 * same).amin(1)
        return F.softplus(worst).sum(), len(y)

    train(script, loss, classes(script))


@habit("losses", sums=False)
def a_loss_that_returns_a_dict(script: Script) -> None:
    if script.plain:
        return train(script, squares)
    return train(script, lambda o, y: {"loss": squares(o, y)[0], "count": len(y)})


@habit("losses", sums=False)
def a_loss_as_a_number_of_python(script: Script) -> None:
    """`.item()` in the loss: no gradient."""
    if script.plain:
        return train(script, squares)
    return train(script, lambda o, y: (squares(o, y)[0].item(), len(y)))


@habit("losses", sums=False)
def a_batch_of_nan_on_one_rank(script: Script) -> None:
    def batch(step: int) -> Any:
        x, y = script.batch(step)
        return (x * float("nan") if step == 1 and script.rank == 0 else x), y

    script.train(script.begin(), batch=batch)


@habit("losses", sums=True)
def mean_of_samples_of_two_terms(script: Script) -> None:
    """The README's way for a bare mean, of a class of the user's."""

    class Both(nn.Module):
        def forward(self, o: Any, y: Any) -> Any:
            return F.l1_loss(o, y) + 0.5 * F.mse_loss(o, y)

    mean = Both()
    train(script, (lambda o, y: (mean(o, y), 1)) if script.plain else shoal.mean_of_samples(mean))


# ---- models


class Centred(Chain):
    """Inputs minus their mean over the batch."""

    def forward(self, x: Any) -> Any:
        return super().forward(x - x.mean(0))


@habit("models", sums=False)
def inputs_centred_over_the_batch(script: Script) -> None:
    script.train(script.begin(net(Centred)))


class Attending(Chain):
    """Samples attend to each other, as set transformers and minibatch discrimination do."""

    def forward(self, x: Any) -> Any:
        hidden = self.layers(x)
        mixed = (hidden @ hidden.T / 6**0.5).softmax(-1) @ hidden
        return self.head(mixed)


@habit("models", sums=False)
def samples_that_attend_to_each_other(script: Script) -> None:
    script.train(script.begin(net(Attending)))


class Carrying(nn.Module):
    """A recurrent model that keeps its state between batches."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)
        self.state: torch.Tensor | None = None

    def forward(self, x: Any) -> Any:
        state = x.new_zeros(8) if self.state is None else self.state
        hidden = self.cell(x, state.expand(len(x), 8))
        self.state = hidden.detach().mean(0)
        return self.head(hidden)


@habit("models", sums=False)
def a_state_kept_between_batches(script: Script) -> None:
    script.train(script.begin(net(Carrying)))


class Queued(Chain):
    """MoCo: the newest features replace the oldest of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, 6))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Any) -> Any:
        hidden = self.layers(x)
        old = self.queue.clone()
        with torch.no_grad():
            rows = (torch.arange(len(x)) + self.place) % 16
            self.queue[rows] = hidden.detach()
            self.place += len(x)
        return self.head(hidden + 0.1 * hidden @ old.T @ old)


@habit("models", sums=False)
def a_queue_of_features_in_a_buffer(script: Script) -> None:
    script.train(script.begin(net(Queued)))


class Counted(Chain):
    """A number of Python that counts forward passes."""

    passes = 0

    def forward(self, x: Any) -> Any:
        self.passes += 1
        return super().forward(x) / self.passes


@habit("models", sums=False)
def a_count_of_forward_passes(script: Script) -> None:
    script.train(script.begin(net(Counted)))


class Spectral(Chain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.layers:
            parametrizations.spectral_norm(block.up)


@habit("models", sums=False)
def spectral_norm_inside_of_blocks(script: Script) -> None:
    """Its power iteration runs once a forward pass."""
    script.train(script.begin(net(Spectral)))


@habit("models", sums=True)
def blocks_skipped_by_sample(script: Script) -> None:
    """Stochastic depth whose draws come with the data."""

    class Deep(Chain):
        def forward(self, x: Any) -> Any:
            for place, block in enumerate(self.layers):
                kept = (x[:, place : place + 1] > -0.5).double()
                x = x + kept * (block(x) - x)
            return self.head(x)

    script.train(script.begin(net(Deep)))


@habit("models", sums=True)
def one_block_three_times(script: Script) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), nn.Linear(6, 3)

        def forward(self, x: Any) -> Any:
            for _ in range(3):
                x = self.block(x)
            return self.head(x)

    script.train(script.begin(net(Shared)))


@habit("models", sums=True)
def a_prompt_before_the_sequence(script: Script) -> None:
    """A learned prefix, expanded over the batch."""

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt, self.into = nn.Parameter(torch.zeros(1, 2, 8)), nn.Linear(2, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            x = self.into(x.reshape(len(x), 3, 2))
            x = torch.cat([self.prompt.expand(len(x), -1, -1), x], 1)
            return self.head(self.layer(x)[:, 0])

    script.train(script.begin(net(Prompted)))


@habit("models", sums=True)
def low_rank_adapters_by_hand(script: Script) -> None:
    class Adapted(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 3)

        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            return self.head(hidden) + self.b(self.a(hidden))

    script.train(script.begin(net(Adapted)))


@habit("models", sums=True)
def standardised_weights(script: Script) -> None:
    """Weight standardisation: the forward pass computes with rows of mean 0."""

    class Standard(Chain):
        def forward(self, x: Any) -> Any:
            w = self.head.weight
            w = (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-3)
            return F.linear(self.layers(x), w, self.head.bias)

    script.train(script.begin(net(Standard)))


@habit("models", sums=True)
def activations_changed_in_place(script: Script) -> None:
    class InPlace(Chain):
        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            hidden += 0.1
            hidden.mul_(0.5).relu_()
            return self.head(hidden)

    script.train(script.begin(net(InPlace)))


@habit("models", sums=True)
def checkpoints_over_a_sequence(script: Script) -> None:
    class Sequential(Chain):
        def forward(self, x: Any) -> Any:
            return self.head(checkpoint_sequential(self.layers, 2, x, use_reentrant=False))

    script.train(script.begin(net(Sequential)))


@habit("models", sums=True)
def activations_saved_on_the_host(script: Script) -> None:
    class Saved(Chain):
        def forward(self, x: Any) -> Any:
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    script.train(script.begin(net(Saved)))


@habit("models", sums=True)
def no_gradients_in_the_trunk(script: Script) -> None:
    class Probe(Chain):
        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                hidden = self.layers(x)
            return self.head(hidden)

    script.train(script.begin(net(Probe)))


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclass
class Outputs:
    logits: torch.Tensor
    hidden: torch.Tensor


@habit("models", sums=True)
def outputs_in_a_named_tuple(script: Script) -> None:
    class Named(Chain):
        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            return Pair(self.head(hidden), hidden)

    train(script, lambda o, y: squares(o.logits, y), model=net(Named))


@habit("models", sums=True)
def outputs_in_a_dataclass(script: Script) -> None:
    class Named(Chain):
        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            return Outputs(self.head(hidden), hidden)

    train(script, lambda o, y: squares(o.logits, y), model=net(Named))


@habit("models", sums=True)
def a_model_compiled_before_the_start(script: Script) -> None:
    model = net()
    compiled = model if script.plain else torch.compile(model, backend="eager")
    script.train(script.begin(compiled, lambda p: torch.optim.SGD(p, lr=0.05)))


@habit("models", sums=True)
def a_model_compiled_in_place(script: Script) -> None:
    model = net()
    model.compile(backend="eager")
    script.train(script.begin(model))


@habit("models", sums=True)
def a_model_compiled_in_the_loop(script: Script) -> None:
    run = script.begin()
    compiled = torch.compile(run.model, backend="eager")
    for step in range(2):
        for micro in run.micro_batches(script.batch(step)):
            total, count = squares(compiled(micro.inputs), micro.targets)
            run.backward(total, count)
        script.note(run.update().loss)


@habit("models", sums=True)
def a_model_in_data_parallel(script: Script) -> None:
    """`nn.DataParallel(model)`, left from a script for one machine."""
    script.train(script.begin(net() if script.plain else nn.DataParallel(net())))


@habit("models", sums=True)
def a_traced_model(script: Script) -> None:
    model = net()
    script.train(script.begin(model if script.plain else torch.jit.trace(model, X[:2])))


@habit("models", sums=True)
def a_lazy_layer(script: Script) -> None:
    """`nn.LazyLinear`: its weight has no shape before the first forward pass."""

    class Lazy(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.LazyLinear(3)

    torch.manual_seed(0)
    model = Lazy().double()
    if script.plain:
        torch.manual_seed(1)
        model(X[:2])
    torch.manual_seed(1)
    script.train(script.begin(model))


@habit("models", sums=True)
def a_hook_on_all_modules(script: Script) -> None:
    """`register_module_forward_hook`: for every module of the process."""
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, outputs: outputs * 0.9 if isinstance(module, Block) else None
    )
    try:
        script.train(script.begin())
    finally:
        handle.remove()


@habit("models", sums=True)
def training_in_evaluation_mode(script: Script) -> None:
    run = script.begin()
    run.model.eval()
    script.train(run)


@habit("models", sums=True)
def anomalies_detected(script: Script) -> None:
    run = script.begin()
    with torch.autograd.set_detect_anomaly(True):
        script.train(run)


@habit("models", sums=True)
def inference_mode_between_steps(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        with torch.inference_mode():
            script.note(run.model(X[:4]).sum())


@habit("models", sums=True)
def pseudo_labels_by_the_model(script: Script) -> None:
    """Self-training: `run.model` labels the batch that trains it."""
    run = script.begin()
    for step in range(3):
        x, y = script.batch(step)
        with torch.no_grad():
            soft = run.model(x)
        script.note(run.step((x, 0.5 * y + 0.5 * soft)).loss)


@habit("models", sums=True)
def pseudo_labels_by_predict(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        x, y = script.batch(step)
        script.note(run.step((x, 0.5 * y + 0.5 * run.predict(x))).loss)


@habit("models", sums=True)
def a_loss_over_ids_with_a_table_of_the_model(script: Script) -> None:
    """Tied by hand: logits are products with the table of the embedding."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body = nn.Embedding(3, 6), nn.Sequential(Block(), Block())

        def forward(self, ids: Any) -> Any:
            return F.linear(self.body(self.table(ids)), self.table.weight)

    def batch(step: int) -> Any:
        return script.share(step, CLASSES, CLASSES.flip(0))

    def loss(o: Any, y: Any) -> Any:
        return F.cross_entropy(o, y, reduction="sum"), len(y)

    train(script, loss, batch, model=net(Tied))
