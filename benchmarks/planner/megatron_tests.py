"""What the cited Megatron-LM tests' own configurations say, where rows leave it blank.

Source   NVIDIA/Megatron-LM, tests/functional_tests/test_cases/*/model_config.yaml and
         tests/test_utils/recipes/; Megatron's defaults: megatron/training/arguments.py (dropout
         0.1, biases, GELU, LayerNorm, ffn 4 · hidden, tied, vocabulary padded to 128 · tp)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from shoal.base.estimates.estimate import ModelFacts, UnitFacts
from shoal.base.estimates.transformer_shape import TransformerShape
from shoal.forecast.models.published_models import published_shape
from shoal.forecast.models.transformer_costs import Kernels, transformer_facts


@dataclass(frozen=True)
class Fill:
    """What a cited test's own configuration says where its row is blank; gpus 0: it does not."""

    shape: TransformerShape
    sequence: int
    batch: int
    micro_batch: int
    gpus: int = 8
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 0
    chunks: int = 1
    sequence_parallel: bool = False
    distributed: bool = True
    recompute: str = "none"
    flash: bool = True


CASES = "Megatron-LM tests/functional_tests/test_cases/{}/model_config.yaml"


def padded(words: int, tp: int) -> int:
    """Megatron pads the vocabulary to a multiple of 128 per tensor-parallel rank."""
    return math.ceil(words / (128 * tp)) * 128 * tp


def _gpt(name: str, layers: int, hidden: int, heads: int, **rest: Any) -> TransformerShape:
    base = TransformerShape(
        name,
        layers,
        hidden,
        heads,
        heads,
        4 * hidden,
        0,
        gated=False,
        norm="layer",
        biases=True,
        dropout=0.1,
    )
    return replace(base, **rest)


def _mixtral(name: str, words: int) -> TransformerShape:
    return replace(published_shape(name), vocabulary=words)


_SEVEN = {"kv_heads": 8, "positions": 8192}
"""Elsewhere Megatron's defaults hold: dropout 0.1, biases, GELU, learned positions, ffn 4·h."""

STEADY = "number of GPUs that explains allocated_bytes_steady of the same runs best"

FILLS = {
    "gpt3_7b_tp4_pp1_memory_speed": Fill(
        _gpt("gpt3-7b", 32, 4096, 32, vocabulary=padded(131073, 4), **_SEVEN),
        sequence=8192,
        batch=8,
        micro_batch=2,
        tp=4,
    ),
    "gpt3_7b_tp1_pp4_memory_speed": Fill(
        _gpt("gpt3-7b", 32, 4096, 32, vocabulary=padded(131073, 1), **_SEVEN),
        sequence=8192,
        batch=8,
        micro_batch=1,
        pp=4,
        chunks=8,
    ),
    "gpt3_15b_8t_release": Fill(
        _gpt(
            "gpt3-15b",
            32,
            6144,
            48,
            kv_heads=8,
            vocabulary=padded(256000, 8),
            biases=False,
            dropout=0.0,
        ),
        sequence=4096,
        batch=384,  # where its ramp begins; 1152 later
        micro_batch=4,
        gpus=0,
        tp=8,
        sequence_parallel=True,
    ),
    "mixtral_8x22b_tp2pp8ep8vpp1_release": Fill(
        _mixtral("mixtral-8x22b", padded(32000, 2)),
        sequence=4096,
        batch=256,
        micro_batch=1,
        gpus=0,
        tp=2,
        pp=8,
        ep=8,
        sequence_parallel=True,
    ),
    "mixtral_8x7b_alltoall_tp2pp4ep4_release": Fill(
        _mixtral("mixtral-8x7b", padded(256000, 2)),
        sequence=4096,
        batch=1024,
        micro_batch=1,
        gpus=0,
        tp=2,
        pp=4,
        ep=4,
        sequence_parallel=True,
    ),
    "mixtral_8x7b_tp1pp4ep8vpp8_release": Fill(
        _mixtral("mixtral-8x7b", padded(32000, 2)),
        sequence=4096,
        batch=256,
        micro_batch=1,
        gpus=0,
        tp=2,
        pp=4,
        ep=8,
        expert_tp=1,
        chunks=8,
        sequence_parallel=True,
    ),
    "t5_11b_mcore_tp4_pp1": Fill(
        _gpt(
            "t5-11b",
            24,
            4096,
            64,
            ffn=10240,
            vocabulary=padded(28996 + 100, 4),
            positions=512,
            tied=True,
        ),
        sequence=512,
        batch=8,
        micro_batch=4,
        tp=4,
        distributed=False,
    ),
}
"""By test name, as its model_config.yaml has it; the number of nodes is in no published file for
the release tests."""


UNFUSED = ("te_tp1_pp4_vp1", "te_tp1_pp4_sequence_parallel", "te_tp2_pp2", "gpt3_mcore_tp")
"""Small tests with --attention-backend unfused or --transformer-impl local: scores are kept."""


def small_fill(record: dict[str, str]) -> Fill | None:
    """The tests of 12 layers of 512: GPT-2's vocabulary, tied, else Megatron's defaults."""
    if record["hidden"] != "512" or record["layers"] != "12":
        return None
    if record["zero_stage_or_fsdp"] == "FSDP":
        return None
    tp, pp, cp = int(record["tp"]), int(record["pp"]), int(record["cp"])
    shape = _gpt("gpt3-12x512", 12, 512, 8, vocabulary=padded(50257, tp), positions=1024, tied=True)
    return Fill(
        replace(shape, dropout=0.0) if cp > 1 else shape,
        sequence=int(record["seq"]),
        batch=int(record["global_batch"]),
        micro_batch=int(record["micro_batch"]),
        tp=tp,
        pp=pp,
        cp=cp,
        chunks=12 // pp if "VP-layers=1" in record["note"] else 1,
        sequence_parallel="SP=True" in record["note"],
        distributed="distributed" in record["zero_stage_or_fsdp"],
        recompute=record["recompute"],
        flash=cp > 1 or not any(name in record["model"] for name in UNFUSED),
    )


def t5_facts(shape: TransformerShape, kernels: Kernels) -> ModelFacts:
    """T5 of 512 tokens in, 128 out: encoder blocks, decoder blocks, attention between the two."""
    inner, outer = 512, 128
    encoder = transformer_facts(replace(shape, causal=False), inner, 2, kernels)
    decoder = transformer_facts(shape, outer, 2, kernels)
    h = shape.hidden
    between = UnitFacts(
        name="attention block between",
        count=shape.layers,
        parameters=4 * h * h + 4 * h + 2 * h,
        plain_parameters=3 * h,
        forward_flops=4.0 * h * h * (inner + outer) + 4.0 * h * inner * outer,
        saved_split_bytes=4.0 * h * (inner + outer) + 4.0 * shape.heads * outer,
        saved_plain_bytes=5.0 * h * outer,  # norm's input and output, dropout's mask
        input_bytes=2.0 * h * outer,
        working_bytes=2.0 * h * (inner + outer),
    )
    units = (*encoder.units[:2], replace(decoder.units[1], name="decoder block"), between)
    return replace(
        encoder,
        units=(*units, decoder.units[2]),
        trainable=sum(unit.count * unit.parameters for unit in (*units, decoder.units[2])),
    )
