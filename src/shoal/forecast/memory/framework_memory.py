"""Memory of other frameworks' training steps, where they differ from Shoal's.

These frameworks made the published runs, so a prediction for comparison must follow their step.
Every figure here is read from their source or follows from it. Two are fitted, each one number for
all runs of a kind: `allocator` and `imbalance` (docs/proof/planner-memory.md).

torchtitan   at 9dec370 (Dec 2024): train.py (`del pred` before backward, loss not compiled),
             models/llama/model.py (repeat_kv), parallelisms/parallelize_llama.py (op-wise
             selective recompute: every second product kept; the last block is not resharded between
             its passes); its loss is compiled since 2025
FSDP2        torch, _fsdp_collectives.py: gathered bytes exist once flat on the gather stream and
             once as parameters; gradients on the reduce stream. Embedding and head stay gathered
             between forward and backward. In a pipeline all weights do, and gradients stay whole
             (torchtitan: reshard_after_forward is off there), or each micro-batch would gather
DTensor      tensor/parallel/loss.py (saved softmax, its gradient, exp, their sum: 16 bytes);
             inputs of split products are gathered once and saved whole
Megatron-LM  core: tensor_parallel/cross_entropy.py (fp32 softmax in place), layers.py (one buffer
             for gathered inputs), fusions/fused_bias_swiglu.py, transformer/moe/experts.py
             (probabilities applied inside the expert); Transformer Engine: LayerNormLinear
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.base.errors import PlanError, check_choice
from shoal.forecast.models.block_parts import FUSED, Kernels


@dataclass(frozen=True)
class FrameworkMemory:
    """Memory of one framework's training step.

    Attributes:
        kernels: tensors that its kernels save; `compiled`: with torch.compile.
        loss_word_bytes: of a full loss at its peak, per token and word, in bf16.
        compiled_loss_word_bytes: the same with a compiled loss; 0: loss_word_bytes.
        split_loss_word_bytes: the same of a loss that tensor parallelism splits.
        idle_word_bytes: reserved after the forward of the loss, and unused at its peak.
        splits_loss: tensor parallelism splits the loss, whatever the case says.
        gathers_again: with tensor and sequence parallelism, the backward gathers inputs again into
            one buffer that lives for the whole run; else gathered inputs are kept.
        keeps_last: under fsdp the last block stays gathered from forward to backward.
        update_bytes: temporary bytes of the optimizer's step per local parameter.
        workspace_bytes: for matrix products: 32 MiB of cuBLAS, as much again of Transformer Engine.
        allocator: reserved / (allocated + idle pools).
        imbalance: tokens of the fullest rank of an expert-parallel group / their mean.
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
"""Shoal's models on a GPU: the residual stream is fp32 under autocast, unless it is set to bf16."""

_TITAN = Kernels(repeated_kv=True, selective="half", keeps_unused=True)
_TITAN_COMPILED = Kernels(repeated_kv=True, selective="half", fused_gate=True)
_MEGATRON = Kernels(fused_gate=True, probs_inside=True)

FRAMEWORKS = {
    "shoal": FrameworkMemory(OWN, replace(OWN, fused_gate=True), update_bytes=0.0),
    "torchtitan": FrameworkMemory(_TITAN, _TITAN_COMPILED, splits_loss=True, keeps_last=True),
    "torchtitan-2025": FrameworkMemory(
        _TITAN, _TITAN_COMPILED, splits_loss=True, keeps_last=True, compiled_loss_word_bytes=4.0
    ),
    "automodel": FrameworkMemory(),
    "llm-foundry": FrameworkMemory(),
    "megatron": FrameworkMemory(
        _MEGATRON,
        _MEGATRON,
        loss_word_bytes=6.0,
        splits_loss=True,
        split_loss_word_bytes=6.0,
        gathers_again=True,
        update_bytes=0.0,
        workspace_bytes=64 * 2.0**20,
    ),
    "megatron-deepspeed": FrameworkMemory(
        _MEGATRON,
        _MEGATRON,
        loss_word_bytes=6.0,
        split_loss_word_bytes=6.0,
        splits_loss=True,
        update_bytes=0.0,
    ),
}
"""Memory by `PlanningCase.framework`."""


def framework_memory(name: str) -> FrameworkMemory:
    """Return the memory of a framework's step; PlanError for an unknown framework.

    >>> framework_memory("megatron").loss_word_bytes
    6.0
    """
    check_choice("framework", name, FRAMEWORKS, kind=PlanError)
    return FRAMEWORKS[name]


def own_kernels(
    device_kind: str, sequence: int, element_bytes: int, residual: str = "fp32"
) -> Kernels:
    """Return the kernels of Shoal's own models for `model_facts`, by device and sequence.

    On all devices but "cpu" they are `OWN`, with bf16 residuals `FUSED`. On a CPU attention over up
    to 2048 tokens is matrix products on blocks of `score_rows` rows, over more tokens flash.

    Args:
        sequence: tokens per sample.
        element_bytes: of activations.
        residual: format of the residual stream, as `precision.residual`.

    >>> own_kernels("cpu", 512, 4).score_rows, own_kernels("gpu", 512, 2).flash
    (128, True)
    >>> own_kernels("gpu", 512, 2, "bf16").wide_residual
    False
    """
    own = replace(OWN, wide_residual=residual != "bf16")
    if device_kind != "cpu":
        return own
    flash = sequence > 2048
    rows = 256 if element_bytes == 2 and sequence > 512 else 128
    return replace(own, flash=flash, score_rows=0 if flash else rows)
