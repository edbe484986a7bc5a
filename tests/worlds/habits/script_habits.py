"""Habits of scripts that were written for one GPU or for DDP: collectives, files, own optimizers."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import SWALR

from habits.gradient_habits import in_each_pass, written_out
from habits.habit_sides import CLASSES, ROWS, Chain, Script, X, Y, adamw, net, sgd, squares
from habits.habit_table import habit
from habits.model_habits import Looked
from habits.optimizer_habits import NOWHERE, steps


def is_alone(script: Script) -> bool:
    """Return whether a collective of the user's has no other rank."""
    return script.plain or not dist.is_initialized()


# ---- collectives of the script


@habit("loops", sums=True)
def the_loss_averaged_by_all_reduce_for_a_log(script: Script) -> None:
    """`reduce_mean(loss)`: the mean over ranks of a number that all of them have."""

    def read(run: Any, step: int) -> None:
        found = torch.tensor(float(run.step(script.batch(3)).loss)).double()
        if not is_alone(script):
            dist.all_reduce(found)
            found /= dist.get_world_size()
        script.note(found)

    steps(script, read, 2)


@habit("loops", sums=True)
def barriers_around_a_print_by_rank_0(script: Script) -> None:
    def wait(run: Any, step: int) -> None:
        if not is_alone(script):
            dist.barrier()
        if script.rank == 0:
            str(step)
        if not is_alone(script):
            dist.barrier()

    steps(script, wait)


@habit("loops", sums=True)
def a_stop_decided_by_rank_0(script: Script) -> None:
    """A flag, `dist.broadcast(flag, 0)`, and all ranks leave the loop."""
    run = script.begin()
    for step in range(4):
        script.note(run.step(script.batch(step)).loss)
        flag = torch.tensor(float(script.rank == 0 and step == 2))
        if not is_alone(script):
            dist.broadcast(flag, 0)
        if flag:
            break


@habit("optimizer", sums=True)
def a_rate_sent_from_rank_0(script: Script) -> None:
    def send(run: Any, step: int) -> None:
        rate = [0.05 / (1 + step) if script.rank == 0 else None]
        if not is_alone(script):
            dist.broadcast_object_list(rate, 0)
        for group in run.optimizer.param_groups:
            group["lr"] = rate[0]

    steps(script, send)


class MeanMetric:
    """As torchmetrics: `update` adds, `compute` sums over the ranks."""

    def __init__(self, script: Script) -> None:
        self.script, self.sums = script, torch.zeros(2).double()

    def update(self, values: torch.Tensor) -> None:
        self.sums += torch.stack([values.detach().sum(), torch.tensor(values.numel()).double()])

    def compute(self) -> torch.Tensor:
        sums = self.sums.clone()
        if not is_alone(self.script):
            dist.all_reduce(sums)
        return sums[0] / sums[1]


@habit("loops", sums=True)
def a_metric_object_in_written_out_passes(script: Script) -> None:
    run = script.begin()
    for step in range(2):
        metric = MeanMetric(script)
        for micro in run.micro_batches(script.batch(step)):
            o = run.model(micro.inputs)
            run.backward(*squares(o, micro.targets))
            metric.update((o - micro.targets).abs())
        run.update()
        script.note(metric.compute())


@habit("loops", sums=True)
def a_confusion_matrix_over_ranks(script: Script) -> None:
    """Counts of (label, class) of the rank's own rows, summed by `all_reduce`; shares of all."""
    run = script.begin(loss=lambda o, y: (nn.functional.cross_entropy(o, y, reduction="sum"),
                                          len(y)), sample=script.share(0, X, CLASSES))  # fmt: skip
    for step in range(2):
        x, y = script.share(step, X, CLASSES)
        run.step((x, y))
        found = run.predict(X[step * ROWS :][:ROWS]).argmax(1)
        found = found[script.share(0, torch.arange(64))[0]]
        counts = torch.bincount(y * 3 + found, minlength=9).double()
        if not is_alone(script):
            dist.all_reduce(counts)
        script.note(counts / counts.sum())


