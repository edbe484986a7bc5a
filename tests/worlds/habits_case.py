"""What loops have beside steps: values by name, extras in checkpoints, outputs, hooks."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from own_passes_case import IGNORED, classes_sum, counted, end, numbers_sum, opened, samples
from shoal.base.errors import ShoalError
from shoal.fabric import World
from shoal.models.catalog import build
from shoal.models.loss import find_logits, token_loss
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run


def hits(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of targets that are not ignored."""
    logits = find_logits(outputs)
    right = (logits.argmax(-1) == targets) & (targets != IGNORED)
    return right.sum(), counted(targets)


def with_parts(outputs: Any, targets: torch.Tensor) -> Any:
    """A loss that tells its parts, one of them over a count of its own."""
    total, count = token_loss(outputs, targets)
    squares = find_logits(outputs).square()
    parts = {"ce": total, "squares": (squares.sum(), squares.numel())}
    return total + 1e-3 * squares.sum(), count, parts


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(2)
    tokens = torch.randint(61, (11, 17), generator=drawn)
    found = [(one[:-1], one[1:].clone()) for one in tokens]
    for number, (_, targets) in enumerate(found):
        targets[: number % 5] = IGNORED
    return found


def language(world: World, layout: Any, **settings: Any) -> Run:
    """A small GPT, its loss in parts, and its accuracy."""
    data = pairs()
    return parallelize(
        lambda: build(
            "gpt", {"dim": 16, "layers": 2, "heads": 4}, vocabulary=61, sequence=16
        ).double(),
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        with_parts,
        layout=layout,
        batch=4,
        micro_batch=1,
        sample=(torch.stack([data[0][0]]), torch.stack([data[0][1]])),
        metrics={"accuracy": hits},
        world=world,
        **settings,
    )


