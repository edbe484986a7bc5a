"""Habits on optimizers, schedules, and weights that the user writes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from habits.habit_sides import ROWS, Script, adamw, net, sgd
from habits.habit_table import habit

NOWHERE = torch.no_grad()


def steps(script: Script, between: Any, count: int = 3, **more: Any) -> Any:
    """Steps with the user's own work after each."""
    run = script.begin(**more)
    for step in range(count):
        script.note(run.step(script.batch(step)).loss)
        between(run, step)
    return run


def by_groups(parameters: Any) -> torch.optim.Optimizer:
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.0)


@habit("optimizer", sums=True)
def rate_of_all_groups_set_by_hand(script: Script) -> None:
    def set_rates(run: Any, step: int) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.5

    steps(script, set_rates, optimizer=by_groups)


@habit("optimizer", sums=False)
def second_rate_set_on_rank_0_alone(script: Script) -> None:
    def set_rate(run: Any, step: int) -> None:
        if script.rank == 0 and not (script.plain or script.layout == "single"):
            run.optimizer.param_groups[1]["lr"] = 0.5

    steps(script, set_rate, optimizer=by_groups)


@habit("optimizer", sums=True)
def cosine_schedule(script: Script) -> None:
    model = net()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    steps(script, lambda *_: schedule.step(), 5, model=model, optimizer=optimizer)


@habit("optimizer", sums=True)
def schedule_by_lambda_for_two_groups(script: Script) -> None:
    model = net()
    optimizer = by_groups(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: 0.9**e, lambda e: 0.5**e])
    steps(script, lambda *_: schedule.step(), model=model, optimizer=optimizer)


@habit("optimizer", sums=True)
def one_cycle(script: Script) -> None:
    model = net()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    steps(script, lambda *_: schedule.step(), 5, model=model, optimizer=optimizer)


@habit("optimizer", sums=True)
def rate_that_follows_the_loss(script: Script) -> None:
    model = net()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    run = script.begin(model, optimizer)
    for step in range(4):
        schedule.step(run.step(script.batch(step)).loss)
    script.note(optimizer.param_groups[0]["lr"])


@habit("optimizer", sums=True)
def optimizer_rebuilt_in_the_middle(script: Script) -> None:
    """A second phase makes a new optimizer over the same weights."""

    def rebuild(run: Any, step: int) -> None:
        if step == 1:
            run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.01)

    steps(script, rebuild, 4)


@habit("optimizer", sums=True)
def optimizer_made_anew_in_a_local_name(script: Script) -> None:
    """`optimizer = SGD(…)`: the run does not know of it, and the plain script steps it."""

    def rebuild(run: Any, step: int) -> None:
        if step == 1:
            made = torch.optim.SGD(run.model.parameters(), lr=0.01)
            if script.plain:
                run.optimizer = made

    steps(script, rebuild, 4)


@habit("optimizer", sums=True)
def momentum_zeroed_by_weight(script: Script) -> None:
    def zero(run: Any, step: int) -> None:
        for p in run.model.parameters():
            run.optimizer.state[p]["exp_avg"].zero_()

    steps(script, zero, optimizer=adamw)


@habit("optimizer", sums=True)
def momentum_zeroed_over_the_whole_state(script: Script) -> None:
    def zero(run: Any, step: int) -> None:
        for state in run.optimizer.state.values():
            state["exp_avg"].zero_()

    steps(script, zero, optimizer=adamw)


@habit("optimizer", sums=True)
def state_reset_by_clearing_it(script: Script) -> None:
    def clear(run: Any, step: int) -> None:
        if step == 1:
            run.optimizer.state.clear()

    steps(script, clear, 4, optimizer=adamw)


@habit("optimizer", sums=True)
def state_read_for_a_log(script: Script) -> None:
    def read(run: Any, step: int) -> None:
        script.note(run.optimizer.state[run.model.head.weight]["exp_avg"].norm())

    steps(script, read, optimizer=adamw)


@habit("optimizer", sums=True)
def optimizer_over_the_head_alone(script: Script) -> None:
    steps(script, lambda *_: None, optimizer=lambda p: sgd(list(p)[-2:]))


