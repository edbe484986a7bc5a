"""Habits of batches and loops: shapes, columns, samplers, buffers, loops that ranks leave unlike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, RandomSampler, Subset, WeightedRandomSampler

from habits.gradient_habits import clip_grad_norm_
from habits.habit_sides import CUTS, ROWS, Chain, Script, X, Y, net, squares
from habits.habit_table import habit
from habits.loop_habits import DATA, dealt

# ---- what a batch is


@habit("loops", sums=True)
def a_batch_in_a_list(script: Script) -> None:
    """As DataLoader's own collate gives it."""
    script.train(script.begin(), batch=lambda step: list(script.batch(step)))


class Sample(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@habit("loops", sums=True)
def a_batch_in_a_named_tuple(script: Script) -> None:
    script.train(script.begin(), batch=lambda step: Sample(*script.batch(step)))


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.x, self.y))


@habit("loops", sums=False)
def a_batch_in_a_dataclass(script: Script) -> None:
    script.train(script.begin(), batch=lambda step: Batch(*script.batch(step)))


@habit("loops", sums=False)
def a_batch_of_three_columns(script: Script) -> None:
    """(x, y, index), as datasets with indices give it."""

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        return (x, y) if script.plain else (x, y, torch.arange(len(x)))

    script.train(script.begin(), batch=batch)


@habit("loops", sums=True)
def a_batch_that_is_one_tensor(script: Script) -> None:
    """An autoencoder: the targets are the inputs."""

    class Encoder(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 6)

    def batch(step: int) -> Any:
        x, _ = script.batch(step)
        return (x, x) if script.plain else x

    script.train(script.begin(net(Encoder), sample=batch(0)), batch=batch)


class OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, batch: Any) -> Any:
        return self.two(self.one(batch["x"]).tanh()) * batch.get("scale", 1.0)


def of_dicts(script: Script, extra: Any) -> None:
    """Train on dicts that have more than tensors of samples."""

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        return {"x": x, "y": y, **extra(x)}

    run = script.begin(net(OfDict), loss=lambda o, b: squares(o, b["y"]), sample=batch(0))
    script.train(run, batch=batch)


@habit("loops", sums=True)
def a_dict_with_names_of_samples(script: Script) -> None:
    """A list of strings beside the tensors."""
    of_dicts(script, lambda x: {"name": [f"sample-{n}" for n in range(len(x))]})


@habit("loops", sums=True)
def a_dict_with_a_scalar(script: Script) -> None:
    of_dicts(script, lambda x: {"scale": torch.tensor(0.5).double()})


@habit("loops", sums=True)
def a_dict_with_numbers_and_none(script: Script) -> None:
    of_dicts(script, lambda x: {"scale": 0.5, "mask": None, "split": "train"})


@habit("loops", sums=False)
def a_dict_with_a_table_of_all_samples(script: Script) -> None:
    """A tensor whose first dim is no batch: class prototypes, say."""
    of_dicts(script, lambda x: {"table": torch.ones(11, 6).double()})


@habit("loops", sums=True)
def images_of_several_sizes_in_a_list(script: Script) -> None:
    class Pooled(Chain):
        def forward(self, images: Any) -> Any:
            return super().forward(torch.stack([one.mean(0) for one in images]))

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        return [one.repeat(2 + n % 2, 1) for n, one in enumerate(x)], y

    script.train(script.begin(net(Pooled), sample=batch(0)), batch=batch)


@habit("loops", sums=False)
def graphs_with_a_list_of_edges(script: Script) -> None:
    """Nodes of all graphs in one tensor, edges [2, E] and the graph of each node."""

    class Graph(Chain):
        def forward(self, inputs: Any) -> Any:
            nodes, edges, graph = inputs
            mixed = nodes.index_add(0, edges[1], nodes[edges[0]])
            pooled = nodes.new_zeros(int(graph.max()) + 1, 6).index_add(0, graph, mixed)
            return super().forward(pooled)

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        n = len(x)
        nodes = torch.cat([x, 0.5 * x])
        edges = torch.stack([torch.arange(n), torch.arange(n) + n])
        return (nodes, edges, torch.arange(n).repeat(2)), y

    script.train(script.begin(net(Graph), sample=batch(0)), batch=batch)


