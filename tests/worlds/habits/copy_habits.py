"""Habits on copies of a model: averages, target networks, slow weights, saved and pruned weights."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from habits.habit_sides import ROWS, Block, Chain, Script, X, Y, adamw, net, sgd, squares
from habits.habit_table import habit
from habits.optimizer_habits import NOWHERE, steps


@habit("weights", sums=True)
def an_average_by_averaged_model(script: Script) -> None:
    """`torch.optim.swa_utils.AveragedModel`, updated after each step."""
    run = script.begin()
    mean = AveragedModel(run.model)
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        mean.update_parameters(run.model)
    script.note(*[p.sum() for p in mean.module.parameters()])


@habit("weights", sums=True)
def an_exponential_average_by_averaged_model(script: Script) -> None:
    """Its outputs are read between steps."""
    run = script.begin()
    mean = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        mean.update_parameters(run.model)
        with torch.no_grad():
            script.note(mean(X[:4]).sum())


class Normed(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=None)
        self.eval()

    def forward(self, x: Any) -> Any:
        return super().forward(self.norm(x))


@habit("weights", sums=True)
def statistics_of_an_average_updated(script: Script) -> None:
    """`update_bn` over the same batches on every rank, on a copy with averaged weights."""
    run = script.begin(net(Normed))
    run.model.eval()
    for step in range(3):
        run.step(script.batch(step))
        run.model.eval()
    mean = net(Normed)
    mean.load_state_dict(run.state_dict())
    update_bn([X[:8], X[8:16]], mean)
    script.note(mean.norm.running_mean, mean.norm.running_var)


@habit("weights", sums=True)
def a_shadow_by_name(script: Script) -> None:
    """EMA as in many scripts: a dict of clones, `mul_` and `add_`."""
    run = script.begin()
    shadow = {name: p.data.clone() for name, p in run.model.named_parameters()}
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        for name, p in run.model.named_parameters():
            shadow[name].mul_(0.9).add_(p.data, alpha=0.1)
    script.note(*[one.norm() for one in shadow.values()])


@habit("weights", sums=True)
def a_shadow_put_in_for_validation(script: Script) -> None:
    """The average takes the place of the weights for a validation, then they come back."""
    run = script.begin()
    shadow = [p.detach().clone() for p in run.model.parameters()]
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        with torch.no_grad():
            for one, p in zip(shadow, run.model.parameters(), strict=True):
                one.lerp_(p, 0.1)
    kept = [p.detach().clone() for p in run.model.parameters()]
    with torch.no_grad():
        for one, p in zip(shadow, run.model.parameters(), strict=True):
            p.copy_(one)
    data = torch.utils.data.TensorDataset(X[:24], Y[:24])
    script.note(run.evaluate(data)["loss"])
    with torch.no_grad():
        for one, p in zip(kept, run.model.parameters(), strict=True):
            p.copy_(one)
    script.note(run.step(script.batch(3)).loss)


@habit("weights", sums=True)
def a_target_network_loaded_by_state_dict(script: Script) -> None:
    """DQN: a copy gives the targets, and gets the weights every second step."""
    target = net()
    run = script.begin()
    for step in range(4):
        x, _ = script.batch(step)
        with torch.no_grad():
            y = 0.9 * target(x) + x[:, :3]
        script.note(run.step((x, y)).loss)
        if step % 2:
            target.load_state_dict(run.state_dict())


@habit("weights", sums=True)
def a_target_network_that_follows_slowly(script: Script) -> None:
    """Polyak: a copy made before the start follows `run.model.parameters()`."""
    model = net()
    target = copy.deepcopy(model).requires_grad_(False)
    run = script.begin(model)
    for step in range(3):
        x, _ = script.batch(step)
        script.note(run.step((x, target(x) + x[:, :3])).loss)
        for slow, fast in zip(target.parameters(), run.model.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


class Momentum(nn.Module):
    """BYOL: an encoder that trains, and a copy that follows it."""

    inside = False

    def __init__(self) -> None:
        super().__init__()
        self.online, self.head = nn.Sequential(Block(), Block()), nn.Linear(6, 3)
        self.slow = copy.deepcopy(self.online).requires_grad_(False)

    def follow(self) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    def forward(self, x: Any) -> Any:
        if self.inside:
            self.follow()
        with torch.no_grad():
            wanted = self.slow(x)
        return self.head(self.online(x)) - wanted[:, :3]


class FollowsInside(Momentum):
    inside = True


@habit("weights", sums=True)
def a_momentum_encoder_that_follows_after_each_step(script: Script) -> None:
    run = script.begin(net(Momentum))
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        run.model.follow()


@habit("weights", sums=False)
def a_momentum_encoder_that_follows_in_forward(script: Script) -> None:
    """MoCo's own code: it follows once a forward pass, so once a micro-batch here."""
    script.train(script.begin(net(FollowsInside)))


