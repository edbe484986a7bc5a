"""One frozen dataclass per technique: its settings, which are its section of run.toml."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.errors import ConfigError, PlanError, one_of

PRECISIONS = ("auto", "fp64", "fp32", "bf16", "fp16")
OTHER_FORMATS = {
    **{"fp8": "bf16", "bfloat16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "half": "fp16"},
    **{"float16": "fp16", "16-mixed": "fp16", "float32": "fp32", "32": "fp32", "tf32": "fp32"},
    **{"float64": "fp64", "double": "fp64", "64": "fp64"},
}
"""What others call the formats, and the nearest one where there is none (fp8)."""

PROOFS = ("quick", "off")
COMPILE = ("none", "blocks")
REDUCTIONS = ("auto", "fp32", "bf16")
COMPRESS = ("none", "int8", "powersgd", "topk")
SPLITS = ("whole", "column", "row")
SEQUENCE_PARALLEL = ("auto", "on", "off")
CONTEXT = ("auto", "ring", "ulysses", "gather")
SCHEDULES = ("cosine", "wsd", "one-cycle", "linear", "constant")


@dataclass(frozen=True)
class PrecisionPolicy:
    """Number formats. Parameters and optimizer state stay fp32 below; fp64 is for proofs."""

    compute: str = "auto"
    """auto, fp64, fp32, bf16, fp16: the format of matrix products"""
    reduce: str = "auto"
    """auto, fp32, bf16: the format in which gradients travel; auto: as they are kept"""
    loss_scale: float = 0.0
    """for fp16: what the loss is multiplied by; 0: found and followed by itself"""


@dataclass(frozen=True)
class OptimizerPolicy:
    """The update rule, its learning-rate schedule and gradient clipping."""

    name: str = "adamw"
    """adamw, sgd, lion, lamb, muon, any class of torch.optim, or pkg.mod:Class"""
    lr: float = 1e-3
    """peak learning rate"""
    betas: tuple[float, float] = (0.9, 0.95)
    """for optimizers that have betas"""
    momentum: float = 0.9
    """for sgd"""
    weight_decay: float = 0.1
    """on matrices; never on vectors and scalars (norms, biases)"""
    clip: float = 1.0
    """largest global gradient norm; 0 leaves gradients as they are"""
    average: float = 0.0
    """decay of an average of the weights, with which runs then validate, e.g. 0.999; 0: none"""
    schedule: str = "cosine"
    """cosine, wsd, one-cycle, linear, constant"""
    warmup_steps: int = -1
    """steps from 0 to lr; −1: a tenth of the run"""


RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "parameters", "activations")


@dataclass(frozen=True)
class MemoryPolicy:
    """Memory saved at the cost of time."""

    recompute: str = "none"
    """none, selective (all but matrix products), full: activations of blocks computed twice"""
    offload: str = "none"
    """none, optimizer, parameters (fsdp), activations: kept in the host's memory (GPUs only)"""


@dataclass(frozen=True)
class CheckpointPolicy:
    """When the run's state is written, and how many copies stay."""

    every: int = 0
    """steps between checkpoints; 0: five over the run, and the last step always"""
    keep: int = 2
    """newest complete checkpoints that stay on disk"""


@dataclass(frozen=True)
class CompressPolicy:
    """What gradients are made of while they travel between data-parallel ranks."""

    method: str = "none"
    """none, int8, powersgd, topk"""
    rank: int = 4
    """powersgd: columns of the two thin matrices that stand for one gradient"""
    share: float = 0.01
    """topk: share of the elements that a rank sends"""

    @staticmethod
    def parse(text: str) -> CompressPolicy:
        """The policy that `layout.compress` names.

        Errors: ConfigError with the nearest right spelling.

        >>> CompressPolicy.parse("powersgd:2").rank, CompressPolicy.parse("topk").share
        (2, 0.01)
        """
        method, colon, number = text.partition(":")
        if method not in COMPRESS:
            raise ConfigError(one_of("layout.compress", text, COMPRESS))
        if not colon:
            return CompressPolicy(method)
        if method == "powersgd":
            if number.isdecimal() and int(number) >= 1:
                return CompressPolicy(method, rank=int(number))
            wanted = "a rank of at least 1 is wanted; nearest: layout.compress=powersgd:1"
        elif method == "topk":
            share = _number(number)
            if 0 < share <= 1:
                return CompressPolicy(method, share=share)
            wanted = "a share above 0 and up to 1 is wanted; nearest: layout.compress=topk:0.01"
        else:
            wanted = f"{method} takes no number; nearest: layout.compress={method}"
        raise ConfigError(f"layout.compress = {text}: {wanted}")


