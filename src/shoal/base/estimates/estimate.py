"""A case (model × layout × machine) and what the planner foresees of it, in named parts.

Everything is per sample or per unit of the model, so that layouts only divide and multiply.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.base.estimates.cluster import Cluster
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.schedule_names import DEFAULT, copies, stages_per_rank
from shoal.base.plans.plan import Plan


@dataclass(frozen=True)
class UnitFacts:
    """One kind of unit of a model (the embedding, a block, the head); `count` equal ones in a row.

    All bytes and FLOP are of ONE unit and ONE sample at the sequence and format of `ModelFacts`.

    Attributes:
        parameters: trainable elements (tied ones where they come first), of which plain_parameters
            tensor parallelism copies (norms, biases of rows, routers) expert_parameters expert
            parallelism splits, of as many `experts`.
        frozen_parameters: elements that are not trained.
        forward_flops: of matrix products; the backward is twice that.
        elementwise_bytes: read and written by everything that is no matrix product, forward.
        operations: kernels of one forward, for constants per launch.
        saved_split_bytes: kept for the backward, split by tensor parallelism.
        saved_plain_bytes: kept for the backward, split only by sequence parallelism.
        selective_bytes: of the two together, what selective recompute keeps (split, plain).
        input_bytes: the input: what full recompute keeps and what a pipeline sends.
        working_bytes: what one backward of this unit holds beside what was saved.
        attention_flops: of forward_flops, the products of queries with keys and with values.
        routed_bytes: what experts' dispatch sends, one way.
        routed_saved_bytes: of saved_split_bytes, what the routed tokens keep.
        loss_bytes: what the loss holds at its peak (head only), split by loss-parallel.
        tied_to: name of the unit whose weights it shares; "".
        block: "" where what wraps blocks (fsdp, recompute) takes it as one; "-" where it lies in
            none of theirs; else the name of the larger block it is a part of.
        rooted_parameters: of all its elements, those that fsdp gathers with the root, not by
            blocks.
    """

    name: str
    count: int = 1
    parameters: int = 0
    plain_parameters: int = 0
    expert_parameters: int = 0
    experts: int = 0
    frozen_parameters: int = 0
    forward_flops: float = 0.0
    elementwise_bytes: float = 0.0
    operations: int = 0
    saved_split_bytes: float = 0.0
    saved_plain_bytes: float = 0.0
    selective_bytes: tuple[float, float] = (0.0, 0.0)
    input_bytes: float = 0.0
    working_bytes: float = 0.0
    loss_bytes: float = 0.0
    attention_flops: float = 0.0
    routed_bytes: float = 0.0
    routed_saved_bytes: float = 0.0
    tied_to: str = ""
    block: str = ""
    rooted_parameters: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """A model at one sequence length and number format, as units in the order of the forward.

    Attributes:
        sequence: positions per sample (0: not a sequence).
        element_bytes: of one activation.
        trainable: all trainable elements, tied ones once.
        hidden, heads, kv_heads: width and attention heads; 0 where there are none or nobody knows.
        source: "arithmetic", or "traced …" with what was assumed.
    """

    name: str
    units: tuple[UnitFacts, ...]
    sequence: int
    element_bytes: int
    trainable: int
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    source: str = "arithmetic"

    @property
    def forward_flops(self) -> float:
        """Matrix FLOP of one sample's forward."""
        return sum(unit.count * unit.forward_flops for unit in self.units)

    @property
    def experts(self) -> int:
        """What the number of experts of every mixture is a multiple of; 0 without mixtures."""
        return math.gcd(*(unit.experts for unit in self.units))

    @property
    def blocks(self) -> int:
        """How many units a pipeline can deal out; all but named ends of a module are such."""
        ends = ("embedding", "head")
        return sum(u.count for u in self.units if u.name not in ends and not u.loss_bytes)


