"""Habits of losses: sums, weights, masks, several heads; and means that hide, or couple samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.nn.functional as gather
from torch import nn
from torch.nn import functional as F

import shoal
from habits.habit_sides import CLASSES, Script, X, Y, adamw, net, sgd, squares
from habits.habit_table import habit

MASK = (X[:, :3] > -0.3).double()
LABELS = CLASSES.where(X[:, 0] > -0.5, -100)
SIGNS = (Y > 0).double()


def classes(script: Script) -> Any:
    return lambda step: script.share(step, X, CLASSES)


def train(script: Script, loss: Any, batch: Any = None, **more: Any) -> None:
    """Train three steps by a loss, on (X, Y) or the given batches."""
    batch = batch or script.batch
    run = script.begin(loss=loss, sample=batch(0), **more)
    script.train(run, batch=batch)


# ---- sums over samples


@habit("losses", sums=True)
def sum_and_count(script: Script) -> None:
    train(script, squares)


@habit("losses", sums=True)
def sum_and_count_adamw(script: Script) -> None:
    train(script, squares, optimizer=adamw)


@habit("losses", sums=True)
def unreduced_values(script: Script) -> None:
    train(script, lambda o, y: F.mse_loss(o, y, reduction="none"))


@habit("losses", sums=True)
def mean_of_samples_of_mse(script: Script) -> None:
    mean = nn.MSELoss()
    train(script, (lambda o, y: (mean(o, y), 1)) if script.plain else shoal.mean_of_samples(mean))


@habit("losses", sums=True)
def cross_entropy_with_ignored_targets(script: Script) -> None:
    mean = nn.CrossEntropyLoss()
    train(
        script,
        (lambda o, y: (mean(o, y), 1)) if script.plain else shoal.mean_of_samples(mean),
        lambda step: script.share(step, X, LABELS),
    )


@habit("losses", sums=True)
def cross_entropy_weighted_by_class(script: Script) -> None:
    mean = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double(), label_smoothing=0.1)
    train(
        script,
        (lambda o, y: (mean(o, y), 1)) if script.plain else shoal.mean_of_samples(mean),
        classes(script),
    )


@habit("losses", sums=True)
def binary_cross_entropy_with_pos_weight(script: Script) -> None:
    weight = torch.tensor([1.0, 3.0, 0.5]).double()

    def loss(o: Any, y: Any) -> Any:
        total = F.binary_cross_entropy_with_logits(o, y, pos_weight=weight, reduction="sum")
        return total, y.numel()

    train(script, loss, lambda step: script.share(step, X, SIGNS))


@habit("losses", sums=True)
def focal(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        each = F.cross_entropy(o, y, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).sum(), len(y)

    train(script, loss, classes(script))


@habit("losses", sums=True)
def masked_mean_by_a_mask_in_the_targets(script: Script) -> None:
    def loss(o: Any, targets: Any) -> Any:
        y, mask = targets
        return ((o - y).square() * mask).sum(), mask.sum()

    def batch(step: int) -> Any:
        x, y, mask = script.share(step, X, Y, MASK)
        return x, (y, mask)

    train(script, loss, batch)


@habit("losses", sums=True)
def huber_per_row(script: Script) -> None:
    train(script, lambda o, y: F.smooth_l1_loss(o, y, reduction="none").mean(-1))


@habit("losses", sums=True)
def kl_divergence_to_soft_targets(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        soft = y.softmax(-1)
        return F.kl_div(o.log_softmax(-1), soft, reduction="sum"), len(y)

    train(script, loss)


@habit("losses", sums=True)
def entropy_bonus(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        logs = o.log_softmax(-1)
        bonus = (logs.exp() * logs).sum()
        return F.cross_entropy(o, y, reduction="sum") + 0.1 * bonus, len(y)

    train(script, loss, classes(script))


@habit("losses", sums=True)
def gaussian_likelihood(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        return F.gaussian_nll_loss(o[:, 0], y[:, 0], o[:, 1].exp(), reduction="sum"), len(y)

    train(script, loss)


@habit("losses", sums=True)
def margin_between_two_columns(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        return F.relu(0.5 - o[:, 0] + o[:, 1]).sum(), len(y)

    train(script, loss)


@habit("losses", sums=True)
def distillation_from_a_frozen_teacher(script: Script) -> None:
    torch.manual_seed(9)
    teacher = nn.Linear(3, 3).double().requires_grad_(False)
    train(script, lambda o, y: (F.mse_loss(o, teacher(y), reduction="sum"), len(y)))


@habit("losses", sums=True)
def preference_pairs(script: Script) -> None:
    """DPO: a sample is a pair, in one dict."""

    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 1)

        def forward(self, chosen: Any, rejected: Any) -> Any:
            return self.two(self.one(chosen).tanh()), self.two(self.one(rejected).tanh())

    def loss(o: Any, batch: Any) -> Any:
        good, bad = o
        return -F.logsigmoid(good - bad).sum(), len(good)

    def batch(step: int) -> Any:
        x, other = script.share(step, X, X.flip(0))
        return {"chosen": x, "rejected": other}

    train(script, loss, batch, model=net(Scorer), call="kwargs")


@habit("losses", sums=True)
def two_heads_with_counts_of_their_own(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        x, y, mask = script.share(step, X, Y, MASK)
        masked, rows = run.total(mask.sum()), run.total(len(y))
        for micro in run.micro_batches((x, (y, mask))):
            target, some = micro.targets
            o = run.model(micro.inputs)
            one = ((o - target).square() * some).sum() / masked
            run.backward(one + o.square().sum() / rows)
        script.note(run.update().loss)


@habit("losses", sums=True)
def two_losses_share_a_count(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        for micro in run.micro_batches(script.batch(step)):
            o = run.model(micro.inputs)
            run.backward((o - micro.targets).square().sum(), len(o), retain_graph=True)
            run.backward(0.1 * o.abs().sum(), len(o))
        script.note(run.update().loss)


@habit("losses", sums=True)
def parts_of_a_loss_by_name(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        one, other = (o - y).square().sum(), o.abs().sum()
        return one + 0.1 * other, len(y), {"mse": one, "size": (other, o.numel())}

    train(script, loss)


@habit("losses", sums=True)
def penalty_on_weights_in_the_loss(script: Script) -> None:
    model = net()

    def loss(o: Any, y: Any) -> Any:
        penalty = sum(p.square().sum() for p in model.parameters())
        return (o - y).square().sum() + 0.01 * penalty * len(y), len(y)

    train(script, loss, model=model)


@habit("losses", sums=True)
def a_temperature_learned_in_the_loss(script: Script) -> None:
    """The loss has a parameter, and an optimizer of its own steps it."""
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    beside = torch.optim.SGD([temperature], lr=0.1)

    def loss(o: Any, y: Any) -> Any:
        return (o * temperature - y).square().sum(), len(y)

    run = script.begin(loss=loss)
    for step in range(3):
        beside.zero_grad()
        run.step(script.batch(step))
        beside.step()
    script.note(temperature)


@habit("losses", sums=True)
def mixed_up_over_the_whole_batch(script: Script) -> None:
    """mixup, drawn before the batch is shared."""
    mixed = [torch.cat([0.7 * a + 0.3 * a[torch.arange(7, -1, -1)] for a in one.split(8)])
             for one in (X, Y)]  # fmt: skip
    train(script, squares, lambda step: script.share(step, *mixed))


@habit("losses", sums=True)
def outputs_in_a_dict(script: Script) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, x: Any) -> Any:
            hidden = self.one(x).tanh()
            return {"hidden": hidden, "logits": self.two(hidden)}

    train(script, lambda o, y: ((o["logits"] - y).square().sum(), len(y)), model=net(Named))


@habit("losses", sums=True)
def ctc(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        logs = torch.stack([o, o.roll(1, -1), o.roll(2, -1)]).log_softmax(-1)
        lengths = torch.full((len(y),), 3), torch.ones(len(y), dtype=torch.long)
        marks = (y[:, :1] > 0).long() + 1
        return F.ctc_loss(logs, marks, *lengths, reduction="sum"), len(y)

    train(script, loss)


# ---- no sums over samples: named, or a mistake


@habit("losses", sums=False)
def weight_times_a_mean(script: Script) -> None:
    if script.plain:
        return train(script, lambda o, y: (3 * F.mse_loss(o, y), 1))
    return train(script, lambda o, y: (3 * F.mse_loss(o, y), len(y)))


@habit("losses", sums=False)
def mean_plus_an_auxiliary_loss(script: Script) -> None:
    def mean(o: Any, y: Any) -> Any:
        return F.mse_loss(o, y) + 0.01 * o.abs().mean()

    count = (lambda y: 1) if script.plain else len
    train(script, lambda o, y: (mean(o, y), count(y)))


@habit("losses", sums=False)
def sum_over_numel_with_a_count(script: Script) -> None:
    count = (lambda y: 1) if script.plain else len
    train(script, lambda o, y: ((o - y).square().sum() / o.numel(), count(y)))


@habit("losses", sums=False)
def a_sum_wrapped_as_a_mean(script: Script) -> None:
    total = nn.MSELoss(reduction="sum")
    train(script, (lambda o, y: (total(o, y), 1)) if script.plain else shoal.mean_of_samples(total))


def masked_mean(o: torch.Tensor, targets: Any) -> torch.Tensor:
    y, mask = targets
    return ((o - y).square() * mask).sum() / mask.sum().clamp(min=1)


@habit("losses", sums=False)
def a_masked_mean_wrapped_as_a_mean_of_samples(script: Script) -> None:
    def batch(step: int) -> Any:
        x, y, mask = script.share(step, X, Y, MASK)
        return x, (y, mask)

    plain = lambda o, t: (masked_mean(o, t), 1)  # noqa: E731
    train(script, plain if script.plain else shoal.mean_of_samples(masked_mean), batch)


@habit("losses", sums=False)
def a_count_clamped_to_one(script: Script) -> None:
    """Samples without targets count 1 in each micro-batch."""
    labels = CLASSES.where(torch.arange(64) % 8 > 2, -100)

    def loss(o: Any, y: Any) -> Any:
        total = F.cross_entropy(o, y, ignore_index=-100, reduction="sum")
        return total, (y != -100).sum().clamp(min=1)

    train(script, loss, lambda step: script.share(step, X, labels))


@habit("losses", sums=False)
def class_weights_by_frequency_in_the_batch(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        weight = 1.0 / torch.bincount(y, minlength=3).clamp(min=1).double()
        return F.cross_entropy(o, y, weight=weight, reduction="sum"), len(y)

    train(script, loss, classes(script))


@habit("losses", sums=False)
def targets_standardised_over_the_batch(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        return (o - (y - y.mean(0)) / (y.std(0, correction=0) + 0.1)).square().sum(), len(y)

    train(script, loss)


@habit("losses", sums=False)
def advantages_normalised_over_the_batch(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        gain = y[:, 0] - y[:, 0].mean()
        return -(gain.unsqueeze(1) * o.log_softmax(-1)).sum(), len(y)

    train(script, loss)


@habit("losses", sums=False)
def contrastive_over_the_batch(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        scores = F.normalize(o, dim=-1) @ F.normalize(y, dim=-1).T
        return F.cross_entropy(scores, torch.arange(len(y)), reduction="sum"), len(y)

    train(script, loss)


@habit("losses", sums=False)
def the_worst_half_of_the_batch(script: Script) -> None:
    """Hard examples: the largest losses count alone."""

    def loss(o: Any, y: Any) -> Any:
        each = (o - y).square().sum(-1)
        worst = each.topk(max(1, len(y) // 2)).values
        return worst.sum(), len(worst)

    train(script, loss)


@habit("losses", sums=False)
def class_weights_that_differ_by_rank(script: Script) -> None:
    weight = torch.tensor([1.0, 2.0, 0.5 + script.rank]).double()
    train(
        script,
        lambda o, y: (F.cross_entropy(o, y, weight=weight, reduction="sum"), len(y)),
        classes(script),
    )


@habit("losses", sums=False)
def a_bare_mean(script: Script) -> None:
    mean = nn.MSELoss()
    train(script, (lambda o, y: (mean(o, y), 1)) if script.plain else mean)


@habit("losses", sums=False)
def mean_in_a_written_out_pass(script: Script) -> None:
    """`run.backward(mean * weight, count)`: the count divides once more."""
    run = script.begin(optimizer=sgd)
    for step in range(3):
        for micro in run.micro_batches(script.batch(step)):
            o = run.model(micro.inputs)
            mean = 2 * F.mse_loss(o, micro.targets)
            run.backward(mean, 1 if script.plain else len(o))
        run.update()


def written_out(script: Script, loss: Any) -> None:
    """Three steps whose passes are written out; `loss` gives what `run.backward` gets."""
    run = script.begin(optimizer=sgd)
    for step in range(3):
        total = run.total(len(script.batch(step)[0]))
        for micro in run.micro_batches(script.batch(step)):
            o = run.model(micro.inputs)
            run.backward(*loss(o, micro.targets, total))
        run.update()


@habit("losses", sums=True)
def mean_times_the_rows_in_a_written_out_pass(script: Script) -> None:
    written_out(script, lambda o, y, _: (0.5 * (F.mse_loss(o, y) * len(o)), len(o)))


@habit("losses", sums=True)
def shares_of_the_total_in_a_written_out_pass(script: Script) -> None:
    written_out(script, lambda o, y, total: (F.mse_loss(o, y) * len(o) / total,))


@habit("losses", sums=False)
def half_a_mean_in_a_written_out_pass(script: Script) -> None:
    written_out(script, lambda o, y, _: (0.5 * F.mse_loss(o, y), 1 if script.plain else len(o)))


@habit("losses", sums=False)
def two_means_in_a_written_out_pass(script: Script) -> None:
    def loss(o: Any, y: Any, _: Any) -> Any:
        return F.mse_loss(o, y) + 0.1 * o.abs().mean(), 1 if script.plain else len(o)

    written_out(script, loss)


@habit("losses", sums=False)
def a_sum_by_its_elements_in_a_written_out_pass(script: Script) -> None:
    def loss(o: Any, y: Any, _: Any) -> Any:
        square = (o - y).square()
        return square.sum() / square.numel(), 1 if script.plain else len(o)

    written_out(script, loss)


@habit("losses", sums=False)
def a_masked_mean_in_a_written_out_pass(script: Script) -> None:
    def loss(o: Any, y: Any, _: Any) -> Any:
        mask = (y > 0).double()
        mean = ((o - y).square() * mask).sum() / mask.sum().clamp(min=1)
        return mean, 1 if script.plain else len(o)

    written_out(script, loss)


@habit("losses", sums=False)
def a_mean_without_a_count_in_a_written_out_pass(script: Script) -> None:
    written_out(script, lambda o, y, _: (F.mse_loss(o, y),))


@habit("losses", sums=True)
def contrastive_with_a_gather_over_the_mesh(script: Script) -> None:
    """Every sample meets those of all ranks; gradients flow back through the gather."""

    def batch(step: int) -> Any:
        x, y = (column[8 * step :][:8] for column in (X, Y))
        if script.alone:
            return x, y
        return x[script.own_share :: script.shares], y[script.own_share :: script.shares]

    def loss(o: Any, y: Any) -> Any:
        keys, first = o, 0
        if meshes:
            group = meshes[0].get_group(meshes[0].mesh_dim_names[0])
            keys = torch.cat(gather.all_gather(o, group=group))
            first = len(o) * group.rank()
        scores = F.normalize(o, dim=-1) @ F.normalize(keys, dim=-1).T
        return F.cross_entropy(scores, first + torch.arange(len(o)), reduction="sum"), len(o)

    more = {} if script.plain else {"coupled": True}
    meshes: list[Any] = []
    run = script.begin(loss=loss, sample=batch(0), micro_batch=len(batch(0)[0]), **more)
    meshes += [] if script.alone else [run.mesh]
    script.train(run, batch=batch)
