"""Notices on kernels that Shoal's own models have and a model of another library has not.

    norms, activations   several kernels each, where torch has one for the same function
    logits               all of a micro-batch at once, in the loss
    attention scores     all kept for the backward pass, by attn_implementation = eager

Each line has the size of what is missing, and there is none where it is small or compiled code
fuses it. Only a model with a `config`, as transformers' have, is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shoal.base.layouts.policies import CompilePolicy
from shoal.base.plans.plan import Plan
from shoal.base.text.units import bytes_text
from shoal.models.norm import RMSNorm

LEAST_LOGITS_BYTES = 2**30
"""Size from which logits are worth a notice."""
LOSS_BYTES = 12
"""Bytes per logit of a plain loss: the logits in fp32, their log-softmax, their gradient."""


KERNELS = {"RMSNorm": (6, "RMSNorm"), "T5LayerNorm": (6, "RMSNorm")}
"""End of the name of a module → kernels of its forward pass, and the one kernel of torch."""
SAME_GELU = "gelu_pytorch_tanh in the model's configuration, the same function, or "
KERNELS |= {
    "NewGELUActivation": (8, "gelu"),
    "FastGELUActivation": (9, "gelu"),
    "QuickGELUActivation": (3, "gelu"),
}


def other_kernels_lines(module: nn.Module, outputs: Any, plan: Plan, device: str) -> list[str]:
    """Return notices on kernels that Shoal's own models have and this one has not, with their size.

    Args:
        outputs: of the model's first pass, read by the default loss.
        device: type of device on which it runs.
    """
    lines = []
    named = outputs.get("logits") if isinstance(outputs, Mapping) else None
    logits = getattr(outputs, "logits", named)
    if isinstance(logits, torch.Tensor):
        if LOSS_BYTES * logits.numel() >= LEAST_LOGITS_BYTES:
            lines.append(
                f"model: returns all logits of a micro-batch, {list(logits.shape)}: their loss "
                f"takes {bytes_text(LOSS_BYTES * logits.numel())}, where Shoal's own models "
                f"compute it in chunks of at most 512 MiB; try: a smaller train.micro_batch if "
                f"memory is short"
            )
        lines += _whole_scores_lines(module, logits)
    if not plan.differs_from_default(CompilePolicy) and device != "cpu":
        lines += _many_kernels_lines(module)
    return lines


def _whole_scores_lines(module: nn.Module, logits: torch.Tensor) -> list[str]:
    """Return the notice on attention that keeps its scores, [batch, heads, seq, seq] a layer."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", "") != "eager" or logits.ndim != 3:
        return []
    heads, layers = (
        getattr(config, key, 0) for key in ("num_attention_heads", "num_hidden_layers")
    )
    batch, seq, _ = logits.shape
    held = 4 * layers * heads * batch * seq**2  # the softmax alone, fp32
    if held < LEAST_LOGITS_BYTES:
        return []
    return [
        f"model: attn_implementation = eager keeps all scores, {bytes_text(held)} in {layers} "
        f"layers, where flash attention keeps none; try: model.set_attn_implementation('sdpa')"
    ]


def _many_kernels_lines(module: nn.Module) -> list[str]:
    """Return a notice for each kind of norms and activations that runs as several kernels."""
    names = Counter(
        type(part).__name__
        for part in module.modules()
        if not isinstance(part, nn.RMSNorm | RMSNorm)
    )
    lines = []
    for name, count in names.most_common():
        kernels, own = next((of for end, of in KERNELS.items() if name.endswith(end)), (0, ""))
        if kernels:
            near = SAME_GELU if own == "gelu" and name != "QuickGELUActivation" else ""
            lines.append(
                f"model: {count} {name} run as {kernels} kernels each, torch's own {own} as 1; "
                f"try: {near}train.compile=blocks, which fuses them"
            )
    return lines