@habit("optimizer", sums=True)
def adafactor(script: Script) -> None:
    steps(script, lambda *_: None, optimizer=lambda p: torch.optim.Adafactor(p, lr=0.01))


@habit("optimizer", sums=True)
def a_rate_by_layer(script: Script) -> None:
    model = net()
    groups = [{"params": one.parameters(), "lr": 0.01 * 2**n} for n, one in enumerate(model.layers)]
    optimizer = torch.optim.SGD([*groups, {"params": model.head.parameters()}], lr=0.1)
    steps(script, lambda *_: None, model=model, optimizer=optimizer)


@habit("weights", sums=True)
def weights_scaled_in_place(script: Script) -> None:
    @NOWHERE
    def scale(run: Any, step: int) -> None:
        run.model.head.weight.mul_(0.5)

    steps(script, scale)


@habit("weights", sums=True)
def weights_scaled_by_data(script: Script) -> None:
    def scale(run: Any, step: int) -> None:
        run.model.head.weight.data.mul_(0.5)

    steps(script, scale)


@habit("weights", sums=True)
def weights_replaced_by_data(script: Script) -> None:
    def scale(run: Any, step: int) -> None:
        run.model.head.weight.data = run.model.head.weight.data * 0.5

    steps(script, scale)


@habit("weights", sums=True)
def weights_copied_from_a_list(script: Script) -> None:
    @NOWHERE
    def write(run: Any, step: int) -> None:
        run.model.head.bias.copy_(torch.tensor([0.1, 0.2, 0.3]).double())

    steps(script, write)


@habit("weights", sums=True)
def one_row_set_to_zero(script: Script) -> None:
    @NOWHERE
    def write(run: Any, step: int) -> None:
        run.model.head.weight[0, :] = 0

    steps(script, write)


@habit("weights", sums=True)
def rows_of_a_split_weight_normalised(script: Script) -> None:
    """nGPT and max-norm: every row has norm 1 after a step."""

    @NOWHERE
    def normalise(run: Any, step: int) -> None:
        for block in run.model.layers:
            block.down.weight.div_(block.down.weight.norm(dim=1, keepdim=True))

    steps(script, normalise)


@habit("weights", sums=True)
def weights_limited_by_their_whole_norm(script: Script) -> None:
    @NOWHERE
    def limit(run: Any, step: int) -> None:
        for p in run.model.parameters():
            p.mul_((0.5 / p.norm()).clamp(max=1.0))

    steps(script, limit)


@habit("weights", sums=True)
def weights_clamped(script: Script) -> None:
    @NOWHERE
    def clamp(run: Any, step: int) -> None:
        for p in run.model.parameters():
            p.clamp_(-0.2, 0.2)

    steps(script, clamp)


@habit("weights", sums=True)
def head_drawn_anew_with_a_seed(script: Script) -> None:
    def reset(run: Any, step: int) -> None:
        if step == 1:
            torch.manual_seed(7)
            run.model.head.reset_parameters()

    steps(script, reset, 4)


@habit("weights", sums=True)
def a_split_layer_drawn_anew_with_a_seed(script: Script) -> None:
    def reset(run: Any, step: int) -> None:
        if step == 1:
            torch.manual_seed(7)
            run.model.layers[0].up.reset_parameters()

    steps(script, reset, 4)


@habit("weights", sums=True)
def weights_set_by_init(script: Script) -> None:
    def reset(run: Any, step: int) -> None:
        if step == 1:
            nn.init.constant_(run.model.head.weight, 0.1)

    steps(script, reset, 4)


@habit("weights", sums=True)
def layers_tied_after_the_start(script: Script) -> None:
    def tie(run: Any, step: int) -> None:
        if step == 0:
            run.model.layers[1].down.weight = run.model.layers[0].down.weight

    steps(script, tie)


@habit("weights", sums=True)
def state_dict_loaded_in_the_middle(script: Script) -> None:
    saved = {name: one.clone() * 0.9 for name, one in net().state_dict().items()}

    def load(run: Any, step: int) -> None:
        if step == 1:
            run.model.load_state_dict(saved)

    steps(script, load, 4)


