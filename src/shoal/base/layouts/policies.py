"""One frozen dataclass per technique: its keys, their legal values and its checks.

A key is declared once, here. The section of run.toml that inherits a policy has its keys
(config/sections.py), a `Plan` has all of them, and `shoal.parallelize` accepts each by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from shoal.base.errors import ConfigError, PlanError, check_choice, shorten
from shoal.base.layouts.policy_fields import choice_field, number_field

PRECISIONS = ("auto", "fp64", "fp32", "bf16", "fp16")
OTHER_FORMATS = {
    **{"fp8": "bf16", "bfloat16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "half": "fp16"},
    **{"float16": "fp16", "16-mixed": "fp16", "float32": "fp32", "32": "fp32", "tf32": "fp32"},
    **{"float64": "fp64", "double": "fp64", "64": "fp64"},
}
"""Other projects' names of the formats, and the nearest format for missing ones (fp8)."""
OTHER_FORMATS |= {f"torch.{name}": ours for name, ours in OTHER_FORMATS.items()}

COMPILE = ("none", "blocks")
RESIDUALS = ("fp32", "bf16")
REDUCTIONS = ("auto", "fp32", "bf16")
BY_NUMBER = ("int8", "one-bit")
COMPRESS = ("none", *BY_NUMBER, "powersgd", "topk")
SPLITS = ("whole", "column", "row")
SEQUENCE_PARALLEL = ("auto", "on", "off")
CONTEXT = ("auto", "ring", "ulysses", "gather")
SCHEDULES = ("cosine", "wsd", "one-cycle", "linear", "constant")
DRIFT = ("auto", "every", "off")
SPIKES = ("tell", "skip", "rewind", "off")


@dataclass(frozen=True, kw_only=True)
class ComputePolicy:
    """Number format of matrix products."""

    compute: str = choice_field(PRECISIONS, OTHER_FORMATS)
    """auto, fp64, fp32, bf16, fp16: the format of matrix products"""


@dataclass(frozen=True, kw_only=True)
class ResidualPolicy:
    """Number format of the residual stream: what blocks pass on, and save for backward."""

    residual: str = choice_field(RESIDUALS, OTHER_FORMATS)
    """fp32, bf16 (with compute=bf16): the format of what blocks pass on and save for backward"""


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy(ResidualPolicy, ComputePolicy):
    """Number formats; narrow ones keep fp32 weights and optimizer state, fp64 is for proofs.

    Attributes:
        compute: format of matrix products: auto (bf16 on GPUs that have it, else fp32), fp64, fp32,
            bf16, fp16.
        residual: format of the residual stream: fp32, or bf16 where products are bf16.
        reduce: format of gradients in collectives: auto (as stored), fp32, bf16.
        loss_scale: fp16: factor of the loss; 0: found and adjusted while training.
    """

    reduce: str = choice_field(REDUCTIONS, OTHER_FORMATS)
    """auto, fp32, bf16: the format in which gradients travel; auto: as they are kept"""
    loss_scale: float = number_field(0.0, least=0)
    """for fp16: what the loss is multiplied by; 0: found and followed by itself"""

    @property
    def sums(self) -> str:
        """Format in which gradients are summed; "" as stored, which fp64 always is."""
        return "" if self.reduce == "auto" or self.compute == "fp64" else self.reduce

    def check_residual(self, name: str, compute: str, bf16: str) -> None:
        """Raise ConfigError if the residual stream is to be narrower than the matrix products.

        Args:
            name, compute: the user's names of the two keys.
            bf16: the user's name of the format.
        """
        if self.residual == "bf16" and self.compute != "bf16":
            raise ConfigError(
                f"{name} = {self.residual}: only bf16 products have a bf16 residual stream, "
                f"{compute} = {self.compute}; try: {compute}={bf16}"
            )

    def check_loss_scale(self, name: str, compute: str, fp16: str) -> None:
        """Raise ConfigError if a loss scale is set for a format that needs none.

        Args:
            name, compute: the user's names of the two keys.
            fp16: the user's name of the format.
        """
        if self.loss_scale and self.compute != "fp16":
            raise ConfigError(
                f"{name} = {self.loss_scale}: only fp16 has a loss scale, {compute} = "
                f"{self.compute}; try: {compute}={fp16}"
            )


