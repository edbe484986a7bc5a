"""Habits that keep a part of training beside the run: own leaves, optimizers, statistics, messages."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from habits.gradient_habits import in_each_pass, written_out
from habits.habit_sides import CLASSES, ROWS, Chain, Script, X, Y, adamw, net, sgd, squares
from habits.habit_table import habit
from habits.layout_blind_habits import PICTURES
from habits.loss_habits import classes
from habits.optimizer_habits import NOWHERE, steps
from habits.recipe_habits import NOISE, player
from habits.script_habits import is_alone

# ---- losses in run.step


@habit("losses", sums=True)
def smoothed_by_the_function_of_torch(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        return F.cross_entropy(o, y, reduction="sum", label_smoothing=0.1), len(y)

    batch = classes(script)
    script.train(script.begin(loss=loss, sample=batch(0)), batch=batch)


@habit("losses", sums=True)
def several_quantiles(script: Script) -> None:
    """Pinball loss: each output is a quantile of one target."""
    levels = torch.tensor([0.1, 0.5, 0.9]).double()

    def loss(o: Any, y: Any) -> Any:
        error = y[:, :1] - o
        return torch.maximum(levels * error, (levels - 1) * error).sum(), len(y)

    script.train(script.begin(loss=loss))


@habit("losses", sums=True)
def a_mixture_of_densities(script: Script) -> None:
    """One mean of three counts for a sample: `logsumexp` over components."""

    def loss(o: Any, y: Any) -> Any:
        each = -0.5 * (o - y[:, :1]).square()
        return -torch.logsumexp(each + o.log_softmax(-1), -1).sum(), len(y)

    script.train(script.begin(loss=loss))


@habit("losses", sums=True)
def a_matching_for_each_sample(script: Script) -> None:
    """DETR: outputs of a sample are assigned to its targets without gradients."""
    orders = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])

    def loss(o: Any, y: Any) -> Any:
        with torch.no_grad():
            cost = (o[:, orders] - y[:, None]).abs().sum(-1)
            best = orders[cost.argmin(1)]
        return (o.gather(1, best) - y).abs().sum(), y.numel()

    script.train(script.begin(loss=loss))


@habit("losses", sums=True)
def ranking_within_each_list(script: Script) -> None:
    """A sample is a list; pairs are compared inside of it."""

    def loss(o: Any, y: Any) -> Any:
        above = (y[:, :, None] > y[:, None]).double()
        pairs = F.softplus(o[:, None] - o[:, :, None])
        return (above * pairs).sum(), above.sum()

    script.train(script.begin(loss=loss))


@habit("losses", sums=False)
def a_partial_likelihood_over_the_batch(script: Script) -> None:
    """DeepSurv: the risk set of a sample are those of the batch that live longer."""

    def loss(o: Any, y: Any) -> Any:
        order = y[:, 0].argsort(descending=True)
        risk = o[order, 0]
        return -(risk - risk.logcumsumexp(0)).sum(), len(y)

    script.train(script.begin(loss=loss))


@habit("losses", sums=True)
def targets_changed_in_place_in_the_loss(script: Script) -> None:
    """`y.mul_(0.5)` in the loss writes the user's tensor, which the next epoch reads again."""

    def loss(o: Any, y: Any) -> Any:
        return squares(o, y.mul_(0.5))

    kept = tuple(one.clone() for one in script.batch(0))
    run = script.begin(loss=loss, sample=tuple(one.clone() for one in kept))
    for _ in range(3):
        script.note(run.step(kept).loss)


@habit("losses", sums=True)
def outputs_changed_in_place_in_the_loss(script: Script) -> None:
    def loss(o: Any, y: Any) -> Any:
        o -= y
        return o.square().sum(), len(y)

    script.train(script.begin(loss=loss))


@habit("losses", sums=True)
def the_same_tensor_as_inputs_and_targets(script: Script) -> None:
    """An autoencoder: `(x, x)`."""

    class Auto(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 6)

    def batch(step: int) -> Any:
        x = script.batch(step)[0]
        return x, x

    script.train(script.begin(net(Auto), sample=batch(0)), batch=batch)


class Speaking(Chain):
    """nanoGPT: the model returns scores and the mean loss, if it gets targets."""

    def forward(self, idx: Any, targets: Any = None) -> Any:
        logits = super().forward(idx)
        return logits, None if targets is None else F.cross_entropy(logits, targets)


@habit("losses", sums=True)
def the_mean_of_a_model_times_its_rows(script: Script) -> None:
    """`logits, loss = model(x, y)`, then `run.backward(loss * n, n)`."""
    run = script.begin(net(Speaking))
    for step in range(2):
        for micro in run.micro_batches(classes(script)(step)):
            _, loss = run.model(micro.inputs, micro.targets)
            run.backward(loss * len(micro.targets), len(micro.targets))
        script.note(run.update().loss)