@habit("weights", sums=True)
def an_average_beside_the_run(script: Script) -> None:
    kept: dict[str, torch.Tensor] = {}

    def average(run: Any, step: int) -> None:
        for name, one in run.state_dict().items():
            kept.setdefault(name, one.clone()).lerp_(one, 0.1)

    steps(script, average)
    script.note(*kept.values())


@habit("weights", sums=True)
def an_average_in_a_deep_copy(script: Script) -> None:
    kept: list[nn.Module] = []

    @NOWHERE
    def average(run: Any, step: int) -> None:
        if not kept:
            kept.append(copy.deepcopy(run.model))
        for mean, now in zip(kept[0].parameters(), run.model.parameters(), strict=True):
            mean.lerp_(now, 0.1)

    run = steps(script, average)
    with torch.no_grad():
        run.model.load_state_dict(kept[0].state_dict())


@habit("weights", sums=True)
def norm_of_a_weight_read_for_a_log(script: Script) -> None:
    steps(script, lambda run, _: script.note(run.model.head.weight.norm()))


@habit("weights", sums=True)
def norms_of_all_weights_read_for_a_log(script: Script) -> None:
    steps(script, lambda run, _: script.note(*[p.norm() for p in run.model.parameters()]))


@habit("weights", sums=True)
def a_part_unfrozen_later(script: Script) -> None:
    model = net()
    model.layers[0].requires_grad_(False)
    optimizer = sgd(model.parameters())

    def unfreeze(run: Any, step: int) -> None:
        if step == 1:
            run.model.layers[0].requires_grad_(True)

    steps(script, unfreeze, 4, model=model, optimizer=optimizer)


@habit("weights", sums=True)
def a_part_frozen_later(script: Script) -> None:
    def freeze(run: Any, step: int) -> None:
        if step == 1:
            run.model.head.requires_grad_(False)

    steps(script, freeze, 4)


@habit("optimizer", sums=True)
def sharpness_aware_steps(script: Script) -> None:
    """SAM: gradient, step uphill by its norm, gradient there, back, update."""
    run = script.begin()
    for step in range(3):
        script.passes(run, step)
        held = [p for p in run.model.parameters() if p.grad is not None]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in held]).norm()
            ups = [0.05 * p.grad / norm for p in held]
            for p, up in zip(held, ups, strict=True):
                p.add_(up)
        script.passes(run, step)
        with torch.no_grad():
            for p, up in zip(held, ups, strict=True):
                p.sub_(up)
        script.note(run.update().loss)


@habit("optimizer", sums=True)
def two_optimizers_by_kind_of_weight(script: Script) -> None:
    """Muon over matrices alone; the vectors belong to AdamW, in one class of the user's."""
    model = net()
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    optimizer = torch.optim.Muon(matrices, lr=0.01)
    run = script.begin(model, optimizer)
    for step in range(3):
        run.step(script.batch(step))
    assert ROWS


@habit("optimizer", sums=True)
def rate_in_a_warm_up_by_hand(script: Script) -> None:
    run = script.begin()
    for step in range(4):
        for group in run.optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        script.note(run.step(script.batch(step)).loss)


def on_whole_weights(script: Script, change: Any) -> None:
    """Steps with a change of whole weights between the second and the third."""

    def act(run: Any, step: int) -> None:
        if step == 1:
            with torch.no_grad(), run.whole_weights():
                change(run)

    steps(script, act, 4, optimizer=adamw)


@habit("weights", sums=True)
def rows_normalised_on_whole_weights(script: Script) -> None:
    def change(run: Any) -> None:
        for block in run.model.layers:
            block.down.weight.div_(block.down.weight.norm(dim=1, keepdim=True))
            block.up.weight[0] = 0
        script.note(*[p.norm() for p in run.model.parameters()])

    on_whole_weights(script, change)


@habit("weights", sums=True)
def all_layers_drawn_anew_on_whole_weights(script: Script) -> None:
    def change(run: Any) -> None:
        torch.manual_seed(7)
        for block in run.model.layers:
            block.up.reset_parameters()
            nn.init.orthogonal_(block.down.weight)

    on_whole_weights(script, change)