@dataclass(frozen=True)
class Case:
    """One case to be predicted: a model, on a cluster, run by a plan.

    Attributes:
        loss: how the loss makes the logits: full, all at once · chunked, some rows at a time ·
            parallel, every tp rank its part of the vocabulary.
        optimizer_bytes: bytes of optimizer state per fp32 element.
        expert_tp: ranks that split one expert; 0: 1 for "shoal" with ep > 1, else as tp.
        framework: whose step is predicted: "shoal", or a peer whose published run is compared.
        handed: builder: a function that builds the model, once per machine where ranks keep parts
            of it · host, device: a module that every rank has whole already, and where.
        proves: a proof in float64 goes before the run.
    """

    model: ModelFacts
    cluster: Cluster
    plan: Plan
    loss: str = "chunked"
    optimizer_bytes: int = 8
    expert_tp: int = 0
    framework: str = "shoal"
    handed: str = "builder"
    proves: bool = False

    def but(self, **changes: Any) -> Case:
        """The same case with some of its plan's fields changed."""
        return replace(self, plan=replace(self.plan, **changes))

    @property
    def layout(self) -> Layout:
        """Degrees of every axis."""
        return self.plan.layout

    @property
    def batch(self) -> int:
        """Samples per step, all ranks."""
        return self.plan.batch

    @property
    def micro_batch(self) -> int:
        """Samples per forward pass."""
        return self.plan.micro_batch

    @property
    def accumulate(self) -> int:
        """Micro-batches per data rank and step, at least 1."""
        return max(1, -(-self.batch // (self.micro_batch * self.layout.data_degree)))

    @property
    def schedule(self) -> str:
        """The order of a pipeline's passes, where the layout leaves it open, too."""
        return self.layout.schedule or DEFAULT

    @property
    def chunks(self) -> int:
        """Stages per rank of the model that a pipeline's rank holds; dualpipe holds two models."""
        if self.layout.pp == 1:
            return 1
        return stages_per_rank(self.schedule, self.layout.chunks) // copies(self.schedule)

    @property
    def expert_degree(self) -> int:
        """Ranks over which the weights of a mixture's experts are split."""
        return self.layout.ep * self.one_expert

    @property
    def one_expert(self) -> int:
        """Ranks over which one expert is split."""
        whole = self.framework == "shoal" and self.layout.ep > 1
        return self.expert_tp or (1 if whole else self.layout.tp)

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient element that is sent; 0: as it is kept."""
        return 2 if self.plan.sums == "bf16" else 0


@dataclass(frozen=True)
class Instant:
    """What a run holds at one of its instants: building, loading, proving, …, saving, exporting.

    Attributes:
        device_bytes: on the fullest device, context included.
        host_bytes: in the memory of one node, of all its ranks; 0 on a CPU, whose devices it is.
        files_bytes: beside it, of files that a node maps: page cache, which the system may write
            out.
    """

    name: str
    device_bytes: float
    host_bytes: float = 0.0
    files_bytes: float = 0.0


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes on the fullest rank in a step, and what fills it.

    Attributes:
        parts: name → bytes, which add up to peak_bytes; those of 0 are left out: weights,
            gradients, optimizer, gathered, buckets, activations, loss, working, allocator, context.
        allocated_bytes: the peak without the parts allocator and context.
        when: the moment of the peak: "loss", "backward", "update".
        stage: number of the pipeline rank that holds it.
        low_bytes, high_bytes: interval of the peak.
        host_bytes, disk_bytes: of states that wait on the host, or in files, for a rank.
        others_bytes: peak of each further device of one process (`dp`), this being the first's.
        instants: of the whole run, in order, where they were asked for (`instants.predict_run`).
    """

    parts: dict[str, float]
    peak_bytes: float
    allocated_bytes: float
    when: str
    stage: int = 0
    low_bytes: float = 0.0
    high_bytes: float = 0.0
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    others_bytes: float = 0.0
    instants: tuple[Instant, ...] = ()

    @property
    def most_bytes(self) -> float:
        """The peak of a device from a start to the last step, without a proof and a resume."""
        names = ("checking", "building", "first step")
        before = [one.device_bytes for one in self.instants if one.name in names]
        return max([self.peak_bytes, *before])


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of one optimizer step, and what fills it.

    Attributes:
        parts: name → seconds that the step waits for it, which add up to step_s; those of 0 are
            left out: matrix, elementwise, constants, recompute, tensor, pipeline, bubble,
            gradients, parameters, optimizer, offload.
        hidden: term → seconds of communication that compute hides, beside step_s.
        bytes: name of a link → bytes that one rank sends over it in a step.
        low_s, high_s: interval of step_s.
        model_flops: of all devices in a step, recomputation not counted: 3 × the forward's.
    """

    parts: dict[str, float]
    step_s: float
    hidden: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    low_s: float = 0.0
    high_s: float = 0.0
    model_flops: float = 0.0
