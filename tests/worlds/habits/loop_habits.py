"""Habits of loops and data: loaders, samplers, validation, dicts, predictions."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from habits.habit_sides import CLASSES, Script, X, Y, net, squares
from habits.habit_table import habit

DATA = TensorDataset(X[:24], Y[:24])


def absolute(outputs: Any, targets: Any) -> Any:
    return (outputs - targets).abs().sum(), targets.numel()


@habit("loops", sums=True)
def losses_of_own_batches(script: Script) -> None:
    script.train(script.begin())


@habit("loops", sums=True)
def written_out_passes(script: Script) -> None:
    run = script.begin()
    for step in range(3):
        script.passes(run, step)
        script.note(run.update().loss)


@habit("loops", sums=True)
def validation_with_a_metric(script: Script) -> None:
    run = script.begin()
    script.train(run)
    found = run.evaluate(DATA, {"absolute": absolute})
    script.note(found["loss"], found["absolute"])


@habit("loops", sums=True)
def validation_in_a_loop_of_ones_own(script: Script) -> None:
    """model.eval(), forward passes on the same batches everywhere, model.train()."""
    run = script.begin()
    script.train(run)
    run.model.eval()
    with torch.no_grad():
        script.note(squares(run.model(X[:8]), Y[:8])[0])
    run.model.train()
    script.train(run, 1)


@habit("loops", sums=True)
def predictions(script: Script) -> None:
    run = script.begin()
    script.train(run)
    script.note(run.predict(X[:5]))


@habit("loops", sums=True)
def one_dict_as_a_batch(script: Script) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(6, 16), torch.nn.Linear(16, 3)

        def forward(self, batch: Any) -> Any:
            return self.two(self.one(batch["x"]).tanh())

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        return {"x": x, "y": y}

    run = script.begin(net(Model), loss=lambda o, b: squares(o, b["y"]), sample=batch(0))
    script.train(run, batch=batch)


@habit("loops", sums=True)
def one_dict_whose_keys_are_parameters_of_forward(script: Script) -> None:
    """As transformers has it, without `call="kwargs"`."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(6, 16), torch.nn.Linear(16, 3)

        def forward(self, x: Any, labels: Any = None) -> Any:
            return self.two(self.one(x).tanh())

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        return {"x": x, "labels": y}

    more = {"call": "kwargs"} if script.plain else {}
    run = script.begin(
        net(Model), loss=lambda o, b: squares(o, b["labels"]), sample=batch(0), **more
    )
    script.train(run, batch=batch)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=32, max_position_embeddings=16,
        )
    )  # fmt: skip
    return made.double().train()


