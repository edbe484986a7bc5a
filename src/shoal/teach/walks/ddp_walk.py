"""DDP step by step: gradients are all-reduced in buckets while the backward pass goes on.

Every rank holds the whole model and its own sample. The backward pass computes gradients from the
last layer to the first. Gradients are packed into buckets in that order; a full bucket is
all-reduced at once, so only the last bucket's all-reduce cannot hide behind computation:

    step = forward + backward + the all-reduces that outlast the backward pass + update

Source: Li et al. 2020 (PyTorch Distributed: Experiences on Accelerating Data Parallel Training).
"""

from __future__ import annotations

from fractions import Fraction

from shoal.base.plans.timeline import Timeline, TimelineSpan
from shoal.base.text.units import bytes_text, seconds_text
from shoal.teach.calculators.collectives_costs import ring_all_reduce_s
from shoal.teach.walks.shards_walk import first_weights, gradient, make_samples, summed_gradient
from shoal.teach.walks.walk import StepThrough, TableCell, WalkStep, check_equal, check_ranks
from shoal.teach.walks.walk_messages import ALPHA_S, BYTES_PER_S

LAYERS, BUCKET_LAYERS = 6, 2
GRADIENT_BYTES = 300e6
"""Default bytes of all gradients: six layers of 25 million parameters in bf16."""

FORWARD_S, BACKWARD_S, UPDATE_S = 3e-3, 6e-3, 1e-3


class _DdpSimulation:
    """Simulation of n synchronous ranks: a compute lane, a link lane, and a clock for each.

    Attributes:
        own: rank → layer → gradient of this rank's sample.
        mean: rank → layer → mean gradient over all ranks.
    """

    def __init__(self, ranks: int, gradient_bytes: float) -> None:
        self.n = ranks
        self.bucket_bytes = gradient_bytes * BUCKET_LAYERS / LAYERS
        self.weights = [
            [Fraction(unit[0]) for unit in first_weights(LAYERS, 1)] for _ in range(ranks)
        ]
        self.samples = make_samples(ranks)[0]
        self.own: list[dict[int, int]] = [{} for _ in range(ranks)]
        self.mean: list[dict[int, Fraction]] = [{} for _ in range(ranks)]
        self.compute_s = self.link_s = self.reduce_s = self.sent_bytes = 0.0
        self.spans: list[TimelineSpan] = []
        self.steps: list[WalkStep] = []

    def _span(self, kind: str, label: str, start_s: float, end_s: float, lane: str) -> None:
        for rank in range(self.n):
            self.spans.append(TimelineSpan(rank, start_s, end_s, kind, label, lane))

    def compute(self, kind: str, label: str, seconds: float) -> None:
        """Occupy the compute lane of every rank."""
        self._span(kind, label, self.compute_s, self.compute_s + seconds, "compute")
        self.compute_s += seconds

    def backward(self, layer: int, seconds: float) -> None:
        """Compute one layer's gradient on every rank, from its own sample."""
        self.compute("backward", f"l{layer}", seconds)
        first = [unit[:1] for unit in first_weights(LAYERS, 1)]
        for rank, sample in enumerate(self.samples):
            self.own[rank][layer] = gradient(first, sample)[layer]

    def all_reduce(self, bucket: int) -> None:
        """All-reduce one bucket once its gradients are there and the link is free."""
        start_s = max(self.compute_s, self.link_s)
        seconds = ring_all_reduce_s(self.n, self.bucket_bytes, ALPHA_S, 1 / BYTES_PER_S)
        self._span("all-reduce", f"b{bucket}", start_s, start_s + seconds, "link")
        self.link_s = start_s + seconds
        self.reduce_s += seconds
        self.sent_bytes += 2 * (self.n - 1) / self.n * self.bucket_bytes
        for layer in bucket_layers(bucket):
            total = sum(own[layer] for own in self.own)
            for mean in self.mean:
                mean[layer] = Fraction(total, self.n)

    def update(self) -> None:
        """Update every rank's own copy of the weights with the mean gradient."""
        self.compute_s = max(self.compute_s, self.link_s)
        self.compute("update", "", UPDATE_S)
        for weights, mean in zip(self.weights, self.mean, strict=True):
            for layer in range(LAYERS):
                weights[layer] += mean[layer]

    def record_step(self, title: str, happens: tuple[str, ...], busy: int | None) -> None:
        """Record the gradients of all ranks; bucket `busy` is on its way."""
        rows = []
        on_the_way = set(bucket_layers(busy)) if busy is not None else set()
        for own, mean in zip(self.own, self.mean, strict=True):
            row = []
            for layer in range(LAYERS):
                if layer in on_the_way:
                    row.append(TableCell(str(own[layer]), "busy"))
                elif layer in mean:
                    row.append(TableCell(f"{float(mean[layer]):g}", "whole"))
                elif layer in own:
                    row.append(TableCell(str(own[layer]), "own"))
                else:
                    row.append(TableCell("", "none"))
            rows.append(tuple(row))
        self.steps.append(
            WalkStep(title, happens, tuple(rows), f"until {seconds_text(self.compute_s)}")
        )