@habit("losses", sums=False)
def the_mean_of_a_model_in_a_written_out_pass(script: Script) -> None:
    """`logits, loss = model(x, y); (loss / accumulate).backward()`."""
    run = script.begin(net(Speaking))
    for step in range(2):
        batch = classes(script)(step)
        passes = 1 if script.plain else -(-len(batch[0]) // 2)
        for micro in run.micro_batches(batch):
            _, loss = run.model(micro.inputs, micro.targets)
            run.backward(loss / passes)
        run.update()


# ---- coupling in written-out passes, where no loss can be tried


@habit("losses", sums=False)
def advantages_normalised_in_a_written_out_pass(script: Script) -> None:
    """CleanRL's PPO: `(a - a.mean()) / (a.std() + 1e-8)` of a micro-batch, without gradients."""

    def act(run: Any, micro: Any) -> None:
        o, gain = run.model(micro.inputs), micro.targets[:, 0]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        run.backward(-(o.log_softmax(-1)[:, 0] * gain).sum(), len(o))

    in_each_pass(script, act)


@habit("losses", sums=False)
def targets_balanced_in_a_written_out_pass(script: Script) -> None:
    """SwAV: assignments of the batch by Sinkhorn's steps, under `no_grad`."""

    def act(run: Any, micro: Any) -> None:
        o = run.model(micro.inputs)
        with torch.no_grad():
            shares = (o.detach() / 0.5).exp()
            for _ in range(3):
                shares = shares / shares.sum(0, keepdim=True)
                shares = shares / shares.sum(1, keepdim=True)
        run.backward(-(shares * o.log_softmax(-1)).sum(), len(o))

    in_each_pass(script, act)


@habit("losses", sums=False)
def weights_by_frequency_in_a_written_out_pass(script: Script) -> None:
    """Class weights counted in the micro-batch."""

    def act(run: Any, micro: Any) -> None:
        o, label = run.model(micro.inputs), (micro.targets[:, 0] > 0).long()
        weight = 1.0 / torch.bincount(label, minlength=3).clamp(min=1).to(o)
        run.backward(F.cross_entropy(o, label, weight=weight, reduction="sum"), len(o))

    in_each_pass(script, act)


@habit("losses", sums=False)
def hard_negatives_in_a_written_out_pass(script: Script) -> None:
    """The farthest other sample of the micro-batch, found without gradients."""

    def act(run: Any, micro: Any) -> None:
        o = run.model(micro.inputs)
        other = torch.cdist(o.detach(), o.detach()).argmax(1)
        far = (o - o[other].detach()).square().sum(-1)
        run.backward(squares(o, micro.targets)[0] + F.softplus(-far).sum(), len(o))

    in_each_pass(script, act)


@habit("losses", sums=False)
def a_centre_that_follows_in_each_micro_batch(script: Script) -> None:
    """DINO: the teacher's centre moves between micro-batches, in a tensor of the loop."""
    torch.manual_seed(9)
    teacher = nn.Linear(6, 3).double().requires_grad_(False)
    centre = torch.zeros(3).double()

    def act(run: Any, micro: Any) -> None:
        out = teacher(micro.inputs)
        soft = ((out - centre) / 0.5).softmax(-1)
        o = run.model(micro.inputs)
        centre.mul_(0.5).add_(out.mean(0), alpha=0.5)
        run.backward(-(soft * o.log_softmax(-1)).sum(), len(o))

    in_each_pass(script, act)


@habit("losses", sums=False)
def a_baseline_that_follows_in_each_micro_batch(script: Script) -> None:
    """REINFORCE: `baseline = 0.9 * baseline + 0.1 * reward.mean()`, a new tensor each time."""
    run, baseline = script.begin(), torch.zeros(()).double()
    for step in range(2):
        for micro in run.micro_batches(script.batch(step)):
            o, reward = run.model(micro.inputs), micro.targets[:, 0]
            run.backward(-(o.log_softmax(-1)[:, 0] * (reward - baseline)).sum(), len(o))
            baseline = 0.9 * baseline + 0.1 * reward.mean()
        run.update()


@habit("losses", sums=False)
def negatives_of_earlier_micro_batches(script: Script) -> None:
    """MoCo in the loop: a queue of features that each pass fills."""
    queue = F.normalize(NOISE[:, :3], dim=1).clone()

    def act(run: Any, micro: Any) -> None:
        o = F.normalize(run.model(micro.inputs), dim=1)
        total = (1 - (o * F.normalize(micro.targets, dim=1)).sum(-1)).sum()
        total = total + 0.1 * (o @ queue[:16].T.clone()).exp().sum()
        queue.copy_(torch.cat([o.detach(), queue])[: len(queue)])
        run.backward(total, len(o))

    in_each_pass(script, act)


@habit("losses", sums=False)
def the_loss_reduced_before_its_backward(script: Script) -> None:
    """`dist.all_reduce(loss)` in place, then backward: the logged loss is a sum over ranks."""

    def act(run: Any, micro: Any) -> None:
        total, count = squares(run.model(micro.inputs), micro.targets)
        if not is_alone(script):
            dist.all_reduce(total)
        run.backward(total, count)

    run = script.begin()
    for step in range(2):
        x, y = script.batch(step)
        for micro in run.micro_batches((x[:2], y[:2])):  # as many passes on every rank
            act(run, micro)
        script.note(run.update().loss)


@habit("losses", sums=True)
def a_criterion_that_calls_the_model(script: Script) -> None:
    """fairseq: `loss, size, log = criterion(model, sample)`, and numbers for the log."""

    def criterion(model: Any, sample: Any) -> Any:
        o = model(sample.inputs)
        total, size = squares(o, sample.targets)
        return total, size, {"right": (o.detach().sign() == sample.targets.sign()).sum()}

    run = script.begin()
    for step in range(2):
        right = torch.zeros(()).double()
        for micro in run.micro_batches(script.batch(step)):
            total, size, log = criterion(run.model, micro)
            run.backward(total, size)
            right += log["right"]
        script.note(run.update().loss)
        script.note(run.total(right) if script.plain else right * 0 + run.total(float(right)))


@habit("losses", sums=True)
def a_residual_of_a_differential_equation(script: Script) -> None:
    """PINN: first and second derivatives of outputs by inputs, in the loss."""

    def act(run: Any, micro: Any) -> None:
        x = micro.inputs.clone().requires_grad_()
        u = run.model(x)[:, 0]
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        rest = second[:, 0] + u - micro.targets[:, 0]
        run.backward(rest.square().sum(), len(x))

    in_each_pass(script, act, noted=True)


@habit("losses", sums=True)
def both_views_joined_in_the_written_out_pass(script: Script) -> None:
    """R-Drop, FixMatch: `model(cat([a, b])).chunk(2)` in the loop."""
    run = script.begin()
    for step in range(2):
        x, noise, y = script.share(step, X, NOISE, Y)
        for micro in run.micro_batches(((x, x + 0.1 * noise), y)):
            one, two = run.model(torch.cat(list(micro.inputs))).chunk(2)
            far = F.kl_div(one.log_softmax(-1), two.softmax(-1), reduction="sum")
            run.backward(squares(one, micro.targets)[0] + far, len(one))
        script.note(run.update().loss)


@habit("losses", sums=False)
def adapted_weights_of_a_micro_batch(script: Script) -> None:
    """MAML: one inner step on a half, the loss of the other half at the moved weights."""

    def act(run: Any, micro: Any) -> None:
        held = dict(run.model.named_parameters())
        total = squares(run.model(micro.inputs), micro.targets)[0]
        found = torch.autograd.grad(total, list(held.values()), create_graph=True)
        moved = {n: p - 0.01 * g for (n, p), g in zip(held.items(), found, strict=True)}
        o = torch.func.functional_call(run.model, moved, (micro.inputs,))
        run.backward(*squares(o, micro.targets))

    in_each_pass(script, act)


# ---- leaves beside the model


class Centres(nn.Module):
    """Center loss: a row for each class, trained with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3, 3).double())

    def forward(self, o: Any, y: Any) -> Any:
        total = F.cross_entropy(o, y, reduction="sum")
        return total + 0.1 * (o - self.rows[y]).square().sum(), len(y)


@habit("losses", sums=True)
def centres_of_classes_with_an_optimizer_of_their_own(script: Script) -> None:
    torch.manual_seed(3)
    loss, batch = Centres(), classes(script)
    own = torch.optim.SGD(loss.parameters(), lr=0.5)
    run = script.begin(loss=loss, sample=batch(0))
    for step in range(3):
        script.note(run.step(batch(step)).loss)
        own.step()
        own.zero_grad()
    script.note(loss.rows)


@habit("losses", sums=True)
def a_loss_with_weights_in_the_same_optimizer(script: Script) -> None:
    """ArcFace as metric-learning libraries have it: one optimizer over model and loss."""
    torch.manual_seed(3)
    loss, model, batch = Centres(), net(), classes(script)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.05)
    script.train(script.begin(model, optimizer, loss, sample=batch(0)), batch=batch)


@habit("loops", sums=True)
def codes_of_samples_beside_the_model(script: Script) -> None:
    """DeepSDF: a code for each sample, with Adam of its own, added to the inputs of a pass."""
    torch.manual_seed(3)
    codes = nn.Embedding(64, 6).double()
    own = torch.optim.SGD(codes.parameters(), lr=0.5)
    run = script.begin()
    for _ in range(3):
        x, y, place = script.share(0, X, Y, torch.arange(64))
        for micro in run.micro_batches(((x, place), y)):
            o = run.model(micro.inputs[0] + codes(micro.inputs[1]))
            run.backward(*squares(o, micro.targets))
        script.note(run.update().loss)
        own.step()
        own.zero_grad()


@habit("loops", sums=True)
def codes_of_samples_in_the_batch(script: Script) -> None:
    """The same by `run.step`: inputs that have a graph behind them."""
    torch.manual_seed(3)
    codes = nn.Embedding(64, 6).double()
    own = torch.optim.SGD(codes.parameters(), lr=0.5)
    run = script.begin()
    for _ in range(2):
        x, y, place = script.share(0, X, Y, torch.arange(64))
        script.note(run.step((x + codes(place), y)).loss)
        own.step()
        own.zero_grad()


@habit("loops", sums=True)
def a_projector_beside_the_model(script: Script) -> None:
    """Distillation of features: a small layer that only the loop knows."""
    torch.manual_seed(3)
    projector = nn.Linear(3, 3).double()
    own = torch.optim.SGD(projector.parameters(), lr=0.05)
    run = script.begin()
    for step in range(2):
        for micro in run.micro_batches(script.batch(step)):
            run.backward(*squares(projector(run.model(micro.inputs)), micro.targets))
        script.note(run.update().loss)
        own.step()
        own.zero_grad()


@habit("loops", sums=True)
def two_models_trained_by_one_loss(script: Script) -> None:
    """An encoder and a decoder, each a run of its own."""
    first = script.begin(net(lambda: player(6, 6)))
    second = script.begin(net(lambda: player(6, 3)))
    for step in range(2):
        for micro in second.micro_batches(script.batch(step)):
            second.backward(*squares(second.model(first.model(micro.inputs)), micro.targets))
        script.note(second.update().loss)
        first.update() if not script.plain else first.optimizer.step()
        if script.plain:
            first.optimizer.zero_grad()


@habit("optimizer", sums=True)
def a_temperature_with_an_optimizer_of_its_own(script: Script) -> None:
    """SAC: `log_alpha` learns from outputs of all rows, outside of the run."""
    log = torch.zeros((), dtype=torch.float64, requires_grad=True)
    own = torch.optim.Adam([log], lr=0.1)
    run = script.begin()
    for step in range(3):
        factor = log.exp().detach()
        for micro in run.micro_batches(script.batch(step)):
            o = run.model(micro.inputs)
            entropy = -(o.softmax(-1) * o.log_softmax(-1)).sum()
            run.backward(squares(o, micro.targets)[0] - factor * entropy, len(o))
        script.note(run.update().loss)
        o = run.predict(X[:ROWS])
        entropy = -(o.softmax(-1) * o.log_softmax(-1)).sum(-1).mean()
        own.zero_grad()
        (log.exp() * (entropy - 0.5)).backward()
        own.step()
        script.note(log)


@habit("optimizer", sums=False)
def a_temperature_tuned_on_own_rows(script: Script) -> None:
    """The same from the rank's own rows: each rank has another factor in its loss."""
    log = torch.zeros((), dtype=torch.float64, requires_grad=True)
    own = torch.optim.Adam([log], lr=0.1)
    run = script.begin(loss=lambda o, y: (squares(o, y)[0] + log.exp().detach() * o.abs().sum(),
                                          len(y)))  # fmt: skip
    for step in range(3):
        x, y = script.batch(step)
        run.step((x, y))
        own.zero_grad()
        (log.exp() * y[:, 0].mean()).backward()
        own.step()


# ---- optimizers


def over_attributes(parameters: Any) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = []
    for p in parameters:
        groups.append({"params": [p], **getattr(p, "_optim", {})})
    return torch.optim.SGD(groups, lr=0.05)


@habit("optimizer", sums=True)
def rates_by_attributes_of_weights(script: Script) -> None:
    """S4, Mamba: `p._optim = {"lr": …}`, which the maker of the optimizer reads."""
    model = net()
    for block in model.layers:
        block.up.weight._optim = {"lr": 0.01}
        block.down.bias._optim = {"lr": 0.5}
    script.train(script.begin(model, over_attributes))


@habit("optimizer", sums=True)
def a_maker_of_an_optimizer_that_reads_the_model(script: Script) -> None:
    """`lambda _: AdamW(model.named_parameters() …)`: the weights given are not those used."""
    model = net()

    def make(_: Any) -> torch.optim.Optimizer:
        found = dict(model.named_parameters())
        decayed = [p for name, p in found.items() if "bias" not in name]
        others = [p for name, p in found.items() if "bias" in name]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

    script.train(script.begin(model, make))


@habit("optimizer", sums=True)
def a_rate_in_a_tensor(script: Script) -> None:
    """`AdamW(lr=torch.tensor(…))`, multiplied in place by the loop."""

    def lower(run: Any, step: int) -> None:
        for group in run.optimizer.param_groups:
            group["lr"].mul_(0.5)

    def make(p: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(p, lr=torch.tensor(0.01).double(), foreach=False)

    steps(script, lower, optimizer=make)


@habit("optimizer", sums=True)
def a_scale_of_the_rate_in_each_group(script: Script) -> None:
    """timm: `group["lr"] = rate * group["lr_scale"]`."""
    model = net()
    groups = [{"params": one.parameters(), "lr_scale": 0.5**n, "name": f"layer {n}"}
              for n, one in enumerate([*model.layers, model.head])]  # fmt: skip

    def set_rates(run: Any, step: int) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step) * group["lr_scale"]

    steps(script, set_rates, model=model, optimizer=sgd(groups))


@habit("optimizer", sums=True)
def weights_taken_out_of_a_group(script: Script) -> None:
    """Freezing: `group["params"]` without the head's bias, from the second step on."""

    def remove(run: Any, step: int) -> None:
        for group in run.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not run.model.head.bias]

    steps(script, remove)