@habit("loops", sums=True)
def numbers_gathered_as_objects(script: Script) -> None:
    """`all_gather_object` of a list of each rank's own numbers, then their mean."""

    def gather(run: Any, step: int) -> None:
        own = script.batch(step)[1].abs().sum(1).tolist()
        found = [own]
        if not is_alone(script):
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, own)
        every = [one for part in found for one in part]
        script.note(sum(every) / len(every))

    steps(script, gather, 2)


@habit("losses", sums=False)
def a_mean_over_all_ranks_times_their_number(script: Script) -> None:
    """`loss = total * world_size / all_reduce(count)`: DDP's mean of gradients undone by hand."""

    def act(run: Any, micro: Any, rows: float, ranks: int) -> None:
        total, _ = squares(run.model(micro.inputs), micro.targets)
        run.backward(total * ranks / rows)

    run = script.begin()
    for step in range(2):
        x, y = script.batch(step)
        rows, ranks = torch.tensor(float(len(x))).double(), 1
        if not is_alone(script):
            dist.all_reduce(rows)
            ranks = dist.get_world_size()
        for micro in run.micro_batches((x, y)):
            act(run, micro, float(rows), ranks)
        run.update()


@habit("losses", sums=False)
def a_normaliser_averaged_over_ranks(script: Script) -> None:
    """Detectors: `loss / max(reduce_mean(positives), 1)`, which counts on a mean of gradients."""
    run = script.begin()
    for step in range(2):
        x, y = script.batch(step)
        positives = (y > 0).double().sum()
        if not is_alone(script):
            dist.all_reduce(positives)
            positives /= dist.get_world_size()
        for micro in run.micro_batches((x, y)):
            total, _ = squares(run.model(micro.inputs), micro.targets)
            run.backward(total / positives.clamp(min=1.0))
        run.update()


@habit("loops", sums=False)
def a_batch_chunked_by_the_global_rank(script: Script) -> None:
    """`x.chunk(world_size)[rank]`: right where every rank has samples of its own."""
    run = script.begin()
    for step in range(2):
        x, y = (one[step * ROWS :][:ROWS] for one in (X, Y))
        if not is_alone(script):
            x, y = (one.chunk(dist.get_world_size())[dist.get_rank()] for one in (x, y))
        script.note(run.step((x, y)).loss)


@habit("models", sums=True)
def the_module_inside_of_a_wrapper(script: Script) -> None:
    """`getattr(model, "module", model)` and `model.no_sync()`, left from DDP."""
    run = script.begin()
    for step in range(2):
        for micro in run.micro_batches(script.batch(step)):
            with getattr(run.model, "no_sync", nullcontext)():
                run.backward(*squares(run.model(micro.inputs), micro.targets))
        script.note(run.update().loss)
    inner = getattr(run.model, "module", run.model)
    script.note(len(list(inner.parameters())))


@habit("weights", sums=False)
def a_buffer_written_by_own_samples(script: Script) -> None:
    """The loop, and no forward pass, moves a running mean by the rank's own rows."""

    class Tracked(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: Any) -> Any:
            return super().forward(x - self.mean)

    run = script.begin(net(Tracked))
    for step in range(3):
        x, y = script.batch(step)
        run.model.mean.lerp_(x.mean(0), 0.1)
        script.note(run.step((x, y)).loss)


# ---- gradients


class Clamped(torch.autograd.Function):
    """The identity, whose backward pass clamps."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.clamp(-0.05, 0.05)


@habit("gradients", sums=False)
def gradients_clamped_by_a_function(script: Script) -> None:
    """An own `autograd.Function`: the clamp sees gradients of a sum here, of a mean in plain."""

    class Model(Chain):
        def forward(self, x: Any) -> Any:
            return self.head(Clamped.apply(self.layers(x)))

    script.train(script.begin(net(Model)))


class Normed(torch.autograd.Function):
    """The identity, whose backward pass scales each sample's gradient to length 1."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient / (gradient.norm(dim=1, keepdim=True) + 1e-9)


