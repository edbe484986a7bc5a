"""Habits on gradients: norms, clipping, noise, masks, hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from habits.habit_sides import Script, sgd, squares
from habits.habit_table import habit

clip_grad_norm_ = nn.utils.clip_grad_norm_


def written_out(script: Script, between: Any, **more: Any) -> None:
    """Three steps of written-out passes, with the user's own work before each update."""
    run = script.begin(**more)
    for step in range(3):
        script.passes(run, step)
        between(run, step)
        script.note(run.update().loss)


def in_each_pass(script: Script, act: Any, steps: int = 2, *, noted: bool = False) -> None:
    """Steps of written-out passes, `act(run, micro)` in each."""
    run = script.begin()
    for step in range(steps):
        for micro in run.micro_batches(script.batch(step)):
            act(run, micro)
        loss = run.update().loss
        script.note(*[loss] * noted)


@habit("gradients", sums=True)
def clip_by_norm_in_written_out_passes(script: Script) -> None:
    written_out(script, lambda run, _: script.note(clip_grad_norm_(run.model.parameters(), 0.5)))


@habit("gradients", sums=True)
def clip_by_the_largest_element(script: Script) -> None:
    written_out(
        script,
        lambda run, _: script.note(
            clip_grad_norm_(run.model.parameters(), 0.1, norm_type=torch.inf)
        ),
    )


@habit("gradients", sums=True)
def clip_by_value_in_written_out_passes(script: Script) -> None:
    written_out(script, lambda run, _: nn.utils.clip_grad_value_(run.model.parameters(), 0.05))


@habit("gradients", sums=True)
def clip_one_part_of_the_model(script: Script) -> None:
    written_out(
        script, lambda run, _: script.note(clip_grad_norm_(run.model.layers.parameters(), 0.2))
    )


@habit("gradients", sums=True)
def norm_read_for_a_log(script: Script) -> None:
    def read(run: Any, step: int) -> None:
        held = [p.grad for p in run.model.parameters() if p.grad is not None]
        script.note(nn.utils.get_total_norm(held))

    written_out(script, read)


@habit("gradients", sums=True)
def norm_of_one_weight_read_for_a_log(script: Script) -> None:
    written_out(script, lambda run, _: script.note(run.model.head.weight.grad.norm()))


@habit("gradients", sums=True)
def norm_by_an_infinite_limit(script: Script) -> None:
    written_out(
        script, lambda run, _: script.note(clip_grad_norm_(run.model.parameters(), float("inf")))
    )


@habit("gradients", sums=True)
def clip_by_the_run_in_written_out_passes(script: Script) -> None:
    written_out(script, lambda run, _: script.note(run.clip_grad_norm_(0.5)))


@habit("gradients", sums=True)
def clip_by_value_by_the_run(script: Script) -> None:
    written_out(script, lambda run, _: run.clip_grad_value_(0.05))


