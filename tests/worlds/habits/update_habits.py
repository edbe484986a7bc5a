"""Habits between backward and update: hooks, per-sample gradients, own steps, groups, schedules."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from habits.gradient_habits import clip_grad_norm_, in_each_pass, written_out
from habits.habit_sides import Chain, Script, X, Y, adamw, net, sgd, squares
from habits.habit_table import habit
from habits.optimizer_habits import NOWHERE, by_groups, steps

# ---- gradients


def on_all_ranks(script: Script, call: Any, tensors: Any) -> None:
    """A collective of the user's on each tensor, in a run."""
    if not script.plain and dist.is_initialized():
        for one in tensors:
            call(one)


def average(tensor: torch.Tensor) -> None:
    """`all_reduce` and a division."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


@habit("gradients", sums=True)
def clip_each_group_by_its_own_limit(script: Script) -> None:
    def clip(run: Any, step: int) -> None:
        for group, limit in zip(run.optimizer.param_groups, (0.3, 0.1), strict=True):
            script.note(clip_grad_norm_(group["params"], limit))

    written_out(script, clip, optimizer=by_groups)


@habit("gradients", sums=True)
def clip_each_weight_alone(script: Script) -> None:
    def clip(run: Any, step: int) -> None:
        for p in run.model.parameters():
            script.note(clip_grad_norm_(p, 0.1))

    written_out(script, clip)


@habit("gradients", sums=True)
def clip_by_hand_over_all_weights(script: Script) -> None:
    """The square root of a sum of squares, as in scripts that do not call torch's function."""

    def clip(run: Any, step: int) -> None:
        total = sum(p.grad.data.norm(2).item() ** 2 for p in run.model.parameters()) ** 0.5
        script.note(total)
        for p in run.model.parameters():
            p.grad.data.mul_(min(1.0, 0.5 / (total + 1e-6)))

    written_out(script, clip)


@habit("gradients", sums=True)
def one_vector_of_gradients_read(script: Script) -> None:
    def read(run: Any, step: int) -> None:
        vector = torch.cat([p.grad.reshape(-1) for p in run.model.parameters()])
        script.note(vector.norm(), vector.abs().max(), len(vector))

    written_out(script, read)


@habit("gradients", sums=True)
def gradients_kept_for_the_next_step(script: Script) -> None:
    """The cosine between gradients of neighbouring steps."""
    kept: list[torch.Tensor] = []

    def read(run: Any, step: int) -> None:
        now = [p.grad.clone() for p in run.model.layers.parameters()]
        if kept:
            dots = [F.cosine_similarity(a.flatten(), b.flatten(), 0)
                    for a, b in zip(kept, now, strict=True)]  # fmt: skip
            script.note(*dots)
        kept[:] = now

    written_out(script, read)


@habit("gradients", sums=True)
def gradients_looked_at_for_nan(script: Script) -> None:
    def read(run: Any, step: int) -> None:
        found = [bool(torch.isfinite(p.grad).all()) for p in run.model.parameters()]
        script.note(sum(found), any(torch.isnan(p.grad).any() for p in run.model.parameters()))

    written_out(script, read)


@habit("gradients", sums=True)
def signs_of_gradients(script: Script) -> None:
    def sign(run: Any, step: int) -> None:
        for p in run.model.parameters():
            p.grad.sign_()

    written_out(script, sign, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))


@habit("gradients", sums=True)
def gradients_through_bf16(script: Script) -> None:
    def cast(run: Any, step: int) -> None:
        for p in run.model.parameters():
            p.grad.copy_((p.grad * 2**16).round() / 2**16)

    written_out(script, cast)