@habit("optimizer", sums=True)
def lookahead_by_hand(script: Script) -> None:
    run = script.begin()
    slow = [p.detach().clone() for p in run.model.parameters()]
    for step in range(4):
        script.note(run.step(script.batch(step)).loss)
        if step % 2:
            with torch.no_grad():
                for kept, p in zip(slow, run.model.parameters(), strict=True):
                    kept.add_(p - kept, alpha=0.5)
                    p.copy_(kept)


@habit("weights", sums=True)
def weights_pulled_towards_the_start(script: Script) -> None:
    """L2-SP by hand, with clones of the model before the start."""
    model = net()
    first = [p.detach().clone() for p in model.parameters()]

    @NOWHERE
    def pull(run: Any, step: int) -> None:
        for start, p in zip(first, run.model.parameters(), strict=True):
            p.sub_(0.1 * (p - start))

    steps(script, pull, model=model)


@habit("weights", sums=True)
def weights_pulled_towards_clones(script: Script) -> None:
    run = script.begin()
    first = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        with torch.no_grad():
            for name, p in run.model.named_parameters():
                p.add_(first[name] - p, alpha=0.1)


@habit("weights", sums=True)
def the_best_state_dict_loaded_at_the_end(script: Script) -> None:
    """`best = deepcopy(model.state_dict())` where the loss is lowest, and back at the end."""
    run = script.begin()
    best, lowest = None, float("inf")
    for step in range(3):
        loss = run.step(script.batch(step)).loss
        if loss < lowest:
            best, lowest = copy.deepcopy(run.model.state_dict()), loss
    assert best is not None
    run.model.load_state_dict(best)
    script.note(run.step(script.batch(3)).loss)


@habit("weights", sums=True)
def weights_saved_by_torch_save(script: Script) -> None:
    """`torch.save(model.state_dict(), …)` in the loop; a plain module reads the file."""
    run = script.begin()
    for step in range(2):
        run.step(script.batch(step))
        file = io.BytesIO()
        torch.save(run.model.state_dict(), file)
        file.seek(0)
        plain = net()
        plain.load_state_dict(torch.load(file, weights_only=False))
        with torch.no_grad():
            script.note(plain(X[:4]).sum())


@habit("weights", sums=True)
def the_optimizer_loaded_from_its_state_dict(script: Script) -> None:
    """The state of step 1 again after step 3: as a run that goes back."""
    kept: list[Any] = []

    def act(run: Any, step: int) -> None:
        if step == 0:
            kept.append(copy.deepcopy(run.optimizer.state_dict()))
        if step == 2:
            run.optimizer.load_state_dict(kept[0])

    steps(script, act, 4, optimizer=adamw)


@habit("models", sums=True)
def pruned_before_the_start(script: Script) -> None:
    """`torch.nn.utils.prune`: a mask in a buffer, and the weight computed before each forward."""
    model = net()
    for block in model.layers:
        prune.l1_unstructured(block.up, "weight", 0.3)
    prune.l1_unstructured(model.head, "weight", 0.3)
    script.train(script.begin(model))


@habit("weights", sums=True)
def pruned_in_the_middle(script: Script) -> None:
    """A new parameter takes the place of the weight, which the optimizer goes on to hold."""

    def act(run: Any, step: int) -> None:
        if step == 1:
            prune.l1_unstructured(run.model.head, "weight", 0.3)

    steps(script, act, 4)


@habit("weights", sums=True)
def a_mask_by_size_kept_after_each_step(script: Script) -> None:
    """The lottery ticket: small weights at the start stay zero."""
    run = script.begin()
    masks = [(p.detach().abs() > 0.1).double() for p in run.model.parameters()]
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        for mask, p in zip(masks, run.model.parameters(), strict=True):
            p.data.mul_(mask)


