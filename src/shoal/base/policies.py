"""One frozen dataclass per technique: its settings, which are its section of run.toml."""

from __future__ import annotations

from dataclasses import dataclass

PRECISIONS = ("auto", "fp64", "fp32", "bf16")
SCHEDULES = ("cosine", "wsd", "one-cycle", "linear", "constant")


@dataclass(frozen=True)
class PrecisionPolicy:
    """Number formats. Parameters and optimizer state stay fp32 under bf16; fp64 is for proofs."""

    compute: str = "auto"
    """auto, fp64, fp32, bf16: the format of matrix products"""


@dataclass(frozen=True)
class OptimizerPolicy:
    """The update rule, its learning-rate schedule and gradient clipping."""

    name: str = "adamw"
    """adamw, sgd, lion, lamb, muon, any class of torch.optim, or pkg.mod:Class"""
    lr: float = 3e-3
    """peak learning rate"""
    betas: tuple[float, float] = (0.9, 0.95)
    """for optimizers that have betas"""
    momentum: float = 0.9
    """for sgd"""
    weight_decay: float = 0.1
    """on matrices; never on vectors and scalars (norms, biases)"""
    clip: float = 1.0
    """largest global gradient norm; 0 leaves gradients as they are"""
    schedule: str = "cosine"
    """cosine, wsd, one-cycle, linear, constant"""
    warmup_steps: int = -1
    """steps from 0 to lr; −1: a twentieth of the run"""


@dataclass(frozen=True)
class CheckpointPolicy:
    """When the run's state is written, and how many copies stay."""

    every: int = 0
    """steps between checkpoints; 0: five over the run, and the last step always"""
    keep: int = 2
    """newest complete checkpoints that stay on disk"""