@habit("gradients", sums=True)
def the_largest_gradients_of_each_weight(script: Script) -> None:
    """Sparsified: all but the largest quarter is dropped."""

    def keep(run: Any, step: int) -> None:
        for p in run.model.parameters():
            limit = p.grad.abs().flatten().topk(max(1, p.grad.numel() // 4)).values[-1]
            p.grad[p.grad.abs() < limit] = 0

    written_out(script, keep)


@habit("gradients", sums=True)
def unitwise_clipping(script: Script) -> None:
    """AGC of NFNets: each row's gradient by its row of the weight."""

    def clip(run: Any, step: int) -> None:
        for block in run.model.layers:
            for p in (block.up.weight, block.down.weight):
                limit = 0.1 * p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3)
                norm = p.grad.norm(dim=1, keepdim=True)
                p.grad.mul_(torch.where(norm > limit, limit / norm.clamp(min=1e-6), 1.0))

    written_out(script, clip)


@habit("gradients", sums=True)
def gradients_divided_by_a_factor_of_the_loss(script: Script) -> None:
    """A loss scale by hand."""
    run = script.begin()
    for step in range(3):
        for micro in run.micro_batches(script.batch(step)):
            total, count = squares(run.model(micro.inputs), micro.targets)
            run.backward(total * 1024, count)
        for p in run.model.parameters():
            p.grad.div_(1024)
        run.update()


@habit("gradients", sums=True)
def torchs_scaler_by_hand(script: Script) -> None:
    """`GradScaler`: scale, unscale_, step, update."""
    run = script.begin()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(2):
        for micro in run.micro_batches(script.batch(step)):
            total, count = squares(run.model(micro.inputs), micro.targets)
            run.backward(scaler.scale(total), count)
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        if script.plain:
            continue
        run.update()


@habit("gradients", sums=False)
def a_clamp_by_a_hook_on_a_weight(script: Script) -> None:
    """Clipping by `register_hook`: each pass alone is clamped, not their sum."""
    run = script.begin()
    for p in run.model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    script.train(run)


@habit("gradients", sums=False)
def a_norm_by_a_hook_on_a_weight(script: Script) -> None:
    run = script.begin()
    run.model.head.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 1.0))
    script.train(run)


@habit("gradients", sums=False)
def a_clamp_by_a_hook_after_accumulation(script: Script) -> None:
    run = script.begin()
    for p in run.model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: setattr(p, "grad", p.grad.clamp(-0.01, 0.01))
        )
    script.train(run)


@habit("gradients", sums=True)
def a_hook_on_a_weight_before_the_start(script: Script) -> None:
    model = net()
    model.layers[1].up.weight.register_hook(lambda gradient: gradient * 0.1)
    model.head.weight.register_hook(lambda gradient: gradient * 0.1)
    script.train(script.begin(model))


@habit("gradients", sums=True)
def a_hook_on_activations(script: Script) -> None:
    class Hooked(Chain):
        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient * 0.5)
            return self.head(hidden)

    script.train(script.begin(net(Hooked)))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -0.3 * gradient


