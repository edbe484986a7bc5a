"""Habits of layers and of the loop around them: scalars, dicts of parts, quantised weights, ways back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from habits.habit_sides import CLASSES, Block, Chain, Script, X, adamw, net, squares
from habits.habit_table import habit


def train(script: Script, kind: Any, **more: Any) -> Any:
    run = script.begin(net(kind), **more)
    script.train(run)
    return run


class Gated(Block):
    """ReZero: a residual with a scalar factor."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Any) -> Any:
        return x + self.alpha * self.down(F.gelu(self.up(x)))


@habit("models", sums=True)
def a_scalar_parameter_in_each_block(script: Script) -> None:
    class Rezero(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Gated() for _ in range(4)))

    train(script, Rezero)


@habit("models", sums=True)
def a_scale_of_each_channel(script: Script) -> None:
    """LayerScale."""

    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.full((6,), 0.1))

        def forward(self, x: Any) -> Any:
            return x + self.gamma * self.down(F.gelu(self.up(x)))

    class Model(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Scaled() for _ in range(4)))

    train(script, Model)


@habit("models", sums=True)
def weights_in_a_parameter_dict(script: Script) -> None:
    class Named(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.ParameterDict(
                {"in": nn.Parameter(torch.eye(6)), "shift": nn.Parameter(torch.zeros(6))}
            )
            self.listed = nn.ParameterList([nn.Parameter(torch.ones(6)) for _ in range(2)])

        def forward(self, x: Any) -> Any:
            x = x @ self.own["in"] + self.own["shift"]
            return super().forward(x * self.listed[0] * self.listed[1])

    train(script, Named)


@habit("models", sums=True)
def weights_quantised_in_forward(script: Script) -> None:
    """Quantisation-aware training: a grid by the largest weight, gradients straight through."""

    class Quantised(nn.Linear):
        def forward(self, x: Any) -> Any:
            step = self.weight.detach().abs().max() / 7
            grid = (self.weight / step).round() * step
            return F.linear(x, self.weight + (grid - self.weight).detach(), self.bias)

    class Model(Chain):
        def __init__(self) -> None:
            super().__init__()
            for block in self.layers:
                block.up, block.down = Quantised(6, 16), Quantised(16, 6)

    train(script, Model)


@habit("models", sums=True)
def a_classifier_by_cosines(script: Script) -> None:
    """Normalised features and normalised rows of the head, with a learned scale."""

    class Cosines(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(4.0))

        def forward(self, x: Any) -> Any:
            hidden = F.normalize(self.layers(x), dim=1)
            return self.scale * F.linear(hidden, F.normalize(self.head.weight, dim=1))

    def loss(o: Any, y: Any) -> Any:
        return F.cross_entropy(o, y, reduction="sum"), len(y)

    run = script.begin(net(Cosines), loss=loss, sample=script.share(0, X, CLASSES))
    script.train(run, batch=lambda step: script.share(step, X, CLASSES))


@habit("weights", sums=True)
def a_learned_scale_clamped_after_each_step(script: Script) -> None:
    """CLIP: `model.logit_scale.data.clamp_(0, 4.6)`."""

    class Scaled(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.logit_scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Any) -> Any:
            return super().forward(x) * self.logit_scale.exp()

    run = script.begin(net(Scaled))
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        run.model.logit_scale.data.clamp_(0, 0.71)


@habit("models", sums=True)
def heads_after_every_block(script: Script) -> None:
    """Deep supervision: a list of outputs, one loss for each."""

    class Deep(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

        def forward(self, x: Any) -> Any:
            found = []
            for block, head in zip(self.layers, self.heads, strict=True):
                x = block(x)
                found.append(head(x))
            return [*found, self.head(x)]

    train(script, Deep, loss=lambda o, y: (sum(squares(one, y)[0] for one in o), len(y)))


@habit("models", sums=True)
def none_among_the_outputs(script: Script) -> None:
    """`return logits, None`, as attention layers without weights do."""

    class Pair(Chain):
        def forward(self, x: Any) -> Any:
            return super().forward(x), None

    train(script, Pair, loss=lambda o, y: squares(o[0], y))


@habit("loops", sums=True)
def parts_of_a_module_dict_called_in_the_loop(script: Script) -> None:
    """An encoder and a decoder in one `nn.ModuleDict`, without a forward of its own."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"encoder": nn.Sequential(Block(), Block()), "decoder": nn.Linear(6, 3)})
    run = script.begin(model.double())
    for step in range(2):
        for micro in run.micro_batches(script.batch(step)):
            hidden = run.model["encoder"](micro.inputs)
            run.backward(*squares(run.model["decoder"](hidden), micro.targets))
        script.note(run.update().loss)


@habit("optimizer", sums=True)
def no_decay_for_biases_and_scalars(script: Script) -> None:
    model = net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    script.train(script.begin(model, torch.optim.AdamW(groups, lr=0.01)))


@habit("optimizer", sums=True)
def a_group_that_rests_at_a_rate_of_zero(script: Script) -> None:
    """The trunk's rate is 0 in the first steps, then as the head's."""
    model = net()
    groups = [
        {"params": model.layers.parameters(), "lr": 0.0},
        {"params": model.head.parameters(), "lr": 0.05},
    ]
    run = script.begin(model, torch.optim.SGD(groups, lr=0.05, momentum=0.9))
    for step in range(4):
        if step == 2:
            run.optimizer.param_groups[0]["lr"] = 0.05
        script.note(run.step(script.batch(step)).loss)


@habit("loops", sums=True)
def rolled_back_after_a_bad_step(script: Script) -> None:
    """Weights of two steps before, where the loss has grown."""
    run = script.begin(optimizer=lambda params: torch.optim.SGD(params, lr=0.05))
    kept, lowest = {}, float("inf")
    for step in range(4):
        loss = run.step(script.batch(step)).loss
        script.note(loss)
        if loss < lowest:
            kept = {name: one.clone() for name, one in run.state_dict().items()}
            lowest = loss
        else:
            run.model.load_state_dict(kept)


@habit("loops", sums=True)
def a_search_for_the_rate_before_training(script: Script) -> None:
    """Three steps at growing rates, then the first weights and a chosen rate."""
    run = script.begin(optimizer=lambda params: torch.optim.SGD(params, lr=0.05))
    first = copy.deepcopy({name: one.clone() for name, one in run.state_dict().items()})
    for step, lr in enumerate((0.01, 0.03, 0.1)):
        run.optimizer.param_groups[0]["lr"] = lr
        script.note(run.step(script.batch(step)).loss)
    run.model.load_state_dict(first)
    run.optimizer.param_groups[0]["lr"] = 0.02
    script.train(run)


@habit("loops", sums=True)
def a_smoothed_loss_for_the_log(script: Script) -> None:
    run, mean = script.begin(optimizer=adamw), 0.0
    for step in range(3):
        mean = 0.9 * mean + 0.1 * float(run.step(script.batch(step)).loss)
        script.note(mean / (1 - 0.9 ** (step + 1)))


@habit("loops", sums=True)
def deterministic_algorithms(script: Script) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        script.train(script.begin())
    finally:
        torch.use_deterministic_algorithms(False)
