"""What scripts ask of an Accelerator beyond the printed calls: run as a rank of a world of two."""

# ruff: noqa: I001
import shoal
import shoal.neighbours.accelerate  # noqa: F401  # its import is its effect

import copy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DataLoaderConfiguration,
    ProjectConfiguration,
    broadcast_object_list,
    set_seed,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

ROWS = torch.arange(22.0)[:, None] / 10
EVERY = 2


def local_sgd(accelerator, rank, size, made):
    """Steps of each process alone, evened out every second, are those of two models by hand."""
    set_seed(0)
    model = torch.nn.Linear(1, 1)
    theirs = [copy.deepcopy(model) for _ in range(size)]
    optimizers = [made(one.parameters(), lr=0.1) for one in theirs]
    model, optimizer = accelerator.prepare(model, made(model.parameters(), lr=0.1))
    with LocalSGD(accelerator, model, local_sgd_steps=EVERY) as local:
        for step in range(5):
            batch = ROWS[4 * step : 4 * step + 4]
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[2 * rank : 2 * rank + 2]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            for number, (one, other) in enumerate(zip(theirs, optimizers, strict=True)):
                other.zero_grad()
                one(batch[2 * number : 2 * number + 2]).square().mean().backward()
                other.step()
            if step % EVERY:
                even(theirs)
            assert torch.equal(model.weight, theirs[rank].weight), step
    even(theirs)
    assert torch.equal(model.weight, theirs[rank].weight)
    if made is not torch.optim.SGD:
        return  # moments stay each process's own, as in Accelerate
    # Together again: the run's own step, on weights that are alike.
    accelerator.backward(model(ROWS[rank : rank + 1]).square().mean())
    optimizer.step()
    assert len(set(accelerator.gather(model.weight.detach()).flatten().tolist())) == 1
    refuses = pytest.raises(shoal.ConfigError, match="not answered by Shoal; try: accelerator")
    with refuses:
        accelerator.GeneralTracker()


def even(models):
    with torch.no_grad():
        for parts in zip(*(one.parameters() for one in models), strict=True):
            mean = sum(parts) / len(parts)
            for part in parts:
                part.copy_(mean)


def ends(accelerator):
    """Whose end it is: an evaluation inside of an epoch has its own, and leaves the epoch's."""
    train = accelerator.prepare(DataLoader(ROWS, batch_size=4))
    test = accelerator.prepare(DataLoader(ROWS[:10], batch_size=4))
    seen = []
    for step, _ in enumerate(train):
        if step == 2:  # the last one, of 22 rows in steps of 8
            assert accelerator.gradient_state.end_of_dataloader
            for batch in test:
                seen.append(len(accelerator.gather_for_metrics(batch)))
            assert (accelerator.remainder, accelerator.end_of_dataloader) == (6, True)
    assert seen == [8, 2]
    assert (accelerator.active_dataloader, accelerator.remainder) == (None, -1)
    left = [accelerator.end_of_dataloader for _ in accelerator.skip_first_batches(train, 1)]
    assert left == [False, True], "a loader without its first batches ends, too"


def what_they_tell(accelerator, rank):
    one = {"a": torch.ones(2, 1 + rank), "b": [torch.tensor(float(rank))]}
    padded = accelerator.pad_across_processes(one, dim=1, pad_index=-1)
    assert padded["a"].shape == (2, 2)
    assert padded["a"][0].tolist() == [[1.0, -1.0], [1.0, 1.0]][rank]
    assert accelerator.pad_across_processes(torch.ones(1 + rank), pad_first=True)[0] == rank
    assert [accelerator.reduce(one["b"], how)[0].item() for how in ("sum", "mean", "max")] == [
        1.0, 0.5, 1.0,
    ]  # fmt: skip
    assert accelerator.reduce(one["b"], "none")[0].item() == rank
    loss = torch.ones((), requires_grad=True) * 2
    assert accelerator.gather_for_metrics(loss.repeat(3)).tolist() == [2.0] * 6
    assert accelerator.gather_for_metrics(["x", rank]) == ["x", 0, "x", 1]
    pairs = accelerator.gather_for_metrics([(rank, {3: "a"})], use_gather_object=True)
    assert pairs == [(0, {3: "a"}), (1, {3: "a"})], "the same values of Python's"
    assert broadcast_object_list([rank, ("a",)], 1) == [1, ("a",)]
    assert accelerator.on_main_process(lambda: "ran")() == (None if rank else "ran")
    assert accelerator.on_last_process(lambda: "ran")() == ("ran" if rank else None)
    assert accelerator.on_local_process(local_process_index=1)(lambda: rank)() == (rank or None)
    assert accelerator.state.deepspeed_plugin is None
    assert "Num processes: 2" in repr(accelerator.state)
    with accelerator.join_uneven_inputs([]):
        pass
    with pytest.raises(shoal.ConfigError, match="even_batches"):
        accelerator.join_uneven_inputs([], even_batches=False).__enter__()
    with pytest.raises(shoal.ConfigError, match="dispatch_batches"):
        DataLoaderConfiguration(False, True)
    with pytest.raises(shoal.ConfigError, match="try: split_batches"):
        Accelerator(split_batch=True)
    with pytest.raises(shoal.ConfigError, match="deepspeed_plugin = mine"):
        Accelerator(True, False, None, 1, False, None, "mine")
    assert Accelerator(gradient_accumulation_steps=3).gradient_state.num_steps == 3
    with pytest.raises(shoal.ConfigError, match="batch_size = 3 .* try: 2"):
        Accelerator(split_batches=True).prepare(DataLoader(ROWS, batch_size=3))
    foreign = SimpleNamespace(step=print, state_dict=dict)
    assert accelerator.prepare(foreign) is foreign, "no schedule of torch's: its steps stay its own"