@habit("optimizer", sums=True)
def steps_of_the_optimizer_set_to_zero(script: Script) -> None:
    """A warm restart that begins the bias correction anew."""

    def restart(run: Any, step: int) -> None:
        if step == 1:
            for state in run.optimizer.state.values():
                state["step"].zero_()

    steps(script, restart, 4, optimizer=adamw)


@habit("optimizer", sums=True)
def a_cycle_of_rates_and_momenta(script: Script) -> None:
    model = net()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.05, 2, cycle_momentum=True)
    steps(script, lambda *_: schedule.step(), 5, model=model, optimizer=optimizer)


@habit("optimizer", sums=True)
def warm_restarts_by_parts_of_an_epoch(script: Script) -> None:
    """`schedule.step(epoch + i / n)`, whose state goes through a file."""
    model = net()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)

    def turn(run: Any, step: int) -> None:
        schedule.step((step + 1) / 2)
        schedule.load_state_dict(copy.deepcopy(schedule.state_dict()))

    steps(script, turn, 5, model=model, optimizer=optimizer)


class Own(torch.optim.Optimizer):
    """SGD whose gradients a method changes first."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    def change(self, held: list[torch.Tensor]) -> list[torch.Tensor]:
        return [p.grad for p in held if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for p, gradient in zip(held, self.change(held), strict=True):
                p.add_(gradient, alpha=-group["lr"])


@habit("optimizer", sums=True)
def an_optimizer_that_centres_gradients(script: Script) -> None:
    """Gradient centralisation: each row of a matrix minus its mean."""

    class Centring(Own):
        def change(self, held: list[torch.Tensor]) -> list[torch.Tensor]:
            return [p.grad - p.grad.mean(1, keepdim=True) if p.ndim > 1 else p.grad for p in held]

    script.train(script.begin(optimizer=Centring))


@habit("optimizer", sums=True)
def an_optimizer_that_clips_by_the_norm_of_all(script: Script) -> None:
    """LAMB's first step: all gradients are divided by their common norm."""

    class Clipping(Own):
        def change(self, held: list[torch.Tensor]) -> list[torch.Tensor]:
            total = sum(p.grad.square().sum() for p in held) ** 0.5
            return [p.grad / total.clamp(min=1.0) for p in held]

    script.train(script.begin(optimizer=Clipping))


