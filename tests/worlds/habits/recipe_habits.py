"""Habits from papers and model libraries: GANs, autoencoders, codebooks, policies, banks, adapters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from habits.gradient_habits import in_each_pass
from habits.habit_sides import CLASSES, ROWS, Block, Chain, Script, X, Y, adamw, net, sgd, squares
from habits.habit_table import habit
from habits.loop_habits import llama, token_batch

DRAWN = torch.Generator().manual_seed(63)
NOISE = torch.randn(64, 6, generator=DRAWN, dtype=torch.float64)
TIMES = torch.rand(64, 1, generator=DRAWN, dtype=torch.float64)


def train(script: Script, kind: Any, batch: Any = None, **more: Any) -> Any:
    batch = batch or script.batch
    run = script.begin(net(kind), sample=batch(0), **more)
    script.train(run, batch=batch)
    return run


# ---- autoencoders, diffusion, codebooks


class Variational(nn.Module):
    """Encoder, a code drawn with noise of the batch, decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.code = nn.Sequential(Block(), Block()), nn.Linear(6, 8)
        self.decoder = nn.Sequential(nn.Linear(4, 6), Block())

    def forward(self, inputs: Any) -> Any:
        x, noise = inputs
        mean, log = self.code(self.encoder(x)).chunk(2, -1)
        return self.decoder(mean + (0.5 * log).exp() * noise[:, :4]), mean, log


@habit("models", sums=True)
def a_variational_autoencoder(script: Script) -> None:
    """The noise comes with the batch; reconstruction and divergence are sums."""

    def loss(o: Any, y: Any) -> Any:
        out, mean, log = o
        divergence = -0.5 * (1 + log - mean.square() - log.exp()).sum()
        return (out - y).square().sum() + 0.1 * divergence, len(y)

    def batch(step: int) -> Any:
        x, noise = script.share(step, X, NOISE)
        return (x, noise), x

    train(script, Variational, batch, loss=loss)


@habit("models", sums=True)
def a_diffusion_step_with_drawn_times(script: Script) -> None:
    """The loop draws times and noise for the whole batch; the model gets a time per sample."""

    class Denoiser(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.head = nn.Linear(1, 6), nn.Linear(6, 6)

        def forward(self, x: Any, t: Any) -> Any:
            return super().forward(x + self.time(t))

    def batch(step: int) -> Any:
        x, noise, t = script.share(step, X, NOISE, TIMES)
        return {"x": t * x + (1 - t) * noise, "t": t, "noise": noise}

    class Named(Denoiser):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch["x"], batch["t"])

    train(script, Named, batch, loss=lambda o, b: squares(o, b["noise"]))


class Codebook(Chain):
    """Features snap to the nearest row of a table, gradients straight through."""

    follows = False

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, 6), requires_grad=not self.follows)
        self.register_buffer("uses", torch.ones(5))

    def forward(self, x: Any) -> Any:
        hidden = self.layers(x)
        nearest = torch.cdist(hidden.detach(), self.codes.detach()).argmin(1)
        chosen = self.codes[nearest]
        if self.follows and self.training:
            with torch.no_grad():
                marks = F.one_hot(nearest, 5).to(hidden)
                self.uses.mul_(0.9).add_(marks.sum(0), alpha=0.1)
                self.codes.lerp_(marks.T @ hidden / self.uses[:, None], 0.1)
        return self.head(hidden + (chosen - hidden).detach()), hidden, chosen


def committed(o: Any, y: Any) -> Any:
    out, hidden, chosen = o
    total = squares(out, y)[0] + (chosen - hidden.detach()).square().sum()
    return total + 0.25 * (hidden - chosen.detach()).square().sum(), len(y)


@habit("models", sums=True)
def a_codebook_with_a_commitment_loss(script: Script) -> None:
    train(script, Codebook, loss=committed)


@habit("models", sums=False)
def a_codebook_that_follows_in_forward(script: Script) -> None:
    """VQ-VAE's averages: each forward pass moves the codes towards its own features."""

    class Following(Codebook):
        follows = True

    train(script, Following, loss=committed)