@dataclass(frozen=True, kw_only=True)
class UpdatePolicy:
    """Gradient clipping before the optimizer step, and weight averaging after it.

    Attributes:
        clip: largest global norm of the mean gradient; 0: gradients stay as they are.
        average: decay of a moving average of the weights, which validation uses and checkpoints
            save too; 0: none.

    Bounds are checked by `check_value`, not by the constructor.
    """

    clip: float = number_field(0.0, least=0, usual=1.0)
    """largest global gradient norm; 0 leaves gradients as they are"""
    average: float = number_field(0.0, least=0, below=1, usual=0.999)
    """decay of an average of the weights, with which runs then validate, e.g. 0.999; 0: none"""


@dataclass(frozen=True)
class OptimizerPolicy(UpdatePolicy):
    """The update rule, its learning-rate schedule, gradient clipping and weight averaging.

    Attributes:
        name: adamw, sgd, lion, lamb, muon, any class of torch.optim, or pkg.mod:Class.
        lr: peak learning rate.
        weight_decay: on matrices only.
        betas, momentum: for optimizers that have betas · for sgd.
        clip: largest global gradient norm; 0: gradients stay as they are.
        schedule: cosine, wsd, one-cycle, linear, constant.
        warmup_steps: steps of linear rise; −1: a tenth of the run.
    """

    name: str = "adamw"
    """adamw, sgd, lion, lamb, muon, any class of torch.optim, or pkg.mod:Class"""
    lr: float = number_field(1e-3, least=0, usual=1e-3)
    """peak learning rate"""
    betas: tuple[float, float] = (0.9, 0.95)
    """for optimizers that have betas"""
    momentum: float = 0.9
    """for sgd"""
    weight_decay: float = number_field(0.1, least=0, usual=0.1)
    """on matrices; never on vectors and scalars (norms, biases)"""
    clip: float = number_field(1.0, least=0, usual=1.0, kw_only=True)
    """largest global gradient norm; 0 leaves gradients as they are"""
    schedule: str = choice_field(SCHEDULES)
    """cosine, wsd, one-cycle, linear, constant"""
    warmup_steps: int = number_field(-1, least=-1)
    """steps from 0 to lr; −1: a tenth of the run"""


RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "parameters", "activations")
OFFLOAD_TO = ("host", "files")


@dataclass(frozen=True, kw_only=True)
class RecomputePolicy:
    """Activation recomputation in the backward pass.

    Attributes:
        recompute: none · selective: all of a block but matrix products · full: all of a block.
    """

    recompute: str = choice_field(RECOMPUTE, {"true": "full", "false": "none"})
    """none, selective (all but matrix products), full: activations of blocks computed twice"""


@dataclass(frozen=True, kw_only=True)
class OffloadPolicy:
    """Offloading of unused tensors: none, optimizer, parameters, activations; and its target.

    Attributes:
        offload_to: host: its memory · files: in TMPDIR, for a run on the CPU whose states exceed
            the memory.
    """

    offload: str = choice_field(OFFLOAD, {"true": "optimizer", "false": "none", "cpu": "optimizer"})
    """none, optimizer, parameters, activations: what waits on the host or in files while unused"""
    offload_to: str = choice_field(OFFLOAD_TO, {"cpu": "host", "disk": "files", "nvme": "files"})
    """host: its memory · files: mapped, without names, in TMPDIR; for states beyond the memory"""

    @property
    def offloads_parameters(self) -> bool:
        """True if parameters are offloaded, so that their memory changes from step to step."""
        return self.offload == "parameters"

    @property
    def states_in_files(self) -> bool:
        """True if states may exceed the memory."""
        return self.offload_to == "files"

    @property
    def builds_in_files(self) -> bool:
        """True if a model may exceed the memory that builds it."""
        return self.offloads_parameters and self.offload_to == "files"


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy(OffloadPolicy, RecomputePolicy):
    """Memory saved at the cost of time: `recompute` activations, `offload` to the host."""