class Held(torch.utils.data.Dataset[Any]):
    """A list as a dataset: a plain one would be this rank's own batches."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]


def measured(world: World, layout: Any) -> dict[str, Any]:
    """Values of three steps, the last of which leaves ranks without samples, and of a validation."""
    run = language(world, layout)
    steps = []
    for batch in run.loader(pairs()):
        result = run.step(batch)
        steps.append({"loss": result.loss, **result.metrics})
    evaluated = run.evaluate(Held(pairs()[:7]))
    other = run.evaluate(Held(pairs()[:7]), {"tokens": lambda _, t: (t.numel(), len(t))})
    end(run)
    return {"steps": steps, "evaluated": evaluated, "other": other}


def logged(world: World, layout: Any) -> list[dict[str, float]]:
    """Values by `run.log`, in a loop written out; one name is only there now and then."""
    run = opened(world, layout)
    steps = []
    for batch in run.loader(samples()):
        for micro in run.micro_batches(batch):
            outputs = run.model(micro.inputs)
            run.backward(classes_sum(outputs, micro.targets), counted(micro.targets))
            run.log(squares=(numbers_sum(outputs), micro.inputs.numel()))
            if micro.index == 3 and run.step_count:
                run.log(rare=(len(micro.inputs), 1))
        steps.append(dict(run.update().metrics))
    end(run)
    return steps


class Best:
    """Any object with a state."""

    def __init__(self) -> None:
        self.value, self.seen = math.inf, Counter({3: 2})

    def state_dict(self) -> dict[str, Any]:
        return vars(self)


def saved(world: World, folder: str, layout: Any) -> list[str]:
    """A run of three steps; the second is the best, the first was thought so before."""
    run = opened(world, layout, folder=folder)
    best = Best()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=1)
    for batch in run.loader(samples()):
        run.step(batch)
        if run.step_count < 3:
            best.value = 1.0 / run.step_count
            run.save(tag="best", extra={"best": best, "pair": (1, math.nan)})
    plateau.step(0.5)
    run.save(extra={"plateau": plateau, "best": best})
    run.save()  # what was kept before stays
    run.checkpoint_saver.close()
    end(run)
    if run.lease is not None:
        run.lease.release()
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("step-*") if p.is_dir())


def gone_on(world: World, folder: str, layout: Any) -> dict[str, Any]:
    """What a restored run finds, of the last checkpoint and of the tag."""
    run = opened(world, layout, folder=folder)
    fresh = dict(run.extra)
    assert run.restore()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=1)
    plateau.load_state_dict(run.extra["plateau"])
    last = {"step": run.step_count, "best": run.extra["best"], "plateau": plateau.best}
    assert run.restore(tag="best")
    pair = run.extra["pair"]
    tagged = {
        "step": run.step_count,
        "best": run.extra["best"]["value"],
        "seen": type(run.extra["best"]["seen"]).__name__,
        "pair": [type(pair).__name__, pair[0], math.isnan(pair[1])],
    }
    run.checkpoint_saver.close()
    end(run)
    if run.lease is not None:
        run.lease.release()
    return {"fresh": fresh, "last": last, "tagged": tagged}


def back_in_time(world: World, folder: str) -> list[str]:
    """The best of a future that was left is not the best any more."""
    run = opened(world, "ddp", folder=folder)
    for batch in run.loader(samples()):
        run.step(batch)
        run.save(tag="best") if run.step_count != 2 else run.save()
    run.restore(step=2)
    run.save(tag="best")
    run.checkpoint_saver.close()
    end(run)
    if run.lease is not None:
        run.lease.release()
    return sorted(p.name for p in (Path(folder) / "tags" / "best" / "checkpoints").iterdir())


def predicted(world: World, layout: Any) -> list[list[float]]:
    """Outputs for the same inputs on every rank, of the mode that evaluates."""
    run = language(world, layout)
    outputs = run.predict(torch.stack([inputs for inputs, _ in pairs()[:3]]))
    trains = run.model.training
    end(run)
    return [outputs.double().sum(-1).flatten().tolist(), [float(trains)]]


def hooks(world: World, folder: str) -> dict[str, Any]:
    """A hook on the last rank asks to save at its first step and to stop at its third."""
    run = opened(world, "ddp", folder=folder)
    heard: list[str] = []

    def hook(record: dict[str, Any]) -> str | None:
        heard.append(record["event"])
        if world.rank < world.size - 1 or record["event"] != "step":
            return None
        return {1: "save", 3: "stop"}.get(record["step"])

    run.add_callback(hook)
    for _ in range(9):
        for batch in run.loader(samples()):
            run.step(batch)
            if run.stopping:
                break
        if run.stopping:
            break
    run.evaluate(Held(samples()[:4]))
    run.checkpoint_saver.close()
    end(run)
    if run.lease is not None:
        run.lease.release()
    names = sorted(p.name for p in (Path(folder) / "checkpoints").iterdir())
    return {"step": run.step_count, "heard": heard, "saved": names}


def told(world: World, mistake: str) -> str:
    """What a mistake is answered with, by this rank."""
    run = opened(world, "ddp")
    batch = next(iter(run.loader(samples())))
    try:
        if mistake == "log outside":
            run.log(hits=(1, 2))
        elif mistake == "log a number":
            for micro in run.micro_batches(batch):
                run.backward(classes_sum(run.model(micro.inputs), micro.targets), 1)
                run.log(hits=0.5)  # type: ignore[arg-type]
        elif mistake == "log a vector":
            for micro in run.micro_batches(batch):
                run.backward(classes_sum(run.model(micro.inputs), micro.targets), 1)
                run.log(hits=(torch.ones(3), 1))
        elif mistake == "taken name":
            run.evaluate(Held(samples()), {"loss": hits})
        elif mistake == "no function":
            run.evaluate(Held(samples()), {"hits": 0.5})  # type: ignore[dict-item]
        elif mistake == "function in extra":
            run.save("nowhere", extra={"state": {"by": len}})
        elif mistake == "array in extra":
            run.save("nowhere", extra={"weights": torch.ones(3)})
        elif mistake == "one rank's own":
            run.save("nowhere", extra={"best": world.rank})
        elif mistake == "one rank's failure":
            run.save("nowhere", extra={"best": len if world.rank else 1})
        elif mistake == "list as extra":
            run.save("nowhere", extra=[1])  # type: ignore[arg-type]
        elif mistake == "tag":
            run.save("nowhere", tag="../best")
        elif mistake == "no average":
            run.state_dict(average=True)
        return "nothing"
    except ShoalError as error:
        return str(error)
    finally:
        end(run)


def sequence_parts(world: World) -> str:
    """Outputs under cp."""
    run = language(world, {"cp": 2})
    try:
        run.predict(pairs()[0][0][None])
        return "nothing"
    except ShoalError as error:
        return str(error)
    finally:
        end(run)