class Prodigy(Own):
    """D-adaptation: the rate grows with a sum over all weights of gradient × way so far."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for p in held:
                self.state[p].setdefault("start", p.detach().clone())
            far = sum(((self.state[p]["start"] - p) * p.grad).sum() for p in held)
            size = sum(p.grad.abs().sum() for p in held)
            group["d"] = max(group.get("d", 0.1), float(far / size))
            for p in held:
                p.add_(p.grad, alpha=-group["lr"] * group["d"] * 5)


@habit("optimizer", sums=True)
def a_rate_from_sums_over_all_weights(script: Script) -> None:
    script.train(script.begin(optimizer=Prodigy))


class Langevin(Own):
    """SGLD: noise from a seeded generator of the optimizer, drawn for each weight in turn."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.drawn = torch.Generator().manual_seed(11)

    def change(self, held: list[torch.Tensor]) -> list[torch.Tensor]:
        return [p.grad + torch.randn(p.shape, generator=self.drawn, dtype=p.dtype) for p in held]


@habit("optimizer", sums=True)
def noise_in_an_optimizer_of_ones_own(script: Script) -> None:
    script.train(script.begin(optimizer=Langevin))


class Lion(Own):
    """The sign of an interpolated momentum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_(mean.mul(0.9).add(p.grad, alpha=0.1).sign(), alpha=-0.1 * group["lr"])
                mean.lerp_(p.grad, 0.01)


@habit("optimizer", sums=True)
def a_sign_of_momentum(script: Script) -> None:
    script.train(script.begin(optimizer=Lion))


@habit("optimizer", sums=True)
def muon_over_matrices_alone(script: Script) -> None:
    """torch's Muon takes matrices; the other weights stay."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02)

    script.train(script.begin(optimizer=make))