@habit("gradients", sums=False)
def gradients_normalised_by_a_function(script: Script) -> None:
    class Model(Chain):
        def forward(self, x: Any) -> Any:
            return self.head(Normed.apply(self.layers(x)))

    script.train(script.begin(net(Model)))


@habit("gradients", sums=False)
def gradients_clamped_by_a_hook_in_forward(script: Script) -> None:
    """Recurrent networks: `hidden.register_hook(lambda g: g.clamp(-c, c))`."""

    class Model(Chain):
        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
            return self.head(hidden)

    script.train(script.begin(net(Model)))


@habit("gradients", sums=False)
def gradients_clamped_by_a_module_hook(script: Script) -> None:
    """`register_full_backward_hook` that returns another gradient of the block's input."""
    run = script.begin()
    run.model.layers[2].register_full_backward_hook(
        lambda module, before, after: tuple(one.clamp(-0.05, 0.05) for one in before)
    )
    script.train(run)


@habit("gradients", sums=False)
def gradients_of_outputs_clamped_in_a_written_out_pass(script: Script) -> None:
    def act(run: Any, micro: Any) -> None:
        o = run.model(micro.inputs)
        o.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        run.backward(*squares(o, micro.targets))

    in_each_pass(script, act)


@habit("gradients", sums=True)
def backward_for_some_weights_alone(script: Script) -> None:
    """`loss.backward(inputs=…)`: the head's gradients alone."""

    def act(run: Any, micro: Any) -> None:
        total, count = squares(run.model(micro.inputs), micro.targets)
        (total / count).backward(inputs=list(run.model.head.parameters()))

    in_each_pass(script, act)


@habit("gradients", sums=True)
def backward_of_two_losses_at_once(script: Script) -> None:
    """`torch.autograd.backward([one, two])`."""

    def act(run: Any, micro: Any) -> None:
        o = run.model(micro.inputs)
        total, count = squares(o, micro.targets)
        torch.autograd.backward([total / count, 0.1 * o.abs().sum() / count])

    in_each_pass(script, act)


@habit("gradients", sums=True)
def gradients_of_two_losses_projected(script: Script) -> None:
    """PCGrad over whole steps: two rounds of passes, one gradient projected on the other."""
    run = script.begin()
    for step in range(2):
        for micro in run.micro_batches(script.batch(step)):
            run.backward(*squares(run.model(micro.inputs), micro.targets))
        first = [p.grad.clone() for p in run.model.parameters()]
        for micro in run.micro_batches(script.batch(step)):
            o = run.model(micro.inputs)
            run.backward(o.abs().sum(), len(o))
        second = [p.grad.clone() for p in run.model.parameters()]
        dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        size = sum(b.square().sum() for b in second)
        for p, a, b in zip(run.model.parameters(), first, second, strict=True):
            p.grad.copy_(a + b - torch.clamp(dot, max=0) / size * b)
        run.update()


@habit("gradients", sums=True)
def gradients_mixed_with_those_before(script: Script) -> None:
    """An average of gradients by hand, before the update."""
    mean: list[torch.Tensor] = []

    def mix(run: Any, step: int) -> None:
        now = list(run.model.parameters())
        if not mean:
            mean.extend(torch.zeros_like(p) for p in now)
        for one, p in zip(mean, now, strict=True):
            one.mul_(0.9).add_(p.grad, alpha=0.1)
            p.grad.copy_(one)

    written_out(script, mix)