@habit("models", sums=True)
def gradients_reversed_for_a_domain_head(script: Script) -> None:
    """DANN: an own `autograd.Function` between the trunk and a second head."""

    class Domains(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.domain = nn.Linear(6, 1)

        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            return self.head(hidden), self.domain(Reverse.apply(hidden))

    def loss(o: Any, y: Any) -> Any:
        return squares(o[0], y)[0] + (o[1][:, 0] - y[:, 0]).square().sum(), len(y)

    script.train(script.begin(net(Domains), loss=loss))


@habit("gradients", sums=True)
def per_sample_norms_by_vmap(script: Script) -> None:
    """`torch.func` between steps: the norm of each sample's gradient."""
    run = script.begin()
    for step in range(2):
        run.step(script.batch(step))
        weights = {name: p.detach() for name, p in run.model.named_parameters()}

        def loss(params: Any, x: Any, y: Any) -> Any:
            return (functional_call(run.model, params, (x[None],))[0] - y).square().sum()

        found = vmap(grad(loss), (None, 0, 0))(weights, X[:4], Y[:4])
        script.note(sum(one.flatten(1).square().sum(1) for one in found.values()))


@habit("gradients", sums=True)
def a_functional_call_with_other_weights(script: Script) -> None:
    """Outputs at weights that are moved by a little, inside of a written-out pass."""

    def act(run: Any, micro: Any) -> None:
        moved = {name: 1.01 * p for name, p in run.model.named_parameters()}
        o = functional_call(run.model, moved, (micro.inputs,))
        run.backward((o - micro.targets).square().sum(), len(o))

    in_each_pass(script, act, noted=True)


@habit("gradients", sums=True)
def gradients_of_weights_between_steps(script: Script) -> None:
    """`torch.autograd.grad` on a probe batch that every rank has."""
    run = script.begin()
    for step in range(2):
        run.step(script.batch(step))
        probe = squares(run.model(X[:4]), Y[:4])[0]
        found = torch.autograd.grad(probe, list(run.model.parameters()))
        script.note(*[one.norm() for one in found])


@habit("gradients", sums=False)
def a_penalty_on_gradients_of_weights(script: Script) -> None:
    """The norm of a micro-batch's gradient in the loss, by `create_graph`: no sum over samples."""

    def act(run: Any, micro: Any) -> None:
        total, count = squares(run.model(micro.inputs), micro.targets)
        found = torch.autograd.grad(total, list(run.model.parameters()), create_graph=True)
        run.backward(total + 0.01 * sum(one.square().sum() for one in found), count)

    in_each_pass(script, act)


@habit("gradients", sums=True)
def gradients_by_hand_in_a_written_out_pass(script: Script) -> None:
    """`p.grad += g` of `autograd.grad`, without `run.backward`."""

    def act(run: Any, micro: Any) -> None:
        total, count = squares(run.model(micro.inputs), micro.targets)
        held = list(run.model.parameters())
        for p, one in zip(held, torch.autograd.grad(total / count, held), strict=True):
            p.grad = one if p.grad is None else p.grad + one

    in_each_pass(script, act)


@habit("gradients", sums=True)
def torchs_backward_in_a_written_out_pass(script: Script) -> None:
    """`loss.backward()` where `run.backward(loss, count)` belongs."""

    def act(run: Any, micro: Any) -> None:
        total, count = squares(run.model(micro.inputs), micro.targets)
        (total / count).backward()

    in_each_pass(script, act)


@habit("gradients", sums=False)
def conflicting_gradients_projected(script: Script) -> None:
    """PCGrad on each micro-batch: two losses, one projected on the other."""

    def act(run: Any, micro: Any) -> None:
        o = run.model(micro.inputs)
        held = list(run.model.parameters())
        one = torch.autograd.grad((o - micro.targets).square().sum(), held, retain_graph=True)
        two = torch.autograd.grad(o.abs().sum(), held)
        for p, a, b in zip(held, one, two, strict=True):
            dot = (a * b).sum().clamp(max=0)
            p.grad = a + b - dot / (b.square().sum() + 1e-9) * b

    in_each_pass(script, act)


@habit("gradients", sums=True)
def saliency_between_steps(script: Script) -> None:
    """`backward()` through the model for the gradient of inputs; weights' gradients are left."""
    run = script.begin()
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        x = X[:4].clone().requires_grad_()
        run.model(x).sum().backward()
        script.note(x.grad)


@habit("gradients", sums=True)
def adversarial_samples(script: Script) -> None:
    """FGSM: a pass for the gradient of the inputs, then a step on the moved inputs."""
    run = script.begin()
    for step in range(3):
        x, y = script.batch(step)
        x = x.clone().requires_grad_()
        squares(run.model(x), y)[0].backward()
        script.note(run.step(((x + 0.01 * x.grad.sign()).detach(), y)).loss)


@habit("gradients", sums=True)
def gradients_set_to_zero_before_each_step(script: Script) -> None:
    """Left from the plain loop: `optimizer.zero_grad()` first, `model.zero_grad()` last."""
    run = script.begin()
    for step in range(3):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        script.passes(run, step)
        script.note(run.update().loss)
        run.model.zero_grad()


@habit("gradients", sums=True)
def gradients_reduced_by_hand(script: Script) -> None:
    """`dist.all_reduce(p.grad)` and a division, as in loops without DDP."""

    def reduce(run: Any, step: int) -> None:
        on_all_ranks(script, lambda p: average(p.grad), run.model.parameters())

    written_out(script, reduce)


@habit("weights", sums=True)
def weights_averaged_by_hand(script: Script) -> None:
    """`dist.all_reduce(p.data)` and a division after each step: of equal weights, no change."""

    def reduce(run: Any, step: int) -> None:
        on_all_ranks(script, lambda p: average(p.data), run.model.parameters())

    steps(script, reduce)


@habit("weights", sums=True)
def weights_sent_from_rank_0(script: Script) -> None:
    """`dist.broadcast(p.data, 0)` after the start."""
    run = script.begin()
    on_all_ranks(script, lambda p: dist.broadcast(p.data, 0), run.model.parameters())
    script.train(run)


@habit("loops", sums=True)
def metrics_reduced_by_torch(script: Script) -> None:
    """The mean over ranks of an own number: sums and counts by `dist.all_reduce`."""
    run = script.begin()
    for step in range(2):
        x, y = script.batch(step)
        run.step((x, y))
        found = torch.stack([y.abs().sum(), torch.tensor(float(y.numel())).double()])
        on_all_ranks(script, dist.all_reduce, [found])
        script.note(found[0] / found[1])


@habit("gradients", sums=True)
def seeded_noise_in_the_shape_of_all_gradients(script: Script) -> None:
    """DP-SGD and Langevin noise: the same draw on every rank."""

    def add(run: Any, step: int) -> None:
        drawn = torch.Generator().manual_seed(step)
        for p in run.model.parameters():
            p.grad.add_(0.1 * torch.randn(p.grad.shape, generator=drawn, dtype=p.dtype))

    written_out(script, add)


@habit("gradients", sums=True)
def a_mask_drawn_for_all_gradients(script: Script) -> None:
    def drop(run: Any, step: int) -> None:
        torch.manual_seed(step)
        for p in run.model.parameters():
            p.grad.mul_((torch.rand_like(p.grad) > 0.5).double())

    written_out(script, drop)


# ---- optimizers


@habit("optimizer", sums=True)
def the_optimizer_stepped_by_hand(script: Script) -> None:
    """`run.forward_backward`, then `optimizer.step()` in place of `run.update()`."""
    run = script.begin()
    for step in range(3):
        run.forward_backward(script.batch(step))
        run.optimizer.step()


@habit("optimizer", sums=True)
def two_forward_backwards_before_an_update(script: Script) -> None:
    """Accumulation by hand: in plain PyTorch gradients of both batches add up."""
    run = script.begin()
    for step in range(2):
        if script.plain:
            both = [torch.cat(two) for two in zip(*map(script.batch, (2 * step, 2 * step + 1)),
                                                 strict=True)]  # fmt: skip
            run.forward_backward(tuple(both))
        else:
            run.forward_backward(script.batch(2 * step))
            run.forward_backward(script.batch(2 * step + 1))
        run.update()


@habit("optimizer", sums=True)
def a_second_optimizer_over_the_head(script: Script) -> None:
    """One optimizer belongs to the run; another, made after the start, steps the head as well."""
    run = script.begin(optimizer=lambda p: sgd(list(p)[:-2]))
    other = torch.optim.SGD(run.model.head.parameters(), lr=0.1)
    for step in range(3):
        other.zero_grad()
        run.forward_backward(script.batch(step))
        other.step()
        run.update()


@habit("optimizer", sums=False)
def lbfgs_with_a_closure(script: Script) -> None:
    run = script.begin(optimizer=sgd if script.plain else torch.optim.LBFGS)
    script.train(run, 2)


@habit("optimizer", sums=True)
def warm_up_then_cosine(script: Script) -> None:
    model = net()
    optimizer = adamw(model.parameters())
    rates = torch.optim.lr_scheduler
    schedule = rates.SequentialLR(
        optimizer,
        [rates.LinearLR(optimizer, 0.1, total_iters=2), rates.CosineAnnealingLR(optimizer, 4)],
        milestones=[2],
    )
    steps(script, lambda *_: schedule.step(), 4, model=model, optimizer=optimizer)


@habit("optimizer", sums=True)
def a_schedule_made_after_the_start(script: Script) -> None:
    run = script.begin()
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        schedule.step()


@habit("optimizer", sums=False)
def a_rate_that_follows_the_ranks_own_loss(script: Script) -> None:
    """`ReduceLROnPlateau` on a local number: ranks come to different rates."""
    model = net()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
    run = script.begin(model, optimizer)
    for step in range(4):
        x, y = script.batch(step)
        own = float(y.square().mean()) + step * script.rank
        run.step((x, y))
        schedule.step(own)


@habit("optimizer", sums=True)
def a_rate_from_the_norm_of_gradients(script: Script) -> None:
    def set_rate(run: Any, step: int) -> None:
        norm = float(clip_grad_norm_(run.model.parameters(), 1.0))
        for group in run.optimizer.param_groups:
            group["lr"] = 0.05 / (1 + norm)

    written_out(script, set_rate)


@habit("optimizer", sums=True)
def a_step_dropped_for_its_norm(script: Script) -> None:
    """`if norm > limit: continue`, which all ranks decide alike."""
    run = script.begin()
    for step in range(3):
        script.passes(run, step)
        norm = float(clip_grad_norm_(run.model.parameters(), 1.0))
        script.note(norm)
        if step == 1:
            run.optimizer.zero_grad()
            continue
        run.update()


@habit("optimizer", sums=True)
def a_group_added_in_the_middle(script: Script) -> None:
    """The head trains from the second step on: `add_param_group`."""

    def add(run: Any, step: int) -> None:
        if step == 0:
            run.optimizer.add_param_group({"params": list(run.model.head.parameters()), "lr": 0.01})

    steps(script, add, optimizer=lambda p: sgd(list(p)[:-2]))


@habit("optimizer", sums=True)
def decay_and_momentum_changed_in_the_middle(script: Script) -> None:
    def change(run: Any, step: int) -> None:
        for group in run.optimizer.param_groups:
            group["weight_decay"], group["momentum"] = 0.1 * step, 0.5

    steps(script, change)


@habit("optimizer", sums=True)
def weights_clamped_in_a_step_post_hook(script: Script) -> None:
    @NOWHERE
    def clamp(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.2, 0.2)

    run = script.begin()
    run.optimizer.register_step_post_hook(clamp)
    script.train(run)


@habit("optimizer", sums=True)
def adagrad_whose_state_is_made_with_it(script: Script) -> None:
    steps(script, lambda *_: None, optimizer=lambda p: torch.optim.Adagrad(p, lr=0.05))


@habit("optimizer", sums=True)
def averaged_and_resilient_steps(script: Script) -> None:
    """Optimizers that few use: ASGD keeps an average, and Rprop has a rate for each element."""
    steps(script, lambda *_: None, optimizer=lambda p: torch.optim.Rprop(p, lr=0.01))


@habit("optimizer", sums=True)
def a_fused_adamw(script: Script) -> None:
    steps(script, lambda *_: None, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))