def names(rank):
    told = ProjectConfiguration("kept", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=told)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    weights = []
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 1)).mean())
        optimizer.step()
        weights.append(model.weight.item())
        accelerator.save_state()
    accelerator.wait_for_everyone()
    assert sorted(one.name for one in Path("kept/checkpoints").iterdir()) == [
        "checkpoint_1", "checkpoint_2",
    ]  # fmt: skip
    accelerator.load_state("kept/checkpoints/checkpoint_1")
    assert model.weight.item() == weights[1]
    accelerator.load_state()
    assert model.weight.item() == weights[2]
    accelerator.end_training()


def resumes(rank):
    """A resume inside an epoch sees the rest of its order, and the next epoch's after it."""
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    made = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(ROWS, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, made, loader)
    seen = []
    for epoch in range(2):
        for step, batch in enumerate(loader):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            seen.append(batch.tolist())
            if (epoch, step) == (0, 1):
                accelerator.save_state("inside")
    accelerator.load_state("inside")
    again = [one.tolist() for one in accelerator.skip_first_batches(loader, 2)]
    assert again + [one.tolist() for one in loader] == seen[2:]
    assert seen[:3] != seen[3:], "else this test sees nothing"
    with pytest.raises(shoal.ConfigError, match="skip_first_batches; save_state keeps"):
        DataLoaderConfiguration(use_stateful_dataloader=True)


def mode(accelerator):
    """A model that comes in evaluation mode stays in it until the script says otherwise."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.9)).eval()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert not model.module.training
    ones = torch.ones(1, 4)
    assert torch.equal(model(ones), model(ones))


def statistics(rank):
    """Running statistics are each pass's and rank's, and broadcast as DDP does, to the bit."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.BatchNorm1d(3))
    theirs = DistributedDataParallel(copy.deepcopy(model))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(6):
        batch = ROWS[3 * step + rank : 3 * step + rank + 3]
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        with nullcontext() if step % 2 else theirs.no_sync():
            (theirs(batch).square().sum() / 2).backward()
        if step % 2:
            other.step()
            other.zero_grad()
        if step == 3:
            for one in (model, theirs):
                one.eval()
                with torch.no_grad():
                    one(batch)
                one.train()
        found = dict(model.module.named_buffers())
        for name, wanted in theirs.module.named_buffers():
            assert torch.equal(found[name], wanted), (step, name)
    first = accelerator.gather(theirs.module[1].running_mean[None])
    assert not torch.equal(first[0], first[1]), "else this test sees nothing"
    state = model.state_dict()
    assert sorted(state)[0] == "module.0.bias", "names as DDP's"
    seen = []
    hook = accelerator.register_save_state_pre_hook(lambda *told: seen.append(told))
    accelerator.save_state("hooked")
    hook.remove()
    accelerator.register_load_state_pre_hook(lambda *told: seen.append(told))
    accelerator.load_state("hooked")
    (models, (whole,), folder), loaded = seen
    assert (models[0] is model, len(whole), folder) == (True, 7, "hooked")
    assert (loaded[0][0] is model, loaded[1]) == (True, "hooked")
    model.load_state_dict(state)
    model.load_state_dict(model.module.state_dict())


def two_models(rank):
    """One loss of two prepared models: the gradient reaches both, as in a GAN."""
    accelerator = Accelerator()
    set_seed(0)
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    theirs = copy.deepcopy(models)
    made = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    first, second, *optimizers = accelerator.prepare(*models, *made)
    batch = torch.arange(4.0).reshape(2, 2) + rank
    accelerator.backward(second(first(batch)).square().mean())
    for one in optimizers:
        one.step()
    whole = torch.cat([torch.arange(4.0).reshape(2, 2) + one for one in (0, 1)])
    theirs[1](theirs[0](whole)).square().mean().backward()
    for one, other in zip((first, second), theirs, strict=True):
        wanted = other.weight - 0.1 * other.weight.grad
        assert torch.allclose(one.module.weight, wanted, atol=1e-6)


def main():
    accelerator = Accelerator(dynamo_backend="no")
    rank, size = accelerator.process_index, accelerator.num_processes
    for made in (torch.optim.AdamW, torch.optim.SGD):
        local_sgd(accelerator, rank, size, made)
    ends(accelerator)
    what_they_tell(accelerator, rank)
    names(rank)
    resumes(rank)
    mode(accelerator)
    statistics(rank)
    two_models(rank)


main()