@habit("gradients", sums=True)
def a_product_with_the_hessian_read(script: Script) -> None:
    """Double backward on a probe between steps: the curvature along the head's gradient."""
    run = script.begin()
    for step in range(2):
        run.step(script.batch(step))
        held = list(run.model.head.parameters())
        probe = squares(run.model(X[:4]), Y[:4])[0]
        first = torch.autograd.grad(probe, held, create_graph=True)
        dot = sum((one * one.detach()).sum() for one in first)
        script.note(*[one.norm() for one in torch.autograd.grad(dot, held)])


@habit("losses", sums=False)
def a_branch_on_the_number_of_a_loss(script: Script) -> None:
    """`if loss.item() > limit`: each micro-batch decides for itself."""

    def act(run: Any, micro: Any) -> None:
        o = run.model(micro.inputs)
        total, count = squares(o, micro.targets)
        if total.item() / count > 8.0:
            total = 0.1 * total
        run.backward(total, count)

    in_each_pass(script, act)


@habit("losses", sums=False)
def a_branch_on_a_number_kept_by_name(script: Script) -> None:
    """`value = loss.item()`, then `if value > limit`."""

    def act(run: Any, micro: Any) -> None:
        total, count = squares(run.model(micro.inputs), micro.targets)
        value = total.item()
        factor = 0.1 if value > 16.0 else 1.0
        run.backward(factor * total, count)

    in_each_pass(script, act)


@habit("losses", sums=False)
def a_root_of_a_mean_in_a_written_out_pass(script: Script) -> None:
    """RMSE: the root is taken of a micro-batch's mean."""

    def act(run: Any, micro: Any) -> None:
        o = run.model(micro.inputs)
        run.backward(nn.functional.mse_loss(o, micro.targets).sqrt() * len(o), len(o))

    in_each_pass(script, act)


@habit("losses", sums=False)
def a_ratio_of_sums_in_a_written_out_pass(script: Script) -> None:
    """Dice over a micro-batch."""

    def act(run: Any, micro: Any) -> None:
        p, t = run.model(micro.inputs).sigmoid(), (micro.targets > 0).double()
        ratio = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
        run.backward(ratio * len(p), len(p))

    in_each_pass(script, act)


@habit("losses", sums=False)
def contrastive_in_a_written_out_pass(script: Script) -> None:
    """InfoNCE with the other samples of the micro-batch as negatives."""

    def act(run: Any, micro: Any) -> None:
        o = nn.functional.normalize(run.model(micro.inputs), dim=1)
        scores = 5.0 * o @ nn.functional.normalize(micro.targets, dim=1).T
        marks = torch.arange(len(o))
        run.backward(nn.functional.cross_entropy(scores, marks, reduction="sum"), len(o))

    in_each_pass(script, act)


@habit("losses", sums=False)
def a_sum_clamped_in_a_written_out_pass(script: Script) -> None:
    """`loss.clamp(max=…)` after the sum."""

    def act(run: Any, micro: Any) -> None:
        total, count = squares(run.model(micro.inputs), micro.targets)
        run.backward(total.clamp(max=16.0), count)

    in_each_pass(script, act)


@habit("losses", sums=True)
def a_look_for_nan_before_each_backward(script: Script) -> None:
    """`if not torch.isfinite(loss): raise`, on numbers that are finite."""

    def act(run: Any, micro: Any) -> None:
        total, count = squares(run.model(micro.inputs), micro.targets)
        if not torch.isfinite(total):
            raise RuntimeError("nan")
        run.backward(total, count)

    in_each_pass(script, act, noted=True)


@habit("loops", sums=True)
def gradients_enabled_by_the_phase(script: Script) -> None:
    """torchvision's tutorial: `for phase in ["train", "val"]: with set_grad_enabled(…)`."""
    run = script.begin()
    for step in range(2):
        for phase in ("train", "val"):
            run.model.train(phase == "train")
            with torch.set_grad_enabled(phase == "train"):
                if phase == "val":
                    script.note(squares(run.model(X[:8]), Y[:8])[0])
                    continue
                for micro in run.micro_batches(script.batch(step)):
                    run.backward(*squares(run.model(micro.inputs), micro.targets))
                script.note(run.update().loss)
    run.model.train()