@habit("weights", sums=True)
def a_state_dict_loaded_into_whole_weights(script: Script) -> None:
    saved = {name: one.clone() * 0.9 for name, one in net().state_dict().items()}
    on_whole_weights(script, lambda run: run.model.load_state_dict(saved))


@habit("weights", sums=False)
def whole_weights_changed_unlike_by_rank(script: Script) -> None:
    on_whole_weights(script, lambda run: run.model.head.weight.mul_(0.5 + script.rank))


@habit("weights", sums=True)
def all_layers_drawn_anew_with_a_seed(script: Script) -> None:
    """One stream of draws for layers on several stages, in rows or in parts."""

    def reset(run: Any, step: int) -> None:
        if step == 1:
            torch.manual_seed(7)
            for block in run.model.layers:
                block.up.reset_parameters()
                nn.init.trunc_normal_(block.down.weight, std=0.1)
            run.model.head.reset_parameters()

    steps(script, reset, 4)


@habit("weights", sums=True)
def a_row_scaled_through_an_index(script: Script) -> None:
    """`w[0]` is a view in plain PyTorch."""

    @NOWHERE
    def scale(run: Any, step: int) -> None:
        run.model.head.weight[0].mul_(0.5)

    steps(script, scale)


@habit("weights", sums=True)
def columns_scaled_through_an_index(script: Script) -> None:
    @NOWHERE
    def scale(run: Any, step: int) -> None:
        run.model.head.weight[:, :2].mul_(0.5)

    steps(script, scale)


@habit("weights", sums=True)
def weights_averaged_as_one_vector(script: Script) -> None:
    """parameters_to_vector and back."""

    @NOWHERE
    def scale(run: Any, step: int) -> None:
        vector = nn.utils.parameters_to_vector(run.model.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, run.model.parameters())

    steps(script, scale)


@habit("weights", sums=False)
def noise_that_differs_by_rank_on_weights(script: Script) -> None:
    @NOWHERE
    def add(run: Any, step: int) -> None:
        drawn = torch.Generator().manual_seed(100 * script.rank + step)
        p = run.model.head.weight
        p.add_(0.1 * torch.randn(p.shape, generator=drawn, dtype=p.dtype))

    steps(script, add)


@habit("weights", sums=True)
def squares_of_weights_read_for_a_log(script: Script) -> None:
    def read(run: Any, step: int) -> None:
        script.note(sum(p.detach().pow(2).sum() for p in run.model.layers.parameters()) ** 0.5)

    steps(script, read)


@habit("weights", sums=True)
def sparsity_read_for_a_log(script: Script) -> None:
    def read(run: Any, step: int) -> None:
        script.note(*[(p.data.abs() > 0.1).double().mean() for p in run.model.layers.parameters()])

    steps(script, read)


@habit("weights", sums=True)
def total_norm_of_weights_in_written_out_passes(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        script.passes(run, step)
        script.note(nn.utils.get_total_norm([p.detach() for p in run.model.parameters()]))
        script.note(nn.utils.get_total_norm(list(run.model.parameters())))
        run.update()


@habit("weights", sums=True)
def a_penalty_on_weights_in_a_written_out_pass(script: Script) -> None:
    """L2 by hand, as a share of the step's mean."""
    run = script.begin()
    for step in range(3):
        rows = run.total(len(script.batch(step)[0]))
        for micro in run.micro_batches(script.batch(step)):
            o = run.model(micro.inputs)
            penalty = sum(p.square().sum() for p in run.model.layers.parameters())
            run.backward(((o - micro.targets).square().sum() + 0.1 * penalty * len(o)) / rows)
        run.update()


@habit("optimizer", sums=True)
def moments_scaled_where_a_weight_has_some(script: Script) -> None:
    def scale(run: Any, step: int) -> None:
        for p in run.model.parameters():
            if p in run.optimizer.state:
                run.optimizer.state[p]["exp_avg"].mul_(0.5)

    steps(script, scale, optimizer=adamw)
