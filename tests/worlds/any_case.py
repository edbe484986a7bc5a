"""Any module under any layout: the battery of `shoal prove` on ours, users' and transformers' models.

A row of the table is (model, layout): the module is built, perturbed and trained for some steps on
the layout and by one process, and every loss, gradient and weight is compared. Modules of the
transformers library cast to float32 inside norms and softmax, which bounds the comparison to 1e-6
of the gradient's norm; with the casts lifted it holds at 1e-12 like everything else.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.fabric import World
from shoal.parallel.build.mmap_init import mmap_init
from shoal.parallel.spmd.labelling.labels import Whole
from shoal.parallel.spmd.model_split import plan_split
from shoal.proof import Battery, Trial, TrialSide
from shoal.proof.battery import SGD
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trace.isolation.lifted_casts import LiftedCasts
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.step.call_contract import call_model, split_batch
from shoal.trainer.step.optimizer_step import StepResult

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))

BATCH, MICRO_BATCH, SAMPLES = 12, 2, 27
"""Steps of 12, 12 and 3 samples: the last is short, its last micro-batch too."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 fsdp2": {"tp": 2, "dp_shard": 2},
    "pp2 fsdp2": {"pp": 2, "dp_shard": 2},
    "tp2 pp2 dp2": {"tp": 2, "pp": 2, "dp_replicate": 2},
    "cp2": {"cp": 2},
    "cp2 fsdp2": {"cp": 2, "dp_shard": 2},
    "ep2": {"dp_replicate": 2, "ep": 2},
    "ep2 fsdp2": {"dp_shard": 2, "ep": 2},
}

OURS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "our llama": ("llama", {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "dropout": 0.1}, 61),
    "our gpt": ("gpt", {"dim": 32, "layers": 4, "heads": 4, "dropout": 0.1}, 61),
    # Without dropout: its blocks are no graphs, and under tp such a one may not drop out.
    "our gpt, one block": ("gpt", {"dim": 32, "layers": 1, "heads": 4, "dropout": 0.0}, 61),
    "our moe": ("moe", {"dim": 32, "layers": 4, "heads": 4, "experts": 4, "hidden": 24}, 61),
    # Sequences that 4 ranks can share, and heads that they cannot.
    "our llama, 6 heads": (
        "llama",
        {"dim": 48, "layers": 4, "heads": 6, "kv_heads": 3, "dropout": 0.1},
        61,
    ),
    "our gpt, 6 heads": ("gpt", {"dim": 48, "layers": 4, "heads": 6, "dropout": 0.1}, 61),
    "our vit": ("vit", {"dim": 32, "layers": 4, "heads": 4, "patch": 4}, None),
    "our resnet": ("resnet", {"channels": 4, "stages": 2, "blocks": 2}, None),
}


def processes(layout: str) -> int:
    """How many a layout needs."""
    # Experts have no processes of their own: ep borrows those of data parallelism.
    degrees = [n for axis, n in LAYOUTS[layout].items() if axis != "ep"]
    return functools.reduce(int.__mul__, degrees, 1)