# ---- optimizers


@habit("optimizer", sums=True)
def weights_stepped_by_hand(script: Script) -> None:
    """`p -= lr * p.grad` in place of an optimizer's step."""
    run = script.begin()
    for step in range(2):
        script.passes(run, step)
        with torch.no_grad():
            for p in run.model.parameters():
                p -= 0.05 * p.grad
                p.grad = None


class Wrapping(torch.optim.Optimizer):
    """Lookahead as packages have it: an optimizer around another, with its groups and state."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state
        self.defaults, self.calls = base.defaults, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in base.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.calls += 1
        if self.calls % 2:
            return
        for group, kept in zip(self.param_groups, self.slow, strict=True):
            for p, slow in zip(group["params"], kept, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


@habit("optimizer", sums=True)
def an_optimizer_that_wraps_another(script: Script) -> None:
    script.train(script.begin(optimizer=lambda p: Wrapping(sgd(list(p)))), 4)


class ScheduleFree(torch.optim.Optimizer):
    """Averages in place of a schedule: `train()` and `eval()` move the weights."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "training": True})

    @torch.no_grad()
    def _move(self, weight: float, *, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["training"] = training

    def train(self) -> None:
        self._move(0.1, training=True)

    def eval(self) -> None:
        self._move(1 - 1 / 0.9, training=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


@habit("optimizer", sums=True)
def a_schedule_free_optimizer(script: Script) -> None:
    run = script.begin(optimizer=lambda p: ScheduleFree(p, 0.02))
    for step in range(4):
        run.optimizer.train()
        script.note(run.step(script.batch(step)).loss)
        run.optimizer.eval()
        script.note(run.predict(X[:4]).sum())


class Shampoo(torch.optim.Optimizer):
    """Preconditions a matrix from both sides, so it needs whole matrices."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad
                if p.ndim == 2:
                    kept = self.state[p]
                    if not kept:
                        kept["left"] = 0.1 * torch.eye(p.shape[0], dtype=p.dtype)
                        kept["right"] = 0.1 * torch.eye(p.shape[1], dtype=p.dtype)
                    kept["left"] += g @ g.T
                    kept["right"] += g.T @ g
                    g = self._root(kept["left"]) @ g @ self._root(kept["right"])
                p.sub_(group["lr"] * g)

    @staticmethod
    def _root(one: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(one)
        return vectors @ torch.diag(values**-0.25) @ vectors.T


@habit("optimizer", sums=True)
def a_preconditioner_of_both_sides(script: Script) -> None:
    script.train(script.begin(optimizer=lambda p: Shampoo(p, 0.02)))


@habit("optimizer", sums=True)
def an_adam_with_amsgrad(script: Script) -> None:
    script.train(script.begin(optimizer=lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True)))


@habit("optimizer", sums=False)
def an_optimizer_in_the_backward_pass(script: Script) -> None:
    """An optimizer for each weight, which steps as soon as its gradient is there."""
    run = script.begin()
    own = {p: torch.optim.SGD([p], lr=0.05) for p in run.model.parameters()}

    def step_now(p: torch.Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(step_now)
    for step in range(2):
        script.passes(run, step)


@habit("optimizer", sums=False)
def a_schedule_stepped_in_every_micro_batch(script: Script) -> None:
    """`scheduler.step()` after each backward pass: ranks have other numbers of them."""
    run = script.begin()
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    for step in range(2):
        for micro in run.micro_batches(script.batch(step)):
            run.backward(*squares(run.model(micro.inputs), micro.targets))
            schedule.step()
        run.update()


@habit("optimizer", sums=True)
def decay_by_hand_over_the_groups(script: Script) -> None:
    @NOWHERE
    def decay(run: Any, step: int) -> None:
        for group in run.optimizer.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * 0.1)

    steps(script, decay)


@habit("optimizer", sums=True)
def a_rate_for_averaged_weights(script: Script) -> None:
    """torch's SWALR from the second step on, and a running mean of weights by hand."""
    run = script.begin()
    schedule = SWALR(run.optimizer, swa_lr=0.01, anneal_epochs=2)
    mean: list[torch.Tensor] = []
    for step in range(4):
        script.note(run.step(script.batch(step)).loss)
        if step:
            schedule.step()
            now = [p.detach().clone() for p in run.model.parameters()]
            mean = now if not mean else [a + (b - a) / step for a, b in zip(mean, now, strict=True)]
    script.note(*[one.norm() for one in mean])


# ---- files and copies


@habit("loops", sums=True)
def a_checkpoint_of_ones_own_resumed(script: Script) -> None:
    """`torch.save({"model", "optimizer", "epoch"})`, then a second start that loads it."""
    run, file = script.begin(optimizer=adamw), io.BytesIO()
    script.train(run, 2)
    kept = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "epoch": 2}
    torch.save(kept, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    model = net()
    model.load_state_dict(found["model"])
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(found["optimizer"])
    run = script.begin(model, optimizer)
    for step in range(found["epoch"], 4):
        script.note(run.step(script.batch(step)).loss)


@habit("loops", sums=True)
def the_whole_model_saved_by_torch_save(script: Script) -> None:
    """`torch.save(model)`, read again with `weights_only=False`."""
    run, file = script.begin(), io.BytesIO()
    script.train(run, 2)
    torch.save(run.model, file)
    file.seek(0)
    plain = torch.load(file, weights_only=False)
    with torch.no_grad():
        script.note(plain(X[:4]).sum())


@habit("loops", sums=True)
def the_optimizer_pickled(script: Script) -> None:
    """The state of the optimizer through `pickle`, after each step."""

    def through(run: Any, step: int) -> None:
        run.optimizer.load_state_dict(pickle.loads(pickle.dumps(run.optimizer.state_dict())))

    steps(script, through, optimizer=adamw)


@habit("loops", sums=True)
def a_copy_for_a_validation_of_ones_own(script: Script) -> None:
    """`copy.deepcopy(model).eval()` in the middle of the loop."""

    def validate(run: Any, step: int) -> None:
        other = copy.deepcopy(run.model).eval()
        with torch.no_grad():
            script.note(other(X[:4]).sum())

    steps(script, validate, 2)


@habit("weights", sums=True)
def an_embedding_grown_in_the_middle(script: Script) -> None:
    """New tokens: a larger table with the old rows takes the place of the first."""

    def batch(step: int) -> Any:
        ids, x = script.share(step, CLASSES, X[:, :3])
        return ids + step // 2, x

    run = script.begin(net(Looked), sample=batch(0))
    for step in range(4):
        if step == 2:
            torch.manual_seed(3)
            grown = nn.Embedding(4, 6).double()
            with torch.no_grad():
                grown.weight[:3] = run.model.table.weight
            run.model.table = grown
            run.optimizer.add_param_group({"params": [grown.weight]})
        script.note(run.step(batch(step)).loss)


@habit("weights", sums=True)
def a_parameter_added_in_the_middle(script: Script) -> None:
    class Shifted(Chain):
        def forward(self, x: Any) -> Any:
            out = super().forward(x)
            return out + self.shift if hasattr(self, "shift") else out

    def add(run: Any, step: int) -> None:
        if step == 1:
            run.model.shift = nn.Parameter(torch.zeros(3).double())
            run.optimizer.add_param_group({"params": [run.model.shift]})

    steps(script, add, 4, model=net(Shifted))


@habit("models", sums=True)
def a_tensor_set_on_the_model_in_each_step(script: Script) -> None:
    """An attribute that is no buffer: the temperature of this step."""

    class Cooled(Chain):
        temperature: Any = 1.0

        def forward(self, x: Any) -> Any:
            return super().forward(x) / self.temperature

    run = script.begin(net(Cooled))
    for step in range(3):
        run.model.temperature = torch.tensor(1.0 + 0.5 * step).double()
        script.note(run.step(script.batch(step)).loss)


# ---- batches and calls


@habit("loops", sums=True)
def targets_that_are_none(script: Script) -> None:
    """`(x, None)`: the loss reads outputs alone."""
    script.train(
        script.begin(loss=lambda o, _: (o.square().sum(), len(o))),
        batch=lambda step: (script.batch(step)[0], None),
    )


@habit("loops", sums=True)
def a_dict_in_a_dict(script: Script) -> None:
    class Named(Chain):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch["image"]["pixels"])

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        return {"image": {"pixels": x, "size": [6, 6]}, "label": {"value": y}}

    run = script.begin(
        net(Named), loss=lambda o, b: squares(o, b["label"]["value"]), sample=batch(0)
    )
    script.train(run, batch=batch)


@habit("loops", sums=True)
def a_labelled_and_an_unlabelled_batch_in_one_dict(script: Script) -> None:
    """FixMatch: twice as many unlabelled rows as labelled ones."""

    class Both(Chain):
        def forward(self, batch: Any) -> Any:
            joined = super().forward(torch.cat([batch["x"], batch["u"].flatten(0, 1)]))
            return joined[: len(batch["x"])], joined[len(batch["x"]) :]

    def loss(o: Any, b: Any) -> Any:
        return squares(o[0], b["y"])[0] + 0.1 * o[1].square().sum(), len(b["y"])

    def batch(step: int) -> Any:
        x, y, u = script.share(step, X, Y, torch.stack([X.flip(0), X.roll(9, 0)], 1))
        return {"x": x, "y": y, "u": u}

    run = script.begin(net(Both), loss=loss, sample=batch(0))
    script.train(run, batch=batch)


@habit("loops", sums=False)
def twice_as_many_unlabelled_rows_in_a_dict(script: Script) -> None:
    """The same with [2 n, 6] beside [n, 6]: no cut along dim 0 keeps them together."""

    class Both(Chain):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch["x"]), super().forward(batch["u"])

    def loss(o: Any, b: Any) -> Any:
        return squares(o[0], b["y"])[0] + 0.1 * o[1].square().sum(), len(b["y"])

    def batch(step: int) -> Any:
        x, y, u = script.share(step, X, Y, torch.stack([X.flip(0), X.roll(9, 0)], 1))
        return {"x": x, "y": y, "u": u.flatten(0, 1)}

    run = script.begin(net(Both), loss=loss, sample=batch(0))
    script.train(run, batch=batch)


@habit("models", sums=True)
def a_forward_with_a_flag(script: Script) -> None:
    """`model(x, return_hidden=True)` in the written-out pass."""

    class Flagged(Chain):
        def forward(self, x: Any, *, return_hidden: bool = False) -> Any:
            hidden = self.layers(x)
            return (self.head(hidden), hidden) if return_hidden else self.head(hidden)

    run = script.begin(net(Flagged))
    for step in range(2):
        for micro in run.micro_batches(script.batch(step)):
            o, hidden = run.model(micro.inputs, return_hidden=True)
            total, count = squares(o, micro.targets)
            run.backward(total + 0.1 * hidden.square().sum(), count)
        script.note(run.update().loss)


@habit("loops", sums=True)
def batches_joined_with_a_remainder(script: Script) -> None:
    """Accumulation of two batches of a loader by `cat`; the last step has one alone."""
    run, kept = script.begin(), []
    for place in range(3):
        kept.append(script.batch(place))
        if len(kept) == 2 or place == 2:
            script.note(run.step(tuple(map(torch.cat, zip(*kept, strict=True)))).loss)
            kept.clear()