class Timed(nn.Module):
    """A recurrent net whose first dim is time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(2, 8), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.cell(x)[0])


@habit("loops", sums=False)
def sequences_with_time_first(script: Script) -> None:
    """Inputs [time, batch, feature]: a cut along dim 0 cuts time."""

    def batch(step: int) -> Any:
        x = script.batch(step)[0]
        x = x.reshape(len(x), 3, 2).transpose(0, 1)
        return x, x * 2

    def loss(o: Any, y: Any) -> Any:
        return (o - y).square().sum(), y.numel()

    script.train(script.begin(net(Timed), loss=loss, sample=batch(0)), batch=batch)


@habit("loops", sums=True)
def sequences_of_another_length_in_each_step(script: Script) -> None:
    """Padded to the longest of a step's batch."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(6, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.layer(self.into(x)))

    def loss(o: Any, y: Any) -> Any:
        mask = (y != 0).double()
        return ((o - y).square() * mask).sum(), mask.sum()

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        length = 3 + step
        x = x[:, None].repeat(1, length, 1)
        kept = (torch.arange(length) < length - 1) | (y[:, :1] > 0)
        return x, y[:, None].repeat(1, length, 1) * kept[:, :, None]

    script.train(script.begin(net(Tagger), loss=loss, sample=batch(0)), batch=batch)


@habit("loops", sums=True)
def padding_by_the_longest_of_each_rank(script: Script) -> None:
    """`pad_sequence` over a rank's own samples: ranks have other lengths."""

    class Summed(Chain):
        def forward(self, x: Any) -> Any:
            return super().forward(x.sum(1))

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        lengths = (1 + (y[:, 0] > 0).long() + (y[:, 1] > 0.5).long() * 2).tolist()
        parts = [one.repeat(n, 1) for one, n in zip(x, lengths, strict=True)]
        return pad_sequence(parts, batch_first=True), y

    script.train(script.begin(net(Summed), sample=batch(0)), batch=batch)


@habit("loops", sums=False)
def packed_sequences(script: Script) -> None:
    """`nn.utils.rnn.pack_sequence`, which has no dim of samples."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.cell(x)[1][0])

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        parts = [one.reshape(3, 2)[: 1 + n % 3] for n, one in enumerate(x)]
        return pack_sequence(parts, enforce_sorted=False), y

    script.train(script.begin(net(Packed), sample=batch(0)), batch=batch)


@habit("loops", sums=True)
def a_batch_that_grows(script: Script) -> None:
    """A curriculum: 4, 6, then 8 rows a step."""

    def batch(step: int) -> Any:
        rows = 4 + 2 * step
        if script.alone:
            return X[:rows], Y[:rows]
        last = rows - script.shares + script.own_share
        mine = slice(last if script.own_share else 0, last + 1)
        return X[mine], Y[mine]

    script.train(script.begin(), batch=batch)


@habit("loops", sums=True)
def a_batch_of_another_dtype_for_labels(script: Script) -> None:
    """Labels as bytes, as images come from disk."""

    def loss(o: Any, y: Any) -> Any:
        return F.cross_entropy(o, y.long(), reduction="sum"), len(y)

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        return x, (y[:, 0] > 0).byte()

    script.train(script.begin(loss=loss, sample=batch(0)), batch=batch)


@habit("loops", sums=True)
def batches_moved_to_the_device_of_the_first_parameter(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        where = next(run.model.parameters()).device
        x, y = (one.to(where) for one in script.batch(step))
        script.note(run.step((x, y)).loss)


def halves(script: Script) -> list[slice]:
    """Rows of a step, by the shares that ranks have: what a script mixes within."""
    shares = [slice(a, b) for a, b in itertools.pairwise(CUTS[script.shares])]
    return shares if script.plain else [shares[script.own_share]]


def mixed_up(script: Script, seed: int) -> Any:
    def batch(step: int) -> Any:
        found = []
        for place, rows in enumerate(halves(script)):
            x, y = (one[step * ROWS :][:ROWS][rows] for one in (X, Y))
            drawn = torch.Generator().manual_seed(seed * (script.rank or place) + step)
            order = torch.randperm(len(x), generator=drawn)
            found.append((0.7 * x + 0.3 * x[order], 0.7 * y + 0.3 * y[order]))
        return tuple(torch.cat(one) for one in zip(*found, strict=True))

    return batch


@habit("loops", sums=True)
def mixed_up_within_a_ranks_share(script: Script) -> None:
    """mixup in the loop, by a permutation that all ranks draw alike."""
    script.train(script.begin(), batch=mixed_up(script, 0))


@habit("loops", sums=False)
def mixed_up_by_the_ranks_own_draws(script: Script) -> None:
    """Each rank draws its own: right where ranks have their own samples, else named."""
    script.train(script.begin(), batch=mixed_up(script, 100))


# ---- loaders


@habit("loops", sums=True)
def a_loader_that_every_rank_reads_whole(script: Script) -> None:
    """No DistributedSampler, no shuffle: every rank takes the same batches."""
    run = script.begin(micro_batch=None)
    for batch in DataLoader(DATA, 8):
        script.note(run.step(batch).loss)


@habit("loops", sums=False)
def a_shuffled_loader_without_a_sampler(script: Script) -> None:
    """`shuffle=True` with the seed that each process has."""
    run = script.begin(micro_batch=None)
    torch.manual_seed(7 + script.rank)
    for batch in DataLoader(DATA, 8, shuffle=True):
        run.step(batch)


@habit("loops", sums=True)
def a_weighted_sampler_on_each_rank(script: Script) -> None:
    """`WeightedRandomSampler`: each rank draws a stream of its own, with replacement."""
    run = script.begin(micro_batch=None)
    streams = []
    for share in range(script.shares) if script.alone else [script.own_share]:
        drawn = torch.Generator().manual_seed(share)
        sampler = WeightedRandomSampler([1.0 + n % 3 for n in range(24)], 12, generator=drawn)
        streams.append(DataLoader(DATA, 4, sampler=sampler))
    for batches in zip(*streams, strict=True):
        script.note(run.step(tuple(map(torch.cat, zip(*batches, strict=True)))).loss)


@habit("loops", sums=False)
def a_batch_sampler_without_ranks(script: Script) -> None:
    run = script.begin(micro_batch=None)
    drawn = torch.Generator().manual_seed(script.rank)
    order = torch.utils.data.BatchSampler(RandomSampler(DATA, generator=drawn), 8, True)
    for batch in DataLoader(DATA, batch_sampler=order):
        run.step(batch)


@habit("loops", sums=True)
def every_second_sample_by_rank(script: Script) -> None:
    """`Subset(data, range(rank, n, world))`, a sampler by hand."""
    run = script.begin(micro_batch=None)
    own = range(script.own_share, 24, 1 if script.alone else script.shares)
    for batch in DataLoader(Subset(DATA, own), 8 if script.alone else 8 // script.shares):
        script.note(run.step(batch).loss)


@habit("loops", sums=True)
def two_loaders_in_one_loop(script: Script) -> None:
    """Labelled and unlabelled batches, joined."""
    run = script.begin(micro_batch=None)
    for (x, y), (other, _) in zip(dealt(script, DATA), dealt(script, DATA, epoch=1), strict=True):
        joined = torch.cat([x, other]), torch.cat([y, torch.zeros_like(y)])
        script.note(run.step(joined).loss)


@habit("loops", sums=True)
def a_loader_that_goes_round(script: Script) -> None:
    """`itertools.cycle` and `islice`: steps, not epochs."""
    run = script.begin(micro_batch=None)
    for batch in itertools.islice(itertools.cycle(dealt(script, DATA)), 4):
        script.note(run.step(batch).loss)


@habit("loops", sums=True)
def a_replay_buffer_on_each_rank(script: Script) -> None:
    """Draws of a rank's own, with one seed where ranks hold one copy of the batch."""
    run = script.begin()
    for step in range(3):
        rows = [
            place * 16 + torch.randint(16, (4,), generator=torch.Generator().manual_seed(step))
            for place in (range(script.shares) if script.alone else [script.own_share])
        ]
        chosen = torch.cat(rows)
        script.note(run.step((X[chosen], Y[chosen])).loss)