class Samples:
    """Inputs of an example's own making, one sample at a time, and targets for its outputs."""

    draws_nothing = True

    def __init__(self, inputs: Callable[[int], Any]) -> None:
        self.whole = inputs(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        one = torch.utils._pytree.tree_map(
            lambda leaf: leaf[index] if isinstance(leaf, torch.Tensor) else leaf, self.whole
        )
        return one, torch.tensor(index)


def joined(samples: list[Any]) -> Any:
    """Tensors stacked; what is no tensor is the same for all samples."""

    def stack(*leaves: Any) -> Any:
        return torch.stack(leaves) if isinstance(leaves[0], torch.Tensor) else leaves[0]

    return torch.utils._pytree.tree_map(stack, *samples)


def any_loss(outputs: Any, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, count): every floating output weighs, unequally; counts differ between samples."""
    total = torch.zeros((), dtype=torch.float64)
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
    logits = getattr(logits, "logits", logits)
    weight = (1 + index % 3).double().view(-1, *(1 for _ in logits.shape[1:]))
    draw = torch.Generator().manual_seed(5)
    lean = torch.randn(logits.shape[1:], generator=draw, dtype=torch.float64)
    total = (weight * (logits * lean + logits.square())).mean(tuple(range(1, logits.dim()))).sum()
    for name in ("balance", "aux_loss"):
        extra = getattr(outputs, name, None)
        if isinstance(extra, torch.Tensor):
            total = total + extra * len(index)
    return total, (1 + index % 3).sum()


def examples() -> dict[str, Any]:
    """Users' modules, and transformers' where that is installed."""
    from user_modules import EXAMPLES

    found = dict(EXAMPLES)
    try:
        import transformers  # noqa: F401
    except ImportError:
        return found
    from hf_modules import HF_EXAMPLES, SIX_HEADS

    more = {f"hf {name}": example for name, example in HF_EXAMPLES.items()}
    return {**found, **more, **{f"hf {n}, 6 heads": example for n, example in SIX_HEADS.items()}}


def example_of(model: str) -> Any:
    """One of them; transformers is not imported, for seconds, where it is not one of its own."""
    from user_modules import EXAMPLES

    return EXAMPLES[model] if model in EXAMPLES else examples()[model]


def models() -> list[str]:
    """Every row of the table."""
    return [*OURS, *examples()]


def split_share(model: str, degree: int) -> float:
    """Share of a model's parameters that `layout.tp` splits; 0 where it is refused."""
    if model in OURS:
        build, data = _our_model(model)
        few, call = torch.utils.data.default_collate([data[k] for k in range(3)]), "single"
    else:
        example = example_of(model)
        build, data = example.build, Samples(example.inputs)
        few, call = joined([data[k] for k in range(3)]), "single"
        call = "kwargs" if isinstance(data.whole, dict) else call
    torch.manual_seed(0)
    module = build().double()
    inputs = torch.utils._pytree.tree_map(
        lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t,
        split_batch(few)[0],
    )
    try:
        with mmap_init():
            split = plan_split(ForwardRecord(module, lambda m: call_model(m, inputs, call)), degree)
    except PlanError:
        return 0.0
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    cut = [n for n, one in split.parameters.items() if not isinstance(one.label, Whole)]
    return sum(sizes[n] for n in cut) / sum(sizes.values())


def trial_of(model: str) -> Trial:
    """What both sides train."""
    if model in OURS:
        return _our_trial(model)
    example = example_of(model)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return example.build()

    def train(side: TrialSide) -> Iterator[tuple[str, StepResult]]:
        data = Samples(example.inputs)
        call = "kwargs" if isinstance(data.whole, dict) else "single"
        run = side.parallelize(
            build,
            any_loss,
            batch=BATCH,
            micro_batch=MICRO_BATCH,
            call=call,
            sample=lambda: joined([data[k] for k in range(3)]),
        )
        loader = run.loader(data, collate=joined)
        while True:
            for batch in loader:
                yield "", run.step(batch)

    return train


def _our_model(model: str) -> tuple[Callable[[], nn.Module], Any]:
    """(what builds one of ours, its data)."""
    import cases
    from shoal.models.catalog import build as catalog

    name, arguments, vocabulary = OURS[model]
    data = cases.Tokens() if vocabulary else cases.Images()
    sequence = 12 if vocabulary else None

    def build() -> nn.Module:
        torch.manual_seed(7)
        return catalog(name, arguments, vocabulary=vocabulary, sequence=sequence)

    return build, data


def _our_trial(model: str) -> Trial:
    build, data = _our_model(model)

    def train(side: TrialSide) -> Iterator[tuple[str, StepResult]]:
        run = side.parallelize(
            build,
            batch=BATCH,
            micro_batch=MICRO_BATCH,
            sample=lambda: torch.utils.data.default_collate([data[k] for k in range(3)]),
        )
        loader = run.loader(data)
        while True:
            for batch in loader:
                yield "", run.step(batch)

    return train


@functools.cache
def battery(model: str, lifted: bool = True, steps: int = 5) -> Battery:
    """One battery per model, casts and process: the twin's records serve every layout."""
    del lifted  # it is in force while the twin trains
    made = Battery(trial_of(model), steps=steps)
    return replace(made, optimizers={SGD: made.optimizers[SGD]})


def prove(
    world: World, model: str, layout: str | dict[str, Any], lifted: bool = True, steps: int = 5
) -> dict[str, Any]:
    """The report of a model on a layout; `lifted`: transformers' casts to float32 are.

    steps   an epoch has three, the last a short one
    Gives   the battery's report, with what the run told under "notices"; "refused" with the line
            where the layout is not for this model
    """
    torch.set_num_threads(1)
    told: list[str] = []

    def hear(recorder: MetricsRecorder, text: str) -> None:
        told.append(text)

    lift = LiftedCasts() if lifted and model.startswith("hf ") else nullcontext()
    with lift, mock.patch.object(MetricsRecorder, "notice", hear):
        try:
            asked = LAYOUTS[layout] if isinstance(layout, str) else layout
            report = battery(model, lifted, steps).prove(world, asked)
        except PlanError as refusal:
            report = {"verdict": "refused", "reason": str(refusal), "cause": None}
            report["trajectories"] = []
    return {**report, "notices": list(dict.fromkeys(told))}


def table() -> list[tuple[str, str]]:
    """Every model × layout."""
    return list(itertools.product(models(), LAYOUTS))
