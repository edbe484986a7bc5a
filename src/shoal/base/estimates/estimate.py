"""A case (model × layout × machine) and the planner's estimates for it, in named parts.

All figures are per sample or per unit of the model, so that layouts only divide and multiply.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.base.estimates.cluster import Cluster
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.schedule_names import DEFAULT, model_copies, stages_per_rank
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
        forward_flops: FLOP of matrix products; the backward is twice that.
        elementwise_bytes: bytes read and written in the forward by all operations but matrix
            products.
        operations: kernels of one forward, for constants per launch.
        saved_split_bytes: saved for the backward, split by tensor parallelism.
        saved_plain_bytes: saved for the backward, split only by sequence parallelism.
        selective_bytes: of the two together, the bytes that selective recompute saves (split,
            plain).
        input_bytes: bytes of the input, which full recompute saves and a pipeline sends.
        working_bytes: bytes of one backward of this unit beside the saved ones.
        attention_flops: of forward_flops, the products of queries with keys and with values.
        routed_bytes: bytes that the experts' dispatch sends, one way.
        routed_saved_bytes: of saved_split_bytes, those of the routed tokens.
        loss_bytes: peak bytes of the loss (head only), split by loss-parallel.
        tied_to: name of the unit whose weights it shares, or "".
        block: "" if block wrappers (fsdp, recompute) treat it as a block; "-" if it is in no block;
            else the name of the larger block that contains it.
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
        element_bytes: bytes of one activation element.
        trainable: all trainable elements, tied ones once.
        hidden, heads, kv_heads: width and attention heads; 0 if absent or unknown.
        source: "arithmetic", or "traced …" with the assumptions.
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
    def frozen(self) -> int:
        """Elements that are not trained, as the weights below adapters."""
        return sum(unit.count * unit.frozen_parameters for unit in self.units)

    @property
    def experts(self) -> int:
        """Common divisor of the expert counts of all mixtures; 0 without mixtures."""
        return math.gcd(*(unit.experts for unit in self.units))

    @property
    def blocks(self) -> int:
        """Number of units that a pipeline can distribute; all but a module's named ends."""
        ends = ("embedding", "head")
        return sum(u.count for u in self.units if u.name not in ends and not u.loss_bytes)


@dataclass(frozen=True)
class PlanningCase:
    """One case to be predicted: a model, on a cluster, run by a plan.

    Attributes:
        loss: computation of the logits: full, all at once · chunked, some rows at a time ·
            parallel, each tp rank its part of the vocabulary.
        optimizer_bytes: bytes of optimizer state per fp32 element.
        expert_tp: ranks that split one expert; 0: 1 for "shoal" with ep > 1, else as tp.
        framework: framework whose step is predicted: "shoal", or a peer with a published run.
        handed: builder: the user passes a function that builds the model, once per machine if ranks
            keep parts of it · host, device: the user passes a whole module on every rank, in this
            memory.
        proves: a proof in float64 precedes the run.
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

    def but(self, **changes: Any) -> PlanningCase:
        """Return the same case with some of its plan's fields changed."""
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
        """Pipeline schedule, also if the layout leaves it open."""
        return self.layout.schedule or DEFAULT

    @property
    def chunks(self) -> int:
        """Stages per rank of one model copy in a pipeline; dualpipe holds two copies."""
        if self.layout.pp == 1:
            return 1
        return stages_per_rank(self.schedule, self.layout.chunks) // model_copies(self.schedule)

    @property
    def expert_degree(self) -> int:
        """Ranks over which the weights of a mixture's experts are split."""
        return self.layout.ep * self.expert_tp_degree

    @property
    def expert_tp_degree(self) -> int:
        """Ranks over which one expert is split."""
        whole = self.framework == "shoal" and self.layout.ep > 1
        return self.expert_tp or (1 if whole else self.layout.tp)

    @property
    def reduce_bytes(self) -> int:
        """Bytes per element of a sent gradient; 0: the gradient's own size."""
        return 2 if self.plan.sums == "bf16" else 0


@dataclass(frozen=True)
class MemoryInstant:
    """Memory of a run at one instant: building, loading, proving, …, saving, exporting.

    Attributes:
        device_bytes: bytes on the fullest device, context included.
        host_bytes: bytes in the memory of one node, of all its ranks; 0 on a CPU, where
            device_bytes counts them.
        files_bytes: bytes of files that a node maps, in addition: page cache, which the system may
            write out.
    """

    name: str
    device_bytes: float
    host_bytes: float = 0.0
    files_bytes: float = 0.0


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes on the fullest rank in a step, by part.

    Attributes:
        parts: name → bytes, which add up to peak_bytes; those of 0 are left out: weights,
            gradients, optimizer, gathered, buckets, activations, loss, working, allocator, context.
        allocated_bytes: the peak without the parts allocator and context.
        when: moment of the peak: "loss", "backward", "update".
        stage: pipeline rank that has the peak.
        low_bytes, high_bytes: interval of the peak.
        host_bytes, disk_bytes: bytes of offloaded states on the host, or in files, per rank.
        others_bytes: peak of each further device of one process (`dp`); peak_bytes is the first
            one's.
        instants: instants of the whole run, in order, if requested (`instants.predict_run`).
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
    instants: tuple[MemoryInstant, ...] = ()

    @property
    def training_peak_bytes(self) -> float:
        """Peak of a device from start to the last step, without proof and resume."""
        names = ("checking", "building", "first step")
        before = [one.device_bytes for one in self.instants if one.name in names]
        return max([self.peak_bytes, *before])


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of one optimizer step, by part.

    Attributes:
        parts: name → exposed seconds, which add up to step_s; those of 0 are left out: matrix,
            elementwise, constants, recompute, tensor, pipeline, bubble, gradients, parameters,
            optimizer, offload.
        hidden: term → seconds of communication that overlaps with compute, not in step_s.
        bytes: name of a link → bytes that one rank sends over it in a step.
        low_s, high_s: interval of step_s.
        model_flops: FLOP of all devices in a step, without recomputation: 3 × the forward's.
    """

    parts: dict[str, float]
    step_s: float
    hidden: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    low_s: float = 0.0
    high_s: float = 0.0
    model_flops: float = 0.0