@dataclass(frozen=True, kw_only=True)
class FsdpPolicy:
    """Resharding of a block's gathered weights between its passes, in fsdp and hsdp."""

    reshard: str = choice_field(("yes", "no", "node"), {"true": "yes", "false": "no"})
    """whether a block's weights are given up after its forward pass; node: to the node's ranks"""


@dataclass(frozen=True, kw_only=True)
class DeferSyncPolicy:
    """Gradient synchronisation of zero2 and fsdp: once a step, or (False) at every micro-batch."""

    defer_sync: bool = False
    """zero2, fsdp: sum gradients once a step instead of per micro-batch; costs a full gradient"""


@dataclass(frozen=True, kw_only=True)
class SyncBatchNormPolicy:
    """Statistics of BatchNorm: those of each rank's micro-batch, or of all ranks' together."""

    sync_batch_norm: bool = False
    """BatchNorm takes its statistics over the micro-batches of all ranks, as nn.SyncBatchNorm"""


@dataclass(frozen=True, kw_only=True)
class CompilePolicy:
    """Scope of torch.compile: none, or blocks, every block of the model."""

    compile: str = choice_field(COMPILE, {"true": "blocks", "false": "none"})
    """none, blocks: fused kernels for every block by torch.compile; the first steps take long"""


@dataclass(frozen=True, kw_only=True)
class BlocksPolicy:
    """Blocks of the model, by name pattern or class; (): the repeated modules."""

    blocks: tuple[str, ...] = ()
    """the modules that are blocks, by name (layers.*) or class (Layer); empty: what repeats"""

    @property
    def names_blocks(self) -> bool:
        """True if the user names the blocks."""
        return bool(self.blocks)


@dataclass(frozen=True, kw_only=True)
class LoopPolicy:
    """Seed, error limits and checks of the training loop.

    Attributes:
        seed: seed of initial weights, sample order and dropout.
        skip_limit: steps in a row with non-finite numbers, each skipped, after which the run stops.
        trace: steps that the profiler records, "FIRST:LAST", both included; "" none.
        statistics: steps from one record of statistics.jsonl to the next; 0: none.
        drift: frequency of checks for bits of weights and states that changed in memory: auto (a
            hundredth of a step's time), every (step), off.
        spikes: reaction to a step with an outlier in loss or norm: tell, skip, rewind, off.
        guards: on; off: no checks for mistakes of a loop, to measure the cost of the checks.
    """

    seed: int = number_field(0, least=0)
    """initial weights, sample order, dropout"""
    skip_limit: int = number_field(5, least=1, usual=5)
    """non-finite steps in a row before the run stops"""
    trace: str = ""
    """FIRST:LAST, both included: steps of which each rank writes a torch.profiler trace and their
    memory into the run folder's traces/; empty: none"""
    statistics: int = number_field(0, least=0)
    """steps from one record of norms of every gradient, weight and update, and of blocks'
    activations, to the next, in the run folder's statistics.jsonl; 0: none"""
    drift: str = choice_field(DRIFT, {"true": "auto", "false": "off", "none": "off", "on": "auto"})
    """auto (costs a hundredth of a step at most), every (step), off: whether bits of weights and
    optimizer state changed in memory, or differ between ranks that hold the same"""
    spikes: str = choice_field(
        SPIKES, {"true": "skip", "false": "off", "none": "off", "warn": "tell"}
    )
    """tell, skip (no update), rewind (skip; three in a row: to the last checkpoint, without samples
    since; own loops, islands: skip), off: steps whose loss or norm leaps out of the last 128"""
    guards: str = choice_field(("on", "off"), {"true": "on", "false": "off", "none": "off"})
    """on: ranks are compared in every step, and a loop is watched for mistakes that change numbers
    (weights written on one rank, equal samples on all ranks); off: to measure what that costs"""

    @staticmethod
    def parse_trace(name: str, text: str) -> tuple[int, int]:
        """Parse a `trace` into (first, last); raise ConfigError with the nearest text.

        >>> LoopPolicy.parse_trace("train.trace", "100:103")
        (100, 103)
        """
        ends = [int(one) for one in str(text).split(":") if one.isdecimal()]
        if len(ends) == 2 == len(str(text).split(":")) and 1 <= ends[0] <= ends[1]:
            return ends[0], ends[1]
        first, last = max(1, min(ends, default=100)), max(1, max(ends, default=103))
        wanted = "FIRST:LAST, two steps from 1 on, is wanted"
        raise ConfigError(f"{name} = {text}: {wanted}; try: {name}={first}:{last}")