class Dealing(Own):
    """modded-nanogpt: rank r updates every r-th weight and sends it to the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                if place % ranks == rank and p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
                if ranks > 1:
                    dist.broadcast(p, place % ranks)


@habit("optimizer", sums=True)
def an_optimizer_that_deals_weights_to_ranks(script: Script) -> None:
    script.train(script.begin(optimizer=Own if is_alone(script) else Dealing))


# ---- weights


@habit("weights", sums=True)
def rows_moved_by_index_add(script: Script) -> None:
    """Prototypes: `weight.index_add_(0, rows, change)`."""

    @NOWHERE
    def move(run: Any, step: int) -> None:
        for block in run.model.layers:
            block.up.weight.index_add_(0, torch.tensor([1, 9]), 0.1 * X[:2])

    steps(script, move)


@habit("weights", sums=True)
def rows_filled_by_a_mask(script: Script) -> None:
    """Codes that nobody uses are set anew: `weight[dead] = …`."""
    dead = torch.arange(16) % 5 == 1

    @NOWHERE
    def fill(run: Any, step: int) -> None:
        for block in run.model.layers:
            block.up.weight[dead] = X[: int(dead.sum())]

    steps(script, fill)


@habit("weights", sums=True)
def one_element_moved_through_a_view(script: Script) -> None:
    """A check of gradients: `weight.view(-1)[k] += 0.01`."""

    @NOWHERE
    def move(run: Any, step: int) -> None:
        run.model.layers[2].down.weight.view(-1)[50] += 0.01
        run.model.layers[0].up.weight.data.flatten()[3].add_(0.01)

    steps(script, move)


@habit("weights", sums=True)
def columns_written_through_a_transpose(script: Script) -> None:
    """`weight.T[2].mul_(0.5)`."""

    @NOWHERE
    def write(run: Any, step: int) -> None:
        for block in run.model.layers:
            block.up.weight.T[2].mul_(0.5)
            block.down.weight.T[2].mul_(0.5)

    steps(script, write)


@habit("weights", sums=True)
def weights_shrunk_after_each_step(script: Script) -> None:
    """A proximal step: `copy_(sign(p) * relu(|p| - t))`."""

    @NOWHERE
    def shrink(run: Any, step: int) -> None:
        for p in run.model.parameters():
            p.copy_(p.sign() * (p.abs() - 0.01).relu())
            p.copy_(torch.where(p.abs() < 0.02, torch.zeros_like(p), p))

    steps(script, shrink)


@habit("weights", sums=True)
def all_weights_divided_by_their_common_norm(script: Script) -> None:
    """`torch.cat` of all weights as one vector; each is divided by its norm."""

    @NOWHERE
    def limit(run: Any, step: int) -> None:
        norm = torch.cat([p.flatten() for p in run.model.parameters()]).norm()
        for p in run.model.parameters():
            p.mul_(6.0 / norm)

    steps(script, limit)


@habit("weights", sums=True)
def an_average_by_foreach(script: Script) -> None:
    """`torch._foreach_lerp_(average, weights, 0.1)`."""
    mean: list[torch.Tensor] = []

    @NOWHERE
    def follow(run: Any, step: int) -> None:
        held = list(run.model.parameters())
        if not mean:
            mean.extend(p.detach().clone() for p in held)
        torch._foreach_lerp_(mean, held, 0.1)
        torch._foreach_mul_(held, 0.99)
        if step == 2:
            script.note(*[one.norm() for one in mean[-2:]])

    steps(script, follow)


@habit("gradients", sums=True)
def gradients_scaled_by_foreach(script: Script) -> None:
    """`torch._foreach_norm` and `torch._foreach_mul_` over all gradients."""

    def scale(run: Any, step: int) -> None:
        held = [p.grad for p in run.model.parameters()]
        norms = torch._foreach_norm(held)
        script.note(torch.stack([one.detach() for one in norms]).norm())
        torch._foreach_mul_(held, 0.5)

    written_out(script, scale)


@habit("gradients", sums=True)
def a_penalty_added_to_gradients(script: Script) -> None:
    """`p.grad.add_(p.sign(), alpha=…)`: an L1 penalty by hand."""

    def add(run: Any, step: int) -> None:
        with torch.no_grad():
            for p in run.model.parameters():
                p.grad.add_(p.sign(), alpha=0.01)

    written_out(script, add)


@habit("gradients", sums=True)
def means_of_gradients_by_layer(script: Script) -> None:
    """`plot_grad_flow`: mean and largest of |gradient|, by name."""

    def read(run: Any, step: int) -> None:
        for name, p in run.model.named_parameters():
            if "weight" in name:
                script.note(p.grad.abs().mean(), p.grad.abs().max())

    written_out(script, read)


@habit("gradients", sums=False)
def norms_of_gradients_by_hooks_for_a_log(script: Script) -> None:
    """As `wandb.watch`: hooks that read a gradient and return nothing."""
    run, seen = script.begin(), {}
    for name, p in run.model.named_parameters():
        p.register_hook(lambda gradient, name=name: seen.update({name: float(gradient.norm())}))
    for step in range(2):
        run.step(script.batch(step))
        script.note(*[seen[name] for name in sorted(seen)])


@habit("weights", sums=True)
def a_weight_replaced_by_a_new_parameter(script: Script) -> None:
    def replace(run: Any, step: int) -> None:
        if step == 1:
            made = nn.Parameter(0.5 * torch.ones(3, 6).double())
            run.model.head.weight = made
            run.optimizer.add_param_group({"params": [made]})

    steps(script, replace, 4)


@habit("weights", sums=True)
def weights_copied_from_run_to_run(script: Script) -> None:
    """Population-based training: the worse model takes the better one's weights."""
    first = script.begin()
    second = script.begin(net(), lambda p: torch.optim.SGD(p, lr=0.02))
    for step in range(2):
        script.note(first.step(script.batch(step)).loss, second.step(script.batch(step)).loss)
    with torch.no_grad():
        pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
        for one, other in pairs:
            other.copy_(one)
    script.note(second.step(script.batch(3)).loss)