@habit("loops", sums=True)
def samples_counted_over_run_loader(script: Script) -> None:
    """Sums over an epoch of `run.loader`: every sample once."""
    run = script.begin(batch=8)
    seen = total = 0.0
    batches = [DATA[:]] if script.plain else run.loader(DATA)
    for x, y in batches:
        seen += run.total(len(x))
        total += run.total(y.sum())
    script.note(seen, total)
    run.step(script.batch(0))


@habit("loops", sums=True)
def stopped_early_by_the_validation(script: Script) -> None:
    run = script.begin()
    best = float("inf")
    for step in range(5):
        run.step(script.batch(step))
        found = run.evaluate(DATA)["loss"]
        script.note(found)
        if found > best * 0.9:
            break
        best = found


@habit("loops", sums=True)
def a_validation_over_a_whole_loader(script: Script) -> None:
    """`run.evaluate(DataLoader(…))`, whose batches every rank reads whole."""
    run = script.begin()
    script.train(run)
    script.note(run.evaluate(DATA if script.plain else DataLoader(DATA, 8))["loss"])


# ---- what ranks do unlike


@habit("loops", sums=True, ends=True)
def a_micro_batch_left_out(script: Script) -> None:
    """`continue` before the backward pass, on the first micro-batch of the step."""
    run = script.begin()
    for step in range(3):
        if script.plain:
            script.passes(run, step, lambda s: tuple(one[2:] for one in script.batch(s)))
        else:
            for micro in run.micro_batches(script.batch(step)):
                if micro.index == 0:
                    continue
                run.backward(*squares(run.model(micro.inputs), micro.targets))
        run.update()