@dataclass(frozen=True)
class TensorPolicy:
    """How layers are split over the ranks of tp and cp; its keys stand in [layout]."""

    strict: bool = False
    """refuse a model of which a part would stay whole, instead of naming that part"""
    sequence_parallel: str = "auto"
    """auto, on, off: between split layers every rank holds a part of the sequence only"""
    split: tuple[str, ...] = ()
    """PATTERN=whole, =column or =row: parameter names, and how they are split"""
    context: str = "auto"
    """auto, ring, ulysses, gather: how ranks that share a sequence (cp) compute attention"""

    @property
    def overrides(self) -> dict[str, str]:
        """What the user said of parameters: pattern of names → whole, column or row.

        Errors: ConfigError with the nearest right spelling.

        >>> TensorPolicy(split=("*.q.weight=column", "head.*=whole")).overrides
        {'*.q.weight': 'column', 'head.*': 'whole'}
        """
        found: dict[str, str] = {}
        for text in self.split:
            pattern, equals, word = (part.strip() for part in text.rpartition("="))
            if not (pattern and equals):
                raise ConfigError(
                    f"layout.split = {text}: is written PATTERN=WORD; nearest: "
                    f"layout.split={text.strip('=')}=column"
                )
            if word not in SPLITS:
                raise ConfigError(one_of(f"layout.split: {pattern}", word, SPLITS))
            if found.setdefault(pattern, word) != word:
                raise ConfigError(
                    f"layout.split: {pattern} is both {found[pattern]} and {word}; nearest: "
                    f"layout.split={pattern}={word}"
                )
        return found

    def check(self, tp: int | None = None, cp: int | None = None) -> None:
        """Errors: ConfigError for a word outside the vocabulary, or with nothing to split.

        tp, cp   degrees, where they are known
        """
        if self.context not in CONTEXT:
            raise ConfigError(one_of("layout.context", self.context, CONTEXT))
        if self.context != "auto" and cp == 1:
            raise ConfigError(
                f"layout.context = {self.context}: says how attention is computed over layout.cp, "
                f"which is 1; nearest: layout.cp=2, or layout.context=auto"
            )
        if self.sequence_parallel not in SEQUENCE_PARALLEL:
            raise ConfigError(
                one_of("layout.sequence_parallel", self.sequence_parallel, SEQUENCE_PARALLEL)
            )
        if self.overrides and tp == 1:
            raise ConfigError(
                f"layout.split = {self.split[0]}: says how layers are split over layout.tp, which "
                f"is 1; nearest: layout.tp=2, or leave layout.split out"
            )
        if self.sequence_parallel == "on" and tp == 1:
            raise ConfigError(
                "layout.sequence_parallel = on: splits the sequence over layout.tp, which is 1; "
                "nearest: layout.tp=2, or layout.sequence_parallel=auto"
            )


def check_compile(policy: str, recompute: str) -> None:
    """Refuse a way of compiling that is none, or that recomputing activations cannot go with.

    Errors: ConfigError with the nearest policy; PlanError with the nearest recompute
    """
    if policy not in COMPILE:
        raise ConfigError(one_of("train.compile", policy, COMPILE))
    if policy != "none" and recompute == "selective":
        raise PlanError(
            "train.compile = blocks: memory.recompute = selective looks at single operations, "
            "which a compiled block no longer has; nearest: memory.recompute=full"
        )


WHOLE_STEPS = {
    "lamb": "scales a parameter's step by norms of all of it",
    "muon": "turns whole matrices",
    "adafactor": "keeps sums of whole rows and columns",
}
"""Optimizers by name whose step on a part is no part of the step; what `optim/probe.py` finds."""


def check_whole_steps(name: str, strategy: str, tp: int, ep: int) -> None:
    """Refuse an optimizer of whole parameters where the layout cuts them, before anything starts.

    strategy   `LayoutSection.named()` · tp, ep  degrees, where they are given
    Errors     PlanError with the nearest layout
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
        f"{what}, and optimizer.name = {name} {why}; nearest: layout.strategy={nearest}, or "
        f"optimizer.name=adamw"
    )


def check_compress(text: str, strategy: str, precision: str = "", reduce: str = "") -> None:
    """Refuse a way of compressing that a layout or a precision cannot carry.

    strategy    what the data-parallel axes do (`Layout.data_strategy`), whatever else is split
    precision, reduce   the formats of matrix products and of sums
    Errors      ConfigError for a text that is none; PlanError with the nearest right choice
    """
    method = CompressPolicy.parse(text).method
    if method == "none":
        return
    if strategy in ("zero3", "fsdp", "hsdp"):
        nearest = "zero2" if method == "int8" else "ddp"
        raise PlanError(
            f"layout.compress = {text}: {strategy} gathers weights and sums gradients unit by unit "
            f"inside fully_shard, which cannot encode; nearest: layout.strategy={nearest}, or "
            f"layout.compress=none"
        )
    if strategy in ("zero1", "zero2") and method != "int8":
        raise PlanError(
            f"layout.compress = {text}: {strategy} cuts gradients where no matrix ends and gives "
            f"each rank its part only, which int8 alone can encode; nearest: layout.compress=int8, "
            f"or layout.strategy=ddp"
        )
    if precision == "fp16":
        raise PlanError(
            f"layout.compress = {text}: fp16's loss scale changes between steps, and what one step "
            f"leaves out would be added in the next in another scale; nearest: "
            f"precision.compute=bf16"
        )
    if reduce == "bf16":
        raise PlanError(
            f"layout.compress = {text}: precision.reduce = bf16 would round what error feedback "
            f"must see whole; nearest: precision.reduce=auto"
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