@habit("weights", sums=True)
def a_soup_of_checkpoints(script: Script) -> None:
    """The mean of whole state dicts of three steps, loaded and validated."""
    run, kept = script.begin(), []
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        kept.append({name: one.clone() for name, one in run.state_dict().items()})
    mean = {name: sum(one[name] for one in kept) / 3 for name in kept[0]}
    with run.whole_weights():
        run.model.load_state_dict(mean)
    script.note(run.evaluate(torch.utils.data.TensorDataset(X[:16], Y[:16]))["loss"])


@habit("weights", sums=True)
def weights_averaged_by_messages(script: Script) -> None:
    """Gossip: `dist.send` and `dist.recv` of each weight, then the mean."""

    @NOWHERE
    def gossip(run: Any, step: int) -> None:
        if is_alone(script):
            return
        for p in run.model.parameters():
            got = torch.empty_like(p)
            if dist.get_rank():
                dist.recv(got, 0)
                dist.send(p.data, 0)
            else:
                dist.send(p.data, 1)
                dist.recv(got, 1)
            p.copy_(0.5 * (p + got))

    steps(script, gossip)


@habit("weights", sums=True)
def a_checksum_of_weights_over_ranks(script: Script) -> None:
    """The mean over ranks of the sum of all weights: equal where replicas are."""

    def check(run: Any, step: int) -> None:
        found = sum(float(p.detach().sum()) for p in run.model.parameters())
        every = [found]
        if not is_alone(script):
            every = [0.0] * dist.get_world_size()
            dist.all_gather_object(every, found)
        script.note(sum(every) / len(every))

    steps(script, check, 2)