@habit("weights", sums=True)
def the_smallest_weights_of_each_layer_zeroed(script: Script) -> None:
    """A threshold by `kthvalue` over the whole weight."""

    @NOWHERE
    def cut(run: Any, step: int) -> None:
        for p in run.model.parameters():
            limit = p.abs().flatten().kthvalue(max(1, p.numel() // 4)).values
            p[p.abs() <= limit] = 0

    steps(script, cut)


@habit("weights", sums=True)
def weights_put_on_a_grid(script: Script) -> None:
    def quantise(run: Any, step: int) -> None:
        for p in run.model.parameters():
            p.data.copy_((p.data * 64).round() / 64)

    steps(script, quantise)


@habit("weights", sums=True)
def weights_through_bf16(script: Script) -> None:
    def cast(run: Any, step: int) -> None:
        for p in run.model.parameters():
            p.data = p.data.bfloat16().double()

    steps(script, cast)


@habit("weights", sums=True)
def rows_limited_by_renorm(script: Script) -> None:
    @NOWHERE
    def limit(run: Any, step: int) -> None:
        for block in run.model.layers:
            block.up.weight.copy_(torch.renorm(block.up.weight, 2, 0, 0.5))

    steps(script, limit)


@habit("weights", sums=True)
def a_head_replaced_in_the_middle(script: Script) -> None:
    """Fine-tuning in phases: another module takes the head's place."""

    def act(run: Any, step: int) -> None:
        if step == 1:
            torch.manual_seed(3)
            run.model.head = nn.Linear(6, 3).double()

    steps(script, act, 4)


@habit("weights", sums=True)
def blocks_trained_in_turns(script: Script) -> None:
    """`requires_grad_` by step: one half of the blocks, then the other."""
    run = script.begin()
    for step in range(4):
        for place, block in enumerate(run.model.layers):
            block.requires_grad_(place % 2 == step % 2)
        script.note(run.step(script.batch(step)).loss)


@habit("weights", sums=False)
def the_model_cast_in_the_middle(script: Script) -> None:
    def act(run: Any, step: int) -> None:
        if step == 1:
            run.model.float().double()

    steps(script, act, 4)


@habit("weights", sums=True)
def parameters_counted_for_a_log(script: Script) -> None:
    def read(run: Any, step: int) -> None:
        script.note(sum(p.numel() for p in run.model.parameters()))

    steps(script, read, 1)


@habit("weights", sums=True)
def shapes_of_weights_read(script: Script) -> None:
    def read(run: Any, step: int) -> None:
        for p in run.model.parameters():
            script.note(*p.shape)

    steps(script, read, 1)


@habit("weights", sums=True)
def largest_weights_read_for_a_log(script: Script) -> None:
    def read(run: Any, step: int) -> None:
        script.note(*[p.detach().abs().max() for p in run.model.parameters()])
        script.note(*[p.detach().std() for p in run.model.layers.parameters()])

    steps(script, read)


@habit("weights", sums=True)
def cosines_to_the_start_read_for_a_log(script: Script) -> None:
    run = script.begin()
    first = [p.detach().clone() for p in run.model.parameters()]
    for step in range(2):
        run.step(script.batch(step))
    for one, p in zip(first, run.model.parameters(), strict=True):
        script.note(F.cosine_similarity(one.flatten(), p.detach().flatten(), 0))


@habit("weights", sums=True)
def singular_values_read_for_a_log(script: Script) -> None:
    def read(run: Any, step: int) -> None:
        script.note(torch.linalg.svdvals(run.model.layers[0].up.weight.detach()))
        script.note(torch.linalg.matrix_norm(run.model.head.weight.detach(), 2))

    steps(script, read, 2)


@habit("weights", sums=True)
def weights_as_arrays_of_numpy(script: Script) -> None:
    """`p.detach().cpu().numpy()` for a histogram."""

    def read(run: Any, step: int) -> None:
        for p in run.model.parameters():
            script.note(float((p.detach().cpu().numpy() ** 2).sum()))

    steps(script, read, 2)


@habit("weights", sums=True)
def a_copy_trained_beside(script: Script) -> None:
    """MAML's inner loop: a deep copy takes two steps of its own, and only its loss is read."""
    run = script.begin()
    for step in range(2):
        run.step(script.batch(step))
        inner = net()
        inner.load_state_dict(run.state_dict())
        own = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(2):
            own.zero_grad()
            loss = squares(inner(X[:8]), Y[:8])[0] / ROWS
            loss.backward()
            own.step()
        script.note(loss)


@habit("optimizer", sums=True)
def weights_averaged_over_a_window(script: Script) -> None:
    """The mean of the last two steps is loaded at the end (SWA by hand)."""
    run = script.begin(optimizer=sgd)
    kept: list[dict[str, torch.Tensor]] = []
    for step in range(3):
        run.step(script.batch(step))
        kept.append({name: one.clone() for name, one in run.model.state_dict().items()})
    mean = {name: (kept[-1][name] + kept[-2][name]) / 2 for name in kept[-1]}
    run.model.load_state_dict(mean)


@habit("weights", sums=True)
def seeded_noise_in_the_shape_of_each_weight(script: Script) -> None:
    """`torch.randn(p.shape)` with the same seed on every rank."""

    @NOWHERE
    def add(run: Any, step: int) -> None:
        drawn = torch.Generator().manual_seed(step)
        for p in run.model.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=drawn, dtype=p.dtype))

    steps(script, add)


@habit("weights", sums=True)
def seeded_noise_like_each_weight(script: Script) -> None:
    """`randn_like` after `manual_seed`."""

    @NOWHERE
    def add(run: Any, step: int) -> None:
        torch.manual_seed(step)
        for p in run.model.parameters():
            p.add_(0.01 * torch.randn_like(p))

    steps(script, add)
