"""What other frameworks' training steps keep in memory, where they differ from Shoal's own.

Published runs were made by these frameworks; to be held against them, a prediction must follow
their step. Every figure here is read from their source or follows from it, but two that are fitted,
each one number for all runs of a kind: `allocator` and `imbalance` (docs/planner-memory.md).

torchtitan   at 9dec370 (Dec 2024): train.py (`del pred` before backward, loss not compiled),
             models/llama/model.py (repeat_kv), parallelisms/parallelize_llama.py (op-wise
             selective recompute: every second product kept; the last block is not cut between its
             passes); its loss is compiled since 2025
FSDP2        torch, _fsdp_collectives.py: gathered bytes are made once flat on the gather stream,
             once as parameters; gradients on the reduce stream. Embedding and head stay gathered
             between forward and backward; in a pipeline everything does, and gradients stay whole
             (torchtitan: reshard_after_forward is off there), or each micro-batch would gather
DTensor      tensor/parallel/loss.py (saved softmax, its gradient, exp, their sum: 16 bytes);
             inputs of split products are gathered once and saved whole
Megatron-LM  core: tensor_parallel/cross_entropy.py (fp32 softmax in place), layers.py (one buffer
             for gathered inputs), fusions/fused_bias_swiglu.py, transformer/moe/experts.py
             (probabilities applied inside the expert); Transformer Engine: LayerNormLinear
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.base.errors import PlanError, one_of
from shoal.forecast.models.block_parts import FUSED, Kernels


@dataclass(frozen=True)
class Framework:
    """One framework's step.

    Attributes:
        kernels: what its kernels keep, with torch.compile: `compiled`.
        split_loss_word_bytes: the same of a loss that tensor parallelism splits.
        splits_loss: the loss is split by tensor parallelism whatever the case says.
        gathers_again: with tensor and sequence parallelism, gathered inputs are gathered again for
            the backward, into one buffer that lives for the whole run; else they are kept.
        keeps_last: under fsdp the last block stays gathered from forward to backward.
        update_bytes: per local parameter, what the optimizer's step holds for itself.
        allocator: reserved / (allocated + idle pools).
        imbalance: tokens of the fullest rank of an expert-parallel group / their mean.

    loss_word_bytes of a full loss at its peak, per token and word, in bf16; with a compiled
                    loss: compiled_loss_word_bytes (0: as it is)
    idle_word_bytes reserved after the forward of the loss and of no use at its peak
    workspace_bytes for matrix products: 32 MiB of cuBLAS, as much again of Transformer Engine
    """

    kernels: Kernels = FUSED
    compiled: Kernels = FUSED
    loss_word_bytes: float = 12.0
    split_loss_word_bytes: float = 16.0
    idle_word_bytes: float = 2.0
    splits_loss: bool = False
    gathers_again: bool = False
    keeps_last: bool = False
    update_bytes: float = 4.0
    workspace_bytes: float = 32 * 2.0**20
    allocator: float = 1.04
    imbalance: float = 1.25
    compiled_loss_word_bytes: float = 0.0


OWN = Kernels(wide_residual=True)
"""Shoal's models on a GPU: between blocks fp32 under autocast."""

_TITAN = Kernels(repeated_kv=True, selective="half", keeps_unused=True)
_TITAN_COMPILED = Kernels(repeated_kv=True, selective="half", fused_gate=True)
_MEGATRON = Kernels(fused_gate=True, probs_inside=True)

FRAMEWORKS = {
    "shoal": Framework(OWN, replace(OWN, fused_gate=True), update_bytes=0.0),
    "torchtitan": Framework(_TITAN, _TITAN_COMPILED, splits_loss=True, keeps_last=True),
    "torchtitan-2025": Framework(
        _TITAN, _TITAN_COMPILED, splits_loss=True, keeps_last=True, compiled_loss_word_bytes=4.0
    ),
    "automodel": Framework(),
    "llm-foundry": Framework(),
    "megatron": Framework(
        _MEGATRON,
        _MEGATRON,
        loss_word_bytes=6.0,
        splits_loss=True,
        split_loss_word_bytes=6.0,
        gathers_again=True,
        update_bytes=0.0,
        workspace_bytes=64 * 2.0**20,
    ),
    "megatron-deepspeed": Framework(
        _MEGATRON,
        _MEGATRON,
        loss_word_bytes=6.0,
        split_loss_word_bytes=6.0,
        splits_loss=True,
        update_bytes=0.0,
    ),
}
"""By `Case.framework`."""


def framework(name: str) -> Framework:
    """The step of a framework; PlanError for one that is not known.

    >>> framework("megatron").loss_word_bytes
    6.0
    """
    if name not in FRAMEWORKS:
        raise PlanError(one_of("framework", name, FRAMEWORKS))
    return FRAMEWORKS[name]


def own_kernels(device_kind: str, sequence: int, element_bytes: int) -> Kernels:
    """Describe what the kernels of Shoal's own models keep for the backward: for `model_facts`.

    A GPU's (all that is not "cpu") are `OWN`, whatever the other arguments. On a CPU attention over
    up to 2048 tokens is matrix products on blocks of `score_rows` rows, longer is flash attention.

    Args:
        sequence: tokens per sample.
        element_bytes: of activations.

    >>> own_kernels("cpu", 512, 4).score_rows, own_kernels("gpu", 512, 2).flash
    (128, True)
    """
    if device_kind != "cpu":
        return OWN
    flash = sequence > 2048
    rows = 256 if element_bytes == 2 and sequence > 512 else 128
    return replace(OWN, flash=flash, score_rows=0 if flash else rows)