@habit("gradients", sums=True)
def clip_between_forward_backward_and_update(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        run.forward_backward(script.batch(step))
        clip_grad_norm_(run.model.parameters(), 0.5)
        script.note(run.update().loss)


@habit("gradients", sums=True)
def clip_by_the_run_after_forward_backward(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        run.forward_backward(script.batch(step))
        script.note(run.clip_grad_norm_(0.5))
        script.note(run.update().loss)


@habit("gradients", sums=True)
def clip_by_the_argument(script: Script) -> None:
    script.train(script.begin(clip=0.5))


@habit("gradients", sums=True)
def a_factor_on_some_gradients(script: Script) -> None:
    def scale(run: Any, step: int) -> None:
        for p in run.model.head.parameters():
            p.grad.mul_(0.1)

    written_out(script, scale)


@habit("gradients", sums=True)
def gradients_of_a_part_set_to_none(script: Script) -> None:
    def drop(run: Any, step: int) -> None:
        for p in run.model.head.parameters():
            p.grad = None

    written_out(script, drop)


@habit("gradients", sums=True)
def seeded_noise_on_gradients(script: Script) -> None:
    """The same draw on every rank."""

    def add(run: Any, step: int) -> None:
        drawn = torch.Generator().manual_seed(step)
        for p in run.model.head.parameters():
            p.grad.add_(0.1 * torch.randn(p.shape, generator=drawn, dtype=p.dtype))

    written_out(script, add)


@habit("gradients", sums=False)
def noise_that_differs_by_rank(script: Script) -> None:
    def add(run: Any, step: int) -> None:
        drawn = torch.Generator().manual_seed(100 * script.rank + step)
        for p in run.model.parameters():
            p.grad.add_(0.1 * torch.randn(p.shape, generator=drawn, dtype=p.dtype))

    written_out(script, add)


@habit("gradients", sums=True)
def a_factor_by_a_hook(script: Script) -> None:
    run = script.begin()
    run.model.head.weight.register_hook(lambda gradient: gradient * 0.1)
    script.train(run)


@habit("gradients", sums=True)
def rows_frozen_by_a_mask_in_a_hook(script: Script) -> None:
    run = script.begin()
    run.model.head.weight.register_hook(
        lambda gradient: gradient * torch.tensor([[1.0], [0.0], [1.0]]).double()
    )
    script.train(run)


@habit("gradients", sums=True)
def clip_in_a_step_pre_hook(script: Script) -> None:
    run = script.begin()
    run.optimizer.register_step_pre_hook(
        lambda o, *_: (
            clip_grad_norm_([p for g in o.param_groups for p in g["params"]], 0.5) and None
        )
    )
    script.train(run)


@habit("gradients", sums=True)
def clip_by_value_in_a_step_pre_hook(script: Script) -> None:
    run = script.begin()
    run.optimizer.register_step_pre_hook(
        lambda o, *_: nn.utils.clip_grad_value_(
            [p for g in o.param_groups for p in g["params"]], 0.05
        )
    )
    script.train(run)


@habit("gradients", sums=True)
def centred_gradients_in_a_step_pre_hook(script: Script) -> None:
    def centre(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))

    run = script.begin()
    run.optimizer.register_step_pre_hook(centre)
    script.train(run)


@habit("gradients", sums=True)
def adaptive_clipping_by_each_weight(script: Script) -> None:
    def clip(run: Any, step: int) -> None:
        for p in run.model.parameters():
            limit = 0.1 * p.detach().norm()
            p.grad.mul_((limit / p.grad.norm().clamp(min=1e-9)).clamp(max=1.0))

    written_out(script, clip)


@habit("gradients", sums=False)
def zero_grad_before_the_update(script: Script) -> None:
    def drop(run: Any, step: int) -> None:
        if not script.plain:
            run.optimizer.zero_grad()

    written_out(script, drop)


@habit("gradients", sums=True)
def two_passes_of_the_model_in_a_micro_batch(script: Script) -> None:
    def act(run: Any, micro: Any) -> None:
        total, count = squares(run.model(micro.inputs), micro.targets)
        run.backward(total, count)
        run.backward(run.model(micro.inputs * 0.5).abs().sum(), count)

    in_each_pass(script, act, 3, noted=True)


@habit("gradients", sums=True)
def gradient_penalty_on_inputs(script: Script) -> None:
    def act(run: Any, micro: Any) -> None:
        x = micro.inputs.clone().requires_grad_()
        o = run.model(x)
        (slope,) = torch.autograd.grad(o.sum(), x, create_graph=True)
        run.backward(squares(o, micro.targets)[0] + slope.square().sum(), len(o))

    in_each_pass(script, act, 3, noted=True)


@habit("gradients", sums=True)
def clip_with_a_first_order_optimizer_of_ones_own(script: Script) -> None:
    class Sign(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(group["lr"] * p.grad.sign())

    script.train(script.begin(optimizer=lambda p: Sign(p, 0.01), clip=1.0))


@habit("gradients", sums=True)
def norms_by_parameter_name(script: Script) -> None:
    def read(run: Any, step: int) -> None:
        script.note(*[p.grad.norm() for _, p in run.model.named_parameters()])

    written_out(script, read, optimizer=sgd)


@habit("gradients", sums=True)
def gradients_read_after_the_update(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        run.step(script.batch(step))
        script.note(run.model.head.weight.grad.norm())


@habit("gradients", sums=True)
def noise_in_the_shape_of_gradients(script: Script) -> None:
    """`randn_like` after a seed: one stream of draws for whole gradients."""

    def add(run: Any, step: int) -> None:
        torch.manual_seed(step)
        for p in run.model.head.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.1)

    written_out(script, add)


@habit("gradients", sums=True)
def squares_of_gradients_read_for_a_log(script: Script) -> None:
    def read(run: Any, step: int) -> None:
        script.note(sum(p.grad.pow(2).sum() for p in run.model.layers.parameters()))

    written_out(script, read)


def clip_by_hand(script: Script, total_of: Any) -> None:
    """Clip by a norm that the script takes by itself, and read it."""

    def clip(run: Any, step: int) -> None:
        held = [p for p in run.model.parameters() if p.grad is not None]
        total = total_of([p.grad for p in held])
        script.note(total)
        for p in held:
            p.grad.mul_((0.5 / (total + 1e-6)).clamp(max=1.0))

    written_out(script, clip)


@habit("gradients", sums=True)
def clip_by_hand_with_stacked_norms(script: Script) -> None:
    clip_by_hand(script, lambda grads: torch.stack([g.norm() for g in grads]).norm())


@habit("gradients", sums=True)
def clip_by_hand_with_norms_of_a_list(script: Script) -> None:
    clip_by_hand(script, lambda grads: torch.stack(torch._foreach_norm(grads)).norm())


@habit("gradients", sums=True)
def clip_by_hand_with_vector_norms(script: Script) -> None:
    clip_by_hand(
        script,
        lambda grads: torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g) for g in grads])
        ),
    )


@habit("gradients", sums=True)
def clip_by_hand_with_squares(script: Script) -> None:
    clip_by_hand(script, lambda grads: sum(g.square().sum() for g in grads).sqrt())


@habit("gradients", sums=False)
def a_factor_that_differs_by_rank(script: Script) -> None:
    """Gradients scaled by a number of the rank's own, such as its loss."""

    def scale(run: Any, step: int) -> None:
        for p in run.model.parameters():
            p.grad.mul_(1.0 + 0.1 * script.rank)

    written_out(script, scale)


@habit("gradients", sums=False)
def a_factor_that_differs_by_rank_after_forward_backward(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        run.forward_backward(script.batch(step))
        for p in run.model.parameters():
            p.grad.mul_(torch.tensor(1.0 + 0.1 * script.rank).double())
        run.update()


@habit("weights", sums=False)
def weights_scaled_by_a_factor_that_differs_by_rank(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        run.step(script.batch(step))
        for p in run.model.parameters():
            p.data.mul_(1.0 - 0.01 * script.rank)


@habit("gradients", sums=False)
def noise_that_differs_by_rank_after_forward_backward(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        run.forward_backward(script.batch(step))
        drawn = torch.Generator().manual_seed(100 * script.rank + step)
        for p in run.model.parameters():
            p.grad.add_(0.1 * torch.randn(p.grad.shape, generator=drawn, dtype=p.dtype))
        run.update()