@habit("loops", sums=False)
def a_loop_over_micro_batches_left_early(script: Script) -> None:
    """`break` after the first of several."""
    run = script.begin()
    for step in range(2):
        for micro in run.micro_batches(script.batch(step)):
            run.backward(*squares(run.model(micro.inputs), micro.targets))
            break
        run.update()


@habit("loops", sums=False)
def a_backward_pass_after_the_loop(script: Script) -> None:
    run = script.begin()
    for step in range(2):
        total, count = torch.zeros(()).double(), 0
        for micro in run.micro_batches(script.batch(step)):
            one, n = squares(run.model(micro.inputs), micro.targets)
            total, count = total + one, count + n
        run.backward(total, count)
        run.update()


@habit("loops", sums=False)
def a_step_inside_of_micro_batches(script: Script) -> None:
    run = script.begin()
    for micro in run.micro_batches(script.batch(0)):
        run.step((micro.inputs, micro.targets))


@habit("loops", sums=True)
def steps_in_a_profiler(script: Script) -> None:
    run = script.begin()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        script.train(run, 2)


@habit("loops", sums=True)
def seeds_set_in_each_step(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        torch.manual_seed(step)
        script.note(run.step(script.batch(step)).loss)


@habit("loops", sums=False, ends=True)
def an_early_stop_by_the_ranks_own_loss(script: Script) -> None:
    """`if own_loss < limit: break` on one rank."""
    run = script.begin()
    for step in range(4):
        run.step(script.batch(step))
        if script.rank == 1 and step == 1:
            break


@habit("loops", sums=False, ends=True)
def ranks_with_unequal_numbers_of_batches(script: Script) -> None:
    """Each rank reads a file of its own, and one is shorter."""
    run = script.begin()
    for step in range(4 - script.rank):
        run.step(script.batch(step))


@habit("loops", sums=False, ends=True)
def a_short_batch_on_one_rank_alone(script: Script) -> None:
    """Each rank skips samples that it cannot read: in the second step the last has one
    less."""
    run = script.begin()
    for step in range(3):
        x, y = script.batch(step)
        if step == 1 and (script.world is None or script.rank == script.world.size - 1):
            x, y = x[:-1], y[:-1]
        run.step((x, y))


@habit("loops", sums=False, ends=True)
def an_error_in_the_loss_that_one_rank_swallows(script: Script) -> None:
    """`except ValueError: continue`, and the batch has the shapes of the others."""

    def loss(o: Any, y: Any) -> Any:
        if script.rank == 1 and int(y[0, 0]) == 99:
            raise ValueError("a label beyond the table")
        return squares(o, y)

    run = script.begin(loss=loss)
    for step in range(3):
        x, y = script.batch(step)
        if script.rank == 1 and step == 1 and not script.plain:
            y = torch.full_like(y, 99)
        try:
            run.step((x, y))
        except ValueError:
            continue


@habit("loops", sums=False, ends=True)
def weights_gathered_on_rank_0_alone(script: Script) -> None:
    run = script.begin()
    run.step(script.batch(0))
    if script.is_only_reader():
        script.note(*[one.sum() for one in run.state_dict().values()])
    run.step(script.batch(1))


@habit("loops", sums=False, ends=True)
def a_prediction_on_rank_0_alone(script: Script) -> None:
    run = script.begin()
    run.step(script.batch(0))
    if script.is_only_reader():
        script.note(run.predict(X[:4]))
    run.step(script.batch(1))


@habit("loops", sums=False, ends=True)
def the_best_saved_by_the_rank_that_has_it(script: Script) -> None:
    """`torch.save(model.state_dict())` on one rank alone."""
    run = script.begin()
    run.step(script.batch(0))
    if script.is_only_reader():
        kept = {name: one.clone() for name, one in run.model.state_dict().items()}
        script.note(*[one.sum() for one in kept.values()])
    run.step(script.batch(1))


@habit("loops", sums=False, ends=True)
def a_norm_read_on_rank_0_alone(script: Script) -> None:
    run = script.begin()
    for step in range(2):
        script.passes(run, step)
        if script.is_only_reader():
            script.note(clip_grad_norm_(run.model.parameters(), float("inf")))
        run.update()


@habit("loops", sums=False, ends=True)
def a_norm_of_weights_read_on_rank_0_alone(script: Script) -> None:
    run = script.begin()
    for step in range(2):
        run.step(script.batch(step))
        if script.is_only_reader():
            script.note(*[p.detach().norm() for p in run.model.parameters()])


@habit("loops", sums=False, ends=True)
def a_pass_of_the_model_on_rank_0_alone(script: Script) -> None:
    """Samples for a picture: `if rank == 0: model(x)`."""
    run = script.begin()
    for step in range(2):
        run.step(script.batch(step))
        if script.is_only_reader():
            with torch.no_grad():
                script.note(run.model(X[:4]).sum())