# ---- loops


@habit("loops", sums=True)
def weights_drawn_by_the_seed_of_each_rank(script: Script) -> None:
    """`torch.manual_seed(seed + rank)` before the model is made."""
    torch.manual_seed(script.rank)
    script.train(script.begin(Chain().double()))


@habit("loops", sums=True)
def a_model_in_ddp_before_the_start(script: Script) -> None:
    """`DistributedDataParallel(model)`, left from the script before."""
    model = net()
    if not script.plain and dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    script.train(script.begin(model))


@habit("loops", sums=True)
def a_default_dtype_set_before_the_start(script: Script) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        script.train(script.begin(optimizer=adamw))
    finally:
        torch.set_default_dtype(torch.float32)


@habit("loops", sums=True)
def autocast_around_the_pass(script: Script) -> None:
    """`torch.autocast` around forward and loss; in fp64 it casts nothing."""

    def act(run: Any, micro: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total, count = squares(run.model(micro.inputs), micro.targets)
        run.backward(total, count)

    in_each_pass(script, act, noted=True)


@habit("loops", sums=True)
def steps_in_a_thread(script: Script) -> None:
    """The trainer of a graphical program."""
    run, failed = script.begin(), []

    def work() -> None:
        try:
            script.train(run)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for error in failed:
        raise error


@habit("loops", sums=True)
def two_backward_passes_over_one_graph(script: Script) -> None:
    """`backward(a, retain_graph=True)`, then `backward(b)`."""

    def act(run: Any, micro: Any) -> None:
        o = run.model(micro.inputs)
        run.backward(*squares(o, micro.targets), retain_graph=True)
        run.backward(0.1 * o.abs().sum(), len(o))

    in_each_pass(script, act)


@habit("loops", sums=True)
def double_q_learning(script: Script) -> None:
    """DQN: the model chooses the next action, a copy that follows every second step judges it."""
    model = net()
    target = copy.deepcopy(model).requires_grad_(False)
    run = script.begin(model)
    for step in range(3):
        x, after, reward = script.share(step, X, X.roll(1, 0), Y[:, :1])
        for micro in run.micro_batches(((x, after), reward)):
            with torch.no_grad():
                best = run.model(micro.inputs[1]).argmax(1, keepdim=True)
                goal = micro.targets + 0.9 * target(micro.inputs[1]).gather(1, best)
            found = run.model(micro.inputs[0])[:, :1]
            run.backward((found - goal).square().sum(), len(found))
        script.note(run.update().loss)
        if step % 2:
            target.load_state_dict(run.state_dict())


@habit("loops", sums=True)
def priorities_of_a_replay_buffer(script: Script) -> None:
    """Errors of `predict` give priorities, a seeded draw and weights of importance."""

    def loss(o: Any, y: Any) -> Any:
        target, weight = y
        return ((o - target).square().sum(-1) * weight).sum(), len(o)

    def split(x: Any, y: Any, weight: Any) -> Any:
        place = script.share(0, torch.arange(64))[0]
        return x[place], (y[place], weight[place])

    run = script.begin(loss=loss, sample=split(X[:ROWS], Y[:ROWS], X[:ROWS, 0].abs()))
    priorities = torch.ones(64).double()
    for step in range(3):
        drawn = torch.Generator().manual_seed(step)
        rows = torch.multinomial(priorities, ROWS, generator=drawn)
        weight = (1 / priorities[rows]) ** 0.5
        script.note(run.step(split(X[rows], Y[rows], weight / weight.max())).loss)
        priorities[rows] = (run.predict(X[rows]) - Y[rows]).abs().sum(1).clamp(min=0.1)


@habit("loops", sums=True)
def a_lazy_penalty_in_every_second_step(script: Script) -> None:
    """R1 as StyleGAN has it: the gradient by real inputs, in every second step."""
    run = script.begin()
    for step in range(3):
        for micro in run.micro_batches(script.batch(step)):
            x = micro.inputs.clone().requires_grad_(step % 2 == 0)
            o = run.model(x)
            total = squares(o, micro.targets)[0]
            if step % 2 == 0:
                (slope,) = torch.autograd.grad(o.sum(), x, create_graph=True)
                total = total + 0.5 * slope.square().sum()
            run.backward(total, len(o))
        script.note(run.update().loss)


@habit("loops", sums=True)
def weights_of_tasks_by_their_last_losses(script: Script) -> None:
    """Dynamic weight averaging: losses of two validations give the next weights."""
    weight = {"one": 1.0, "two": 1.0}

    def loss(o: Any, y: Any) -> Any:
        total = weight["one"] * squares(o, y)[0] + weight["two"] * (o - y).abs().sum()
        return total, len(y)

    def validate(run: Any, step: int) -> None:
        error = run.predict(X[:16]) - Y[:16]
        one, two = float(error.square().sum()), float(error.abs().sum())
        weight["one"], weight["two"] = 2 * one / (one + two), 2 * two / (one + two)

    steps(script, validate, loss=loss)


@habit("loops", sums=True)
def weights_gathered_by_all_and_kept_by_rank_0(script: Script) -> None:
    """`state = run.state_dict()` on all ranks; rank 0 writes and reads the file."""
    run = script.begin()
    script.train(run)
    state = run.state_dict()
    if script.rank == 0:
        plain = net()
        plain.load_state_dict({name: one.clone() for name, one in state.items()})
        str(float(plain(X[:4]).sum()))


@habit("loops", sums=True)
def a_picture_model_in_evaluation_between_steps(script: Script) -> None:
    """torchvision's reference: a loop of validation under `inference_mode` with own counts."""

    class Pictured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.one(x).relu().mean((2, 3)))

    def loss(o: Any, y: Any) -> Any:
        return F.cross_entropy(o, y, reduction="sum"), len(y)

    def batch(step: int) -> Any:
        return script.share(step, PICTURES, CLASSES)

    run = script.begin(net(Pictured), loss=loss, sample=batch(0))
    for step in range(2):
        script.note(run.step(batch(step)).loss)
        run.model.eval()
        with torch.inference_mode():
            found = run.model(PICTURES[:16]).argmax(1)
        script.note((found == CLASSES[:16]).sum())
        run.model.train()