def bucket_layers(bucket: int) -> range:
    """Return the layers of a bucket; bucket 0 holds the last ones, whose gradients come first.

    >>> list(bucket_layers(0)), list(bucket_layers(2))
    ([4, 5], [0, 1])
    """
    last = LAYERS - bucket * BUCKET_LAYERS
    return range(last - BUCKET_LAYERS, last)


def ddp(
    ranks: int,
    forward_s: float = FORWARD_S,
    backward_s: float = BACKWARD_S,
    gradient_bytes: float = GRADIENT_BYTES,
) -> StepThrough:
    """Show one optimizer step under DDP, with buckets that travel during the backward pass.

    Args:
        forward_s, backward_s: of one layer.
        gradient_bytes: of all layers together.

    Raises:
        PlanError: a number of ranks that cannot be shown.

    >>> walk = ddp(4)
    >>> walk.facts["step"], walk.facts["without overlap"]
    ('61.1 ms', '73.2 ms')
    """
    check_ranks("DDP", ranks)
    world = _DdpSimulation(ranks, gradient_bytes)
    for layer in range(LAYERS):
        world.compute("forward", f"l{layer}", forward_s)
    world.record_step("forward", ("every rank computes its own sample", "no message"), None)
    for bucket in range(LAYERS // BUCKET_LAYERS):
        layers = bucket_layers(bucket)
        for layer in reversed(layers):
            world.backward(layer, backward_s)
        names = " and ".join(f"l{layer}" for layer in reversed(layers))
        world.record_step(
            f"backward of {names}", (f"bucket b{bucket} is full: its all-reduce starts",), bucket
        )
        world.all_reduce(bucket)
    world.update()
    world.record_step("update", ("every rank updates its own copy, with equal gradients",), None)
    return _check_and_finish(world, LAYERS * (forward_s + backward_s))


def _check_and_finish(world: _DdpSimulation, compute_s: float) -> StepThrough:
    """Compare gradients, replicas and bytes with the expected values."""
    n = world.n
    first = [unit[:1] for unit in first_weights(LAYERS, 1)]
    total = summed_gradient(first, [world.samples])
    right = [unit[0] + Fraction(part, n) for unit, part in zip(first, total, strict=True)]
    for rank, weights in enumerate(world.weights):
        check_equal(f"weights of rank {rank}", weights, right)
    gradient_bytes = world.bucket_bytes * LAYERS / BUCKET_LAYERS
    sent = 2 * (n - 1) / n * gradient_bytes
    check_equal("bytes sent", round(world.sent_bytes), round(sent))
    in_turn_s = compute_s + world.reduce_s + UPDATE_S
    exposed_s = world.compute_s - compute_s - UPDATE_S
    facts = {
        "step": seconds_text(world.compute_s),
        "without overlap": seconds_text(in_turn_s),
        "all-reduces": f"{seconds_text(world.reduce_s)}, of which "
        f"{seconds_text(exposed_s)} are waited for",
        "each rank sends": f"{bytes_text(world.sent_bytes)} = 2(n−1)/n·M",
    }
    title = f"DDP, {n} ranks, {LAYERS} layers in {LAYERS // BUCKET_LAYERS} buckets"
    return StepThrough(
        title=title,
        story=(
            "Every rank holds the whole model and computes gradients for its own sample, from the "
            "last layer to the first. As soon as a bucket of layers is complete, it is all-reduced "
            "while the backward pass of earlier layers goes on.",
        ),
        rows=tuple(f"rank {rank}" for rank in range(n)),
        columns=tuple(f"l{layer}" for layer in range(LAYERS)),
        steps=tuple(world.steps),
        checked=f"after the update all {n} copies hold equal weights, those of one process that "
        "saw every sample; bytes counted equal the formula",
        looks={"own": "gradient of its own sample", "whole": "mean over all ranks",
               "busy": "in an all-reduce", "none": "not computed yet"},
        timeline=Timeline(title, n, tuple(world.spans), facts=facts),
        facts=facts,
    )  # fmt: skip