@habit("optimizer", sums=True)
def a_trust_ratio_by_weight(script: Script) -> None:
    """LAMB and LARS: the step of a weight scales with its norm."""

    class Lars(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        ratio = p.norm() / (p.grad.norm() + 1e-9)
                        p.sub_(group["lr"] * ratio * p.grad)

    steps(script, lambda *_: None, optimizer=lambda p: Lars(p, 0.01))


@habit("optimizer", sums=True)
def a_sparse_table(script: Script) -> None:
    """`nn.Embedding(sparse=True)` under plain SGD."""
    from habits.habit_sides import CLASSES
    from habits.model_habits import Looked

    model = net(Looked)
    model.table.sparse = True

    def batch(step: int) -> Any:
        return script.share(step, CLASSES, X[:, :3])

    run = script.begin(model, lambda p: torch.optim.SGD(p, lr=0.05), sample=batch(0))
    script.train(run, batch=batch)


@habit("optimizer", sums=True)
def an_optimizer_in_a_copy(script: Script) -> None:
    """`copy.deepcopy(optimizer.state_dict())` for a log of moments."""

    def read(run: Any, step: int) -> None:
        state = copy.deepcopy(run.optimizer.state_dict())["state"]
        script.note(len(state))

    steps(script, read, optimizer=adamw)