@dataclass(frozen=True, kw_only=True)
class ReadPolicy:
    """Handling of samples that a disk, a mount or a connection fails to deliver at every try."""

    unreadable: int = number_field(16, least=0, usual=16)
    """samples that a run may leave out, each named, because a disk, mount or connection failed at
    four tries; 0: the first one ends it, as under tp, cp and pp, where several ranks read each"""


@dataclass(frozen=True, kw_only=True)
class CallPolicy:
    """Call of the model on inputs: single, model(inputs), or kwargs, model(**inputs)."""

    call: str = choice_field(("single", "kwargs"), {"args": "single", "dict": "kwargs"})
    """single: model(inputs) · kwargs: model(**inputs)"""


@dataclass(frozen=True, kw_only=True)
class KeepPolicy:
    """Number of newest complete checkpoints that stay on disk, and their remote copies."""

    keep: int = number_field(2, least=1, usual=2)
    """newest complete checkpoints that stay on disk; up to three before spikes stay beside them"""
    remote: str = ""
    """address of a folder for this run alone (s3://bucket/run, by fsspec): checkpoints are copied
    there beside training, and a start in a folder that has none goes on from there"""


@dataclass(frozen=True)
class CheckpointPolicy(KeepPolicy):
    """Checkpoint schedule, number of kept checkpoints (`keep`), and remote copies (`remote`).

    Attributes:
        every: steps between checkpoints; 0: five over the run, and the last step always.
        initial_load_path: checkpoints whose weights a fresh run starts with.
    """

    every: int = number_field(0, least=0)
    """steps between checkpoints; 0: five over the run, and the last step always"""
    initial_load_path: str = ""
    """a run folder, tag or checkpoint whose weights a fresh run starts with, and nothing else of
    it; or a mean of several: 0.6*runs/a+0.4*runs/b"""


@dataclass(frozen=True, kw_only=True)
class CompressPolicy:
    """Compression of gradients: none, int8, one-bit:STEPS, powersgd:RANK, topk:SHARE."""

    compress: str = "none"
    """what gradients travel as: none; int8, one-bit:STEPS (ddp, zero1, zero2, fsdp; the first STEPS
    in int8, default a third of the run's); powersgd:RANK, topk:SHARE (ddp)"""