@habit("models", sums=True)
def a_hard_choice_with_soft_gradients(script: Script) -> None:
    """One-hot of the largest, plus probabilities minus their own value."""

    class Hard(Chain):
        def forward(self, x: Any) -> Any:
            soft = super().forward(x).softmax(-1)
            hard = F.one_hot(soft.argmax(-1), 3).to(soft)
            return hard + soft - soft.detach()

    train(script, Hard)


# ---- two models, two views


def player(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


@habit("loops", sums=True)
def a_gan_of_two_runs(script: Script) -> None:
    """The judge's step on real and made rows, then the maker's through the judge."""
    judge = script.begin(net(lambda: player(6, 1)))
    making = script.begin(net(lambda: player(6, 6)))
    for step in range(2):
        x, noise = script.share(step, X, NOISE)
        for micro in judge.micro_batches((x, noise)):
            made = making.model(micro.targets).detach()
            total = F.softplus(-judge.model(micro.inputs)).sum()
            judge.backward(total + F.softplus(judge.model(made)).sum(), len(made))
        script.note(judge.update().loss)
        for micro in making.micro_batches((noise, x)):
            scores = judge.model(making.model(micro.inputs))
            making.backward(F.softplus(-scores).sum(), len(scores))
        script.note(making.update().loss)


@habit("losses", sums=True)
def two_views_with_a_stopped_gradient(script: Script) -> None:
    """SimSiam: two calls of the model in one pass, one backward."""

    def act(run: Any, micro: Any) -> None:
        one, two = run.model(micro.inputs), run.model(micro.targets)
        total = -F.cosine_similarity(one, two.detach()).sum()
        run.backward(total - F.cosine_similarity(two, one.detach()).sum(), len(one))

    run = script.begin()
    for step in range(2):
        for micro in run.micro_batches(script.share(step, X, NOISE)):
            act(run, micro)
        script.note(run.update().loss)


@habit("losses", sums=True)
def two_views_joined_and_chunked(script: Script) -> None:
    """One call on `cat([a, b])`, whose outputs `chunk(2)` takes apart."""

    class Joined(Chain):
        def forward(self, inputs: Any) -> Any:
            return super().forward(torch.cat(list(inputs))).chunk(2)

    def batch(step: int) -> Any:
        x, noise, y = script.share(step, X, X + 0.1 * NOISE, Y)
        return (x, noise), y

    def loss(o: Any, y: Any) -> Any:
        return squares(o[0], y)[0] + (o[0] - o[1]).square().sum(), len(y)

    train(script, Joined, batch, loss=loss)


@habit("losses", sums=True)
def a_teacher_in_the_written_out_pass(script: Script) -> None:
    """Distillation: `torch.no_grad()` around another network, then both losses."""
    torch.manual_seed(9)
    teacher = nn.Linear(6, 3).double().requires_grad_(False)

    def act(run: Any, micro: Any) -> None:
        with torch.no_grad():
            soft = teacher(micro.inputs).softmax(-1)
        o = run.model(micro.inputs)
        hint = F.kl_div(o.log_softmax(-1), soft, reduction="sum")
        run.backward(squares(o, micro.targets)[0] + 0.5 * hint, len(o))

    in_each_pass(script, act, noted=True)


# ---- policies, banks, mining


@habit("losses", sums=True)
def an_actor_and_a_critic(script: Script) -> None:
    """PPO: two heads, a clipped ratio to old log-probabilities, values, entropy."""

    class Policy(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(6, 1)

        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            return self.head(hidden), self.value(hidden)[:, 0]

    def loss(o: Any, taken: Any) -> Any:
        (logits, values), (action, gain, old) = o, taken
        logs = logits.log_softmax(-1)
        ratio = (logs.gather(1, action[:, None])[:, 0] - old).exp()
        surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        entropy = -(logs.exp() * logs).sum()
        return -surrogate.sum() + 0.5 * (values - gain).square().sum() - 0.01 * entropy, len(gain)

    def batch(step: int) -> Any:
        x, action, gain = script.share(step, X, CLASSES, Y[:, 0])
        return x, (action, gain, torch.full_like(gain, -1.1))

    train(script, Policy, batch, loss=loss)


@habit("loops", sums=True)
def actions_drawn_from_the_policy(script: Script) -> None:
    """REINFORCE: `predict`, a draw by a seeded generator, and the reward as the targets."""

    def loss(o: Any, y: Any) -> Any:
        action, reward = y
        return -(o.log_softmax(-1).gather(1, action[:, None])[:, 0] * reward).sum(), len(action)

    def rollout(run: Any, step: int) -> Any:
        x, y = X[step * ROWS :][:ROWS], Y[step * ROWS :][:ROWS]
        drawn = torch.Generator().manual_seed(step)
        chances = run.predict(x).softmax(-1)
        action = torch.multinomial(chances, 1, generator=drawn)[:, 0]
        return action, y.gather(1, action[:, None])[:, 0]

    def batch(step: int) -> Any:
        x, action, reward = script.share(step, X, CLASSES, Y[:, 0])
        return x, (action, reward)

    run = script.begin(loss=loss, sample=batch(0))
    for step in range(3):
        x, place = script.share(step, X, torch.arange(64))
        action, reward = (one[place % ROWS] for one in rollout(run, step))
        script.note(run.step((x, (action, reward))).loss)


@habit("loops", sums=True)
def a_memory_bank_beside_the_run(script: Script) -> None:
    """A row for each sample of the dataset, which follows the model's outputs."""
    bank = torch.zeros(64, 3).double()

    def loss(o: Any, y: Any) -> Any:
        target, old = y
        return squares(o, target)[0] + 0.5 * (o - old).square().sum(), len(o)

    def batch(step: int) -> Any:
        x, y, place = script.share(step % 2, X, Y, torch.arange(64))
        return x, (y, bank[place])

    run = script.begin(loss=loss, sample=batch(0))
    for step in range(4):
        script.note(run.step(batch(step)).loss)
        rows = slice(step % 2 * ROWS, (step % 2 + 1) * ROWS)
        bank[rows] = 0.5 * bank[rows] + 0.5 * run.predict(X[rows])


@habit("loops", sums=True)
def hard_samples_mined_from_a_pool(script: Script) -> None:
    """The eight worst of sixteen, by errors of `predict`, make the next batch."""
    run = script.begin()
    for step in range(3):
        pool = slice(step * 16, step * 16 + 16)
        worst = (run.predict(X[pool]) - Y[pool]).square().sum(1).topk(ROWS).indices
        x, y = X[pool][worst], Y[pool][worst]
        place = script.share(0, torch.arange(64))[0]
        script.note(run.step((x[place], y[place])).loss)


@habit("loops", sums=True)
def labels_from_clusters_of_outputs(script: Script) -> None:
    """DeepCluster: two rounds of k-means over outputs of all samples give the labels."""

    def loss(o: Any, y: Any) -> Any:
        return F.cross_entropy(o, y, reduction="sum"), len(y)

    run = script.begin(loss=loss, sample=script.share(0, X, CLASSES))
    for epoch in range(2):
        out = run.predict(X)
        centres = out[:3].clone()
        for _ in range(2):
            labels = torch.cdist(out, centres).argmin(1)
            for one in range(3):
                if (labels == one).any():
                    centres[one] = out[labels == one].mean(0)
        for step in range(2):
            script.note(run.step(script.share(2 * epoch + step, X, labels)).loss)


@habit("loops", sums=True)
def a_curriculum_by_errors(script: Script) -> None:
    """Samples from easy to hard, sorted anew in each epoch."""
    run = script.begin()
    for _epoch in range(2):
        order = (run.predict(X[:16]) - Y[:16]).square().sum(1).argsort()
        for step in range(2):
            x, y = X[order[step * ROWS :][:ROWS]], Y[order[step * ROWS :][:ROWS]]
            place = script.share(0, torch.arange(64))[0]
            script.note(run.step((x[place], y[place])).loss)


@habit("losses", sums=True)
def outliers_dropped_by_their_loss(script: Script) -> None:
    """Samples whose error is beyond a fixed limit count nothing."""

    def loss(o: Any, y: Any) -> Any:
        each = (o - y).square().sum(-1)
        kept = (each.detach() < 20.0).double()
        return (each * kept).sum(), kept.sum()

    train(script, Chain, loss=loss)


@habit("loops", sums=True)
def samples_chosen_by_a_pass_without_gradients(script: Script) -> None:
    """A pass under `no_grad` finds the rows with large errors; only they are trained."""

    def act(run: Any, micro: Any) -> None:
        with torch.no_grad():
            error = (run.model(micro.inputs) - micro.targets).square().sum(1)
        keep = error > 6.0
        total, _ = squares(run.model(micro.inputs[keep]), micro.targets[keep])
        run.backward(total, len(keep))

    in_each_pass(script, act, noted=True)


# ---- layers of model libraries


@habit("models", sums=True)
def a_margin_by_label_in_forward(script: Script) -> None:
    """ArcFace: the model gets the labels, and its head moves the score of the right class."""

    class Margin(Chain):
        def forward(self, x: Any, label: Any) -> Any:
            hidden = F.normalize(self.layers(x), dim=1)
            scores = F.linear(hidden, F.normalize(self.head.weight, dim=1))
            return 4.0 * (scores - 0.2 * F.one_hot(label, 3))

    def loss(o: Any, b: Any) -> Any:
        return F.cross_entropy(o, b["label"], reduction="sum"), len(o)

    def batch(step: int) -> Any:
        x, label = script.share(step, X, CLASSES)
        return {"x": x, "label": label}

    train(script, Margin, batch, loss=loss, call="kwargs")


class LearnedStep(torch.autograd.Function):
    """LSQ: a grid whose step learns; its gradient is scaled by the size of the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any, step: Any) -> Any:
        ctx.save_for_backward(x, step)
        return (x / step).round().clamp(-8, 7) * step

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, step = ctx.saved_tensors
        near = x / step
        inside = (near >= -8) & (near <= 7)
        slope = torch.where(inside, near.round() - near, near.clamp(-8, 7))
        return gradient * inside, (gradient * slope).sum().reshape(step.shape) / x[0].numel() ** 0.5


@habit("models", sums=True)
def a_learned_step_of_quantisation(script: Script) -> None:
    class Quantised(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Parameter(torch.tensor(0.25))

        def forward(self, x: Any) -> Any:
            return self.head(LearnedStep.apply(self.layers(x), self.step))

    train(script, Quantised)


@habit("models", sums=False)
def a_range_observed_in_forward(script: Script) -> None:
    """Quantisation-aware training: the largest activation so far, in a buffer."""

    class Observed(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            hidden = self.layers(x)
            if self.training:
                self.largest.copy_(torch.maximum(self.largest, hidden.detach().abs().max()))
            step = self.largest / 127
            grid = (hidden / step).round() * step
            return self.head(hidden + (grid - hidden).detach())

    train(script, Observed)


class LowRank(nn.Module):
    """minLoRA: a parametrization that adds B·A to a frozen weight."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a = nn.Parameter(0.1 * torch.randn(2, columns))
        self.b = nn.Parameter(torch.zeros(rows, 2))

    def forward(self, weight: Any) -> Any:
        return weight + self.b @ self.a


@habit("models", sums=True)
def low_rank_adapters_by_a_parametrization(script: Script) -> None:
    class Adapted(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            for block in self.layers:
                parametrize.register_parametrization(block.up, "weight", LowRank(16, 6))

    train(script, Adapted)


class AdaptedLinear(nn.Linear):
    """A frozen layer with two small trained ones, which can be merged for a while."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.a = nn.Parameter(0.1 * torch.randn(2, inputs))
        self.b = nn.Parameter(0.1 * torch.randn(outputs, 2))
        self.merged = False

    def merge(self, sign: int) -> None:
        self.weight.data += sign * (self.b.data @ self.a.data)
        self.merged = sign > 0

    def forward(self, x: Any) -> Any:
        out = super().forward(x)
        return out if self.merged else out + x @ self.a.T @ self.b.T


class AdaptedChain(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.layers:
            block.up, block.down = AdaptedLinear(6, 16), AdaptedLinear(16, 6)


@habit("weights", sums=True)
def adapters_merged_for_a_validation(script: Script) -> None:
    """`weight += B @ A`, a validation, and back."""
    run = script.begin(net(AdaptedChain))
    data = torch.utils.data.TensorDataset(X[:16], Y[:16])
    layers = [one for one in run.model.modules() if isinstance(one, AdaptedLinear)]
    for step in range(2):
        script.note(run.step(script.batch(step)).loss)
        for one in layers:
            one.merge(1)
        script.note(run.evaluate(data)["loss"])
        for one in layers:
            one.merge(-1)


@habit("weights", sums=True)
def adapters_saved_alone(script: Script) -> None:
    """A state dict of the trained weights alone, loaded with `strict=False`."""
    run = script.begin(net(AdaptedChain))
    script.train(run)
    trained = {name for name, p in run.model.named_parameters() if p.requires_grad}
    kept = {name: one.clone() for name, one in run.state_dict().items() if name in trained}
    script.note(len(kept), *[one.norm() for one in kept.values()])
    plain = net(AdaptedChain)
    script.note(len(plain.load_state_dict(kept, strict=False).missing_keys))
    with torch.no_grad():
        script.note(plain(X[:4]).sum())


@habit("models", sums=True)
def biases_alone(script: Script) -> None:
    """BitFit: every matrix is frozen."""

    class Biased(Chain):
        def __init__(self) -> None:
            super().__init__()
            for p in self.parameters():
                p.requires_grad_(p.ndim < 2)

    train(script, Biased, optimizer=adamw)


@habit("models", sums=True)
def one_module_under_two_names(script: Script) -> None:
    """`self.body = self.layers`: the state dict has each weight twice."""

    class Twice(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.body = self.layers

        def forward(self, x: Any) -> Any:
            return self.head(self.body(x))

    train(script, Twice)


@habit("models", sums=True)
def a_block_shared_by_two_parents(script: Script) -> None:
    """An encoder and a decoder that own the same block."""

    class Half(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.own, self.shared = Block(), shared

        def forward(self, x: Any) -> Any:
            return self.shared(self.own(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = Block()
            self.one, self.two, self.head = Half(shared), Half(shared), nn.Linear(6, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.two(self.one(x)))

    train(script, Model)


@habit("weights", sums=True)
def weights_that_share_memory_by_data(script: Script) -> None:
    """`a.weight.data = b.weight.data`: two parameters, one memory, stepped twice."""
    model = net()
    model.layers[3].up.weight.data = model.layers[0].up.weight.data
    script.train(script.begin(model))


@habit("models", sums=True)
def halting_by_sample(script: Script) -> None:
    """Adaptive depth: a sample that is sure stops; blocks end when all of the batch have."""

    class Halting(Chain):
        def forward(self, x: Any) -> Any:
            active = torch.ones(len(x), 1, dtype=torch.bool)
            for place, block in enumerate(self.layers):
                x = torch.where(active, block(x), x)
                active = active & (x.detach().abs().mean(1, keepdim=True) < 0.7 + 0.1 * place)
                if not active.any():
                    break
            return self.head(x)

    train(script, Halting)


@habit("models", sums=True)
def heads_in_turns_by_step(script: Script) -> None:
    """Tasks in turns: the other head gets no gradient, so momentum leaves it alone."""

    class Heads(Chain):
        task = 0

        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

        def forward(self, x: Any) -> Any:
            return self.heads[self.task](super().forward(x))

    run = script.begin(net(Heads), sgd)
    for step in range(4):
        run.model.task = step % 2
        script.note(run.step(script.batch(step)).loss)


@habit("models", sums=True)
def images_of_growing_size(script: Script) -> None:
    """Progressive resizing: each step has wider inputs, which the model pools."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            x = self.two(self.one(x.unsqueeze(1)).relu()).relu()
            return self.head(F.adaptive_avg_pool1d(x, 1).flatten(1))

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        return F.interpolate(x[:, None], size=6 + 2 * step)[:, 0], y

    train(script, Pooled, batch)


@habit("models", sums=False)
def noise_by_a_generator_of_the_model(script: Script) -> None:
    """A `torch.Generator` on the module: each rank draws the same rows for other samples."""

    class Noisy(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.drawn = torch.Generator().manual_seed(3)

        def forward(self, x: Any) -> Any:
            noise = torch.randn(x.shape, generator=self.drawn, dtype=x.dtype)
            return super().forward(x + 0.1 * noise)

    train(script, Noisy)


@habit("loops", sums=True)
def truncated_backpropagation(script: Script) -> None:
    """A hidden state goes from chunk to chunk of a sequence, detached between backward passes."""

    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(2, 8), nn.Linear(8, 3)

        def forward(self, inputs: Any) -> Any:
            hidden = self.cell(*inputs)
            return self.head(hidden), hidden

    def sample() -> Any:
        x, y = script.batch(0)
        return (x[:, :2], x.new_zeros(len(x), 8)), y

    run = script.begin(net(Stepping), sample=sample())
    for step in range(2):
        for micro in run.micro_batches(script.batch(step)):
            hidden = micro.inputs.new_zeros(len(micro.inputs), 8)
            for part in micro.inputs.split(2, 1):
                o, hidden = run.model((part, hidden.detach()))
                run.backward(squares(o, micro.targets)[0] / 3, len(o))
        script.note(run.update().loss)


@habit("loops", sums=True)
def outputs_fed_back_between_steps(script: Script) -> None:
    """Greedy decoding for a log: each output is a part of the next input."""
    run = script.begin()
    for step in range(2):
        script.note(run.step(script.batch(step)).loss)
        x = X[:4].clone()
        with torch.no_grad():
            for _ in range(3):
                x = torch.cat([x[:, 3:], run.model(x)], 1)
        script.note(x)


@habit("weights", sums=True)
def an_average_of_the_state_dict(script: Script) -> None:
    """timm's ModelEmaV2: a deep copy whose state dict follows the model's, entry by entry."""
    model = net()
    mean = copy.deepcopy(model).eval()
    run = script.begin(model)
    for step in range(3):
        script.note(run.step(script.batch(step)).loss)
        with torch.no_grad():
            for slow, fast in zip(
                mean.state_dict().values(), run.model.state_dict().values(), strict=True
            ):
                slow.copy_(0.9 * slow + 0.1 * fast)
        with torch.no_grad():
            script.note(mean(X[:4]).sum())


# ---- transformers


def own_loss(script: Script, use: Any, *, noted: bool = False) -> None:
    """Written-out passes over a Llama, with the loss that it returns."""
    run = script.begin(
        llama(), **({"call": "kwargs"} if script.plain else {"sample": token_batch(script, 0)})
    )
    for step in range(2):
        for micro in run.micro_batches(token_batch(script, step)):
            count = (micro.inputs["labels"][:, 1:] != -100).sum()
            use(run, run.model(**micro.inputs).loss, count)
        loss = run.update().loss
        script.note(*[loss] * noted)


@habit("losses", sums=True, near=1e-6)
def the_loss_of_transformers_times_its_tokens(script: Script) -> None:
    own_loss(script, lambda run, loss, count: run.backward(loss * count, count), noted=True)


@habit("losses", sums=False, near=1e-6)
def the_loss_of_transformers_in_a_written_out_pass(script: Script) -> None:
    """`outputs.loss` is a mean; its count divides once more."""
    own_loss(script, lambda run, loss, count: run.backward(loss, 1 if script.plain else count))


@habit("losses", sums=False, near=1e-6)
def the_loss_of_transformers_over_the_passes(script: Script) -> None:
    """`outputs.loss / accumulation_steps`, without a count."""
    passes = 1 if script.plain else 4 // script.shares
    own_loss(script, lambda run, loss, count: run.backward(loss / passes))


@habit("losses", sums=True, near=1e-6)
def distilled_logits_of_transformers(script: Script) -> None:
    """Cross-entropy to labels plus divergence to a teacher's logits, both over tokens."""
    torch.manual_seed(1)
    teacher = llama().eval().requires_grad_(False)

    def loss(o: Any, b: Any) -> Any:
        labels = b["labels"][:, 1:]
        logs = o.logits[:, :-1].log_softmax(-1)
        with torch.no_grad():
            soft = teacher(input_ids=b["input_ids"]).logits[:, :-1].softmax(-1)
        kept = labels != -100
        each = F.nll_loss(logs.flatten(0, 1), labels.flatten(), reduction="none")
        hint = F.kl_div(logs, soft, reduction="none").sum(-1)
        return each.sum() + 0.5 * (hint * kept).sum(), kept.sum()

    run = script.begin(llama(), loss=loss, sample=token_batch(script, 0), call="kwargs")
    script.train(run, batch=lambda step: token_batch(script, step))