def token_batch(script: Script, step: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    ids = torch.randint(32, (64, 8), generator=drawn)
    labels = ids.clone()
    for row in range(64):
        labels[row, : row % 6] = -100
    ids, labels = script.share(0, ids, labels)
    return {"input_ids": ids, "labels": labels}


@habit("loops", sums=True, near=1e-6)
def a_model_of_transformers_with_labels(script: Script) -> None:
    """A dict batch, no loss: the model's own loss counts."""
    run: Any
    if script.plain:
        run = script.begin(llama(), loss=lambda o, b: (o.loss, 1), call="kwargs")
    else:
        run = script.begin(llama(), loss=None, sample=token_batch(script, 0))
    script.train(run, batch=lambda step: token_batch(script, step))


@habit("loops", sums=True)
def a_loader_with_a_distributed_sampler(script: Script) -> None:
    run = script.begin()
    ranks = 1 if script.alone else script.shares
    for epoch in range(2):
        sampler = DistributedSampler(DATA, ranks, script.own_share if ranks > 1 else 0, seed=3)
        sampler.set_epoch(epoch)
        for batch in DataLoader(DATA, 8 // ranks, sampler=sampler):
            run.step(batch)
    if script.plain:
        return


@habit("loops", sums=False)
def a_distributed_sampler_with_a_seed_by_rank(script: Script) -> None:
    """Ranks draw from different permutations: samples are doubled and left out."""
    run = script.begin(micro_batch=None)
    ranks = 1 if script.alone else script.shares
    for epoch in range(2):
        sampler = DistributedSampler(
            DATA,
            ranks,
            script.own_share if ranks > 1 else 0,
            seed=0 if script.plain else script.rank,
        )
        sampler.set_epoch(epoch)
        for batch in DataLoader(DATA, 8 // ranks, sampler=sampler):
            run.step(batch)


@habit("loops", sums=False)
def a_split_drawn_by_each_rank(script: Script) -> None:
    """`random_split` without a generator, then a validation over the rank's own part."""
    run = script.begin()
    script.train(run)
    torch.manual_seed(script.rank)
    _, held = random_split(DATA, [16, 8])
    script.note(run.evaluate(held)["loss"])


@habit("loops", sums=False)
def labels_numbered_in_the_order_of_a_set(script: Script) -> None:
    """The numbers of classes differ by process: `set` of strings has no order."""
    order = [0, 1, 2]
    random.Random(script.rank).shuffle(order)
    numbers = torch.tensor(order)

    def loss(o: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(o, numbers[y], reduction="sum"), len(y)

    run = script.begin(loss=loss, sample=(X[:4], CLASSES[:4]))
    script.train(run, batch=lambda step: script.share(step, X, CLASSES))


class Named(torch.utils.data.Dataset[Any]):
    """Rows whose classes are names, numbered by a table of this process."""

    def __init__(self, numbers: dict[str, int]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> Any:
        return X[place], self.numbers["abc"[int(CLASSES[place])]]


def table_of(script: Script) -> dict[str, int]:
    """Numbers of three names, in another order on each rank."""
    names = ["a", "b", "c"]
    random.Random(script.rank).shuffle(names)
    return {name: number for number, name in enumerate(names)}


def dealt(script: Script, data: Any, *, rank: int | None = None, epoch: int = 0) -> Any:
    """A DataLoader over this rank's share, by torch's DistributedSampler."""
    ranks = 1 if script.alone else script.shares
    own = script.own_share if rank is None else rank
    sampler = DistributedSampler(data, ranks, own if ranks > 1 else 0, seed=3)
    if epoch:
        sampler.set_epoch(epoch)
    return DataLoader(data, 8 // ranks, sampler=sampler)


def cross_entropy(outputs: Any, targets: Any) -> Any:
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="sum"), len(targets)


@habit("loops", sums=False)
def a_dataset_that_numbers_its_classes_by_a_set(script: Script) -> None:
    """The loader deals rightly; the same sample has another label on each rank."""
    run = script.begin(loss=cross_entropy, sample=(X[:4], CLASSES[:4]), micro_batch=None)
    for batch in dealt(script, Named(table_of(script))):
        run.step(batch)


@habit("loops", sums=False)
def a_table_of_class_numbers_in_the_loss(script: Script) -> None:
    numbers = table_of(script)

    def loss(outputs: Any, targets: Any) -> Any:
        named = [numbers["abc"[int(one)]] for one in targets]
        return cross_entropy(outputs, torch.tensor(named))

    run = script.begin(loss=loss, sample=(X[:4], CLASSES[:4]))
    script.train(run, batch=lambda step: script.share(step, X, CLASSES))


@habit("loops", sums=False)
def a_distributed_sampler_of_another_rank(script: Script) -> None:
    """rank=0 in every process."""
    run = script.begin(micro_batch=None)
    for batch in dealt(script, DATA, rank=0):
        run.step(batch)


@habit("loops", sums=True)
def a_distributed_sampler_without_set_epoch(script: Script) -> None:
    """Right numbers, as plain PyTorch with that sampler has them; a line names the order."""
    run = script.begin(micro_batch=None)
    loader = dealt(script, DATA)
    for _ in range(3):
        for batch in loader:
            run.step(batch)


@habit("loops", sums=True)
def a_sampler_with_an_epoch_in_every_loader(script: Script) -> None:
    run = script.begin(micro_batch=None)
    for epoch in range(3):
        for batch in dealt(script, DATA, epoch=epoch):
            script.note(run.step(batch).loss)


@habit("loops", sums=True)
def arrays_of_numpy_in_a_dict(script: Script) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(6, 16), torch.nn.Linear(16, 3)

        def forward(self, x: Any) -> Any:
            return self.two(self.one(x).tanh())

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        return ({"x": x}, y) if script.plain else ({"x": x.numpy()}, y.numpy())

    run = script.begin(net(Model), call="kwargs", sample=({"x": X[:4]}, Y[:4]))
    script.train(run, batch=batch)


@habit("loops", sums=True)
def predictions_for_arrays_of_numpy(script: Script) -> None:
    run = script.begin()
    script.train(run)
    script.note(run.predict(X[:5] if script.plain else X[:5].numpy()))


@habit("loops", sums=True)
def arrays_that_cannot_be_written(script: Script) -> None:
    """As a memory map of a file gives them, and in reversed order."""

    def batch(step: int) -> Any:
        x, y = script.batch(step)
        if script.plain:
            return x.flip(0), y.flip(0)
        arrays = [one.numpy()[::-1] for one in (x, y)]
        for one in arrays:
            one.flags.writeable = False
        return tuple(arrays)

    script.train(script.begin(sample=script.batch(0)), batch=batch)


@habit("loops", sums=True)
def arrays_of_numpy(script: Script) -> None:
    def batch(step: int) -> Any:
        x, y = script.batch(step)
        if script.plain:
            return x, y
        return x.numpy(), y.numpy()

    script.train(script.begin(sample=script.batch(0)), batch=batch)


@habit("loops", sums=True)
def two_runs_in_one_process(script: Script) -> None:
    """A generator and a critic take turns."""
    first = script.begin()
    kept = script.run
    second = script.begin(net())
    for step in range(3):
        script.note(first.step(script.batch(step)).loss)
        script.note(second.step(script.batch(step + 3)).loss)
    if not script.plain:
        from habits.habit_table import end

        end(kept)


@habit("loops", sums=True)
def a_short_last_batch(script: Script) -> None:
    """The last step holds three samples: the second rank has none."""
    run = script.begin()
    script.train(run, 2)
    x, y = X[40:43], Y[40:43]
    if not script.alone:
        rows = slice(2 * script.own_share, 2 * script.own_share + 2)
        x, y = x[rows], y[rows]
    script.note(run.step((x, y)).loss)


@habit("loops", sums=False, ends=True)
def an_error_that_one_rank_swallows(script: Script) -> None:
    """`try: … except: continue` around a step whose batch is bad on one rank."""
    run = script.begin()
    for step in range(3):
        x, y = script.batch(step)
        if script.rank == 1 and step == 1 and not script.plain:
            x = x[:, :5]  # of another width: the model raises
        try:
            run.step((x, y))
        except RuntimeError:
            continue


@habit("loops", sums=False, ends=True)
def a_validation_on_rank_0_alone(script: Script) -> None:
    run = script.begin()
    script.train(run)
    if script.is_only_reader():
        script.note(run.evaluate(DATA)["loss"])


@habit("loops", sums=False, ends=True)
def a_step_that_one_rank_leaves_out(script: Script) -> None:
    """`if bad: continue` on one rank alone."""
    run = script.begin()
    for step in range(3):
        if script.rank == 1 and step == 1 and not script.plain:
            continue
        run.step(script.batch(step))