@dataclass(frozen=True, kw_only=True)
class TensorPolicy:
    """Split of layers over the ranks of tp and cp; its keys are in [layout].

    Attributes:
        strict: refuse a model of which tp would leave a part unsplit; False: report that part.
        sequence_parallel: auto, on, off: under tp, ranks hold a part of the sequence between
            layers.
        split: PATTERN=WORD texts: names of parameters, and whole, column or row.
        context: auto, ring, ulysses, gather: how attention is computed under cp.
    """

    strict: bool = False
    """refuse a model of which tp would leave a part whole, instead of naming that part"""
    sequence_parallel: str = choice_field(SEQUENCE_PARALLEL)
    """auto, on, off: under tp, ranks hold a part of the sequence between split layers"""
    split: tuple[str, ...] = ()
    """for tp, PATTERN=whole, =column or =row: parameter names, and how their weights are cut"""
    context: str = choice_field(CONTEXT)
    """auto, ring, ulysses, gather: how attention is computed under cp"""

    @property
    def overrides(self) -> dict[str, str]:
        """Parameter splits set by the user: pattern of names → whole, column or row.

        Raises a ConfigError with the nearest right spelling.

        >>> TensorPolicy(split=("*.q.weight=column", "head.*=whole")).overrides
        {'*.q.weight': 'column', 'head.*': 'whole'}
        """
        found: dict[str, str] = {}
        for text in self.split:
            pattern, equals, word = (part.strip() for part in text.rpartition("="))
            if not (pattern and equals):
                raise ConfigError(
                    f"layout.split = {shorten(text)}: is written PATTERN=WORD; try: "
                    f"layout.split={shorten(text.strip('='))}=column"
                )
            check_choice(f"layout.split: {pattern}", word, SPLITS)
            if found.setdefault(pattern, word) != word:
                raise ConfigError(
                    f"layout.split: {pattern} is both {found[pattern]} and {word}; try: "
                    f"layout.split={pattern}={word}"
                )
        return found

    def check_split(self, tp: int | None = None, cp: int | None = None) -> None:
        """Raise ConfigError for a word outside the vocabulary, or with nothing to split.

        Args:
            tp, cp: degrees, if known.
        """
        check_choice("layout.context", self.context, CONTEXT)
        if self.context != "auto" and cp == 1:
            raise ConfigError(
                f"layout.context = {self.context}: says how attention is computed over layout.cp, "
                f"which is 1; try: layout.cp=2, or layout.context=auto"
            )
        check_choice("layout.sequence_parallel", self.sequence_parallel, SEQUENCE_PARALLEL)
        if self.overrides and tp == 1:
            raise ConfigError(
                f"layout.split = {self.split[0]}: says how layers are split over layout.tp, which "
                f"is 1; try: layout.tp=2, or leave layout.split out"
            )
        if self.sequence_parallel == "on" and tp == 1:
            raise ConfigError(
                "layout.sequence_parallel = on: splits the sequence over layout.tp, which is 1; "
                "try: layout.tp=2, or layout.sequence_parallel=auto"
            )


@dataclass(frozen=True, kw_only=True)
class Policies(
    PrecisionPolicy,
    UpdatePolicy,
    MemoryPolicy,
    FsdpPolicy,
    DeferSyncPolicy,
    SyncBatchNormPolicy,
    CompilePolicy,
    CompressPolicy,
    TensorPolicy,
    BlocksPolicy,
    LoopPolicy,
    ReadPolicy,
    CallPolicy,
    KeepPolicy,
):
    """Every technique's keys in one object, by their names in run.toml; a `Plan` inherits them."""

    def differs_from_default(self, policy: type) -> bool:
        """Return whether a key of a policy differs from its default.

        >>> (
        ...     Policies(recompute="full").differs_from_default(RecomputePolicy),
        ...     Policies().differs_from_default(RecomputePolicy),
        ... )
        (True, False)
        """
        return any(getattr(self, key.name) != key.default for key in fields(policy))


POLICIES: Mapping[str, Field[Any]] = {key.name: key for key in fields(Policies)}
"""Every key of every policy, with its declaration."""


MOST = 2**30
"""Upper bound of every count of samples, tokens, steps or processes."""

MOST_SEED = 2**63 - 1
"""Largest seed of torch's generators."""


def lists_as_tuples(words: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a mapping of policy keys with lists as tuples; KeyError for unknown keys.

    >>> lists_as_tuples({"split": "*.q=row", "blocks": ["Block"], "clip": 1.0})
    {'split': ('*.q=row',), 'blocks': ('Block',), 'clip': 1.0}
    """
    lists = {key for key in words if isinstance(POLICIES[key].default, tuple)}
    return {
        key: ((value,) if isinstance(value, str) else tuple(value)) if key in lists else value
        for key, value in words.items()
    }


def check_value(name: str, key: Field[Any], value: Any) -> None:
    """Refuse a value that a key's declaration (`choice_field`, `number_field`) does not allow.

    Numbers must also be finite, whole ones at most 2^30, a seed 2^63 − 1. Words of `others` are
    refused too, and determine the proposed word. A key with another declaration passes.

    Args:
        name: the key as the user wrote it.

    Raises:
        ConfigError: the value is refused; with the nearest word, or the declared `usual` number.

    >>> declared = Policies.__dataclass_fields__
    >>> check_value("memory.recompute", declared["recompute"], "ful")
    Traceback (most recent call last):
    shoal.base.errors.ConfigError: memory.recompute = ful: not one of none, selective, full; \
try: full
    """
    said = key.metadata
    if key.name == "trace" and value:
        LoopPolicy.parse_trace(name, value)
    if "legal" in said:
        check_choice(name, value, said["legal"], said["others"])
        return
    if "least" not in said:
        return
    low, below, near = said["least"], said["below"], said["usual"]
    if not value >= low:
        raise ConfigError(f"{name} = {value}: at least {low} is wanted; try: {name}={near}")
    if not value < below:
        wanted = "a finite number" if below == math.inf else f"less than {below}"
        raise ConfigError(f"{name} = {value}: {wanted} is wanted; try: {name}={near}")
    if key.name == "seed":
        if value > MOST_SEED:
            raise ConfigError(f"{name} = {value}: more than 2^63 − 1; try: {name}={near}")
    elif isinstance(value, int) and value > MOST:
        raise ConfigError(
            f"{name} = {value}: more than {MOST} is no number that a run could have; try: "
            f"{name}={near}"
        )


def check_compile(policy: str, recompute: str) -> None:
    """Refuse an unknown `train.compile`, or blocks with `memory.recompute` = selective.

    Raises a ConfigError with the nearest policy, or a PlanError with the nearest recompute.
    """
    check_choice("train.compile", policy, COMPILE)
    if policy != "none" and recompute == "selective":
        raise PlanError(
            "train.compile = blocks: memory.recompute = selective looks at single operations, "
            "which a compiled block no longer has; try: memory.recompute=full"
        )


WHOLE_STEPS = {
    "lamb": "scales a parameter's step by norms of all of it",
    "muon": "turns whole matrices",
    "adafactor": "keeps sums of whole rows and columns",
}
"""Optimizers by name whose step is not element-wise; `optim/elementwise_probe.py` finds others."""


def check_nonelementwise_optimizer(name: str, strategy: str, tp: int, ep: int) -> None:
    """Refuse lamb, muon and adafactor if a layout cuts parameters, before anything starts.

    Args:
        name: any other optimizer passes here; `optim/elementwise_probe.py` tests it once the run is
            built.
        strategy: `LayoutSection.named()`.
        tp, ep: degrees; 0 if not given.

    Raises:
        PlanError: the layout cuts parameters; with the nearest layout.
    """
    why = WHOLE_STEPS.get(name.lower())
    if why is None:
        return
    if strategy in ("zero3", "fsdp", "hsdp"):
        what, nearest = f"layout.strategy = {strategy}: cuts every parameter by rows", "zero2"
    elif tp > 1 or strategy == "tp":
        what, nearest = f"layout.tp{f' = {tp}' * (tp > 1)}: cuts weights inside", "zero2"
    elif ep > 1 or strategy == "ep":
        what, nearest = f"layout.ep{f' = {ep}' * (ep > 1)}: cuts stacks of experts by rows", "ddp"
    else:
        return
    raise PlanError(
        f"{what}, and optimizer.name = {name} {why}; try: layout.strategy={nearest}, or "
        f"optimizer.name=adamw"
    )
