"""Draws configurations, and holds what Shoal reads of them against DeepSpeed's own reader.

    python tests/neighbours/beside_deepspeed.py [--seed 1] [--draws 10000]

A program by hand: it needs an importable `deepspeed`, which is no dependency. No process group is
made; the number of ranks is drawn, too. Exit status 1 where both accept a configuration and a value
differs, or where Shoal fails with anything but its one line.

Beside 0.19.8, seeds 2 and 3: of 20,000 drawn, both refuse 11,386 and read the same 18 values from
5,281. Shoal refuses 2,868 that DeepSpeed takes: 980 for a key that DeepSpeed ignores, 1,723 for what
is not here, 114 for fp16 as the format in which gradients travel, 51 for values that would never
matter or never end, as a hysteresis of 0. It takes 465 that DeepSpeed does not: "auto" and texts of
numbers outside of its typed blocks, a norm that is not computed at a stage that needs it.
"""

from __future__ import annotations

import argparse
import collections
import copy
import logging
import os
import random
import sys
from typing import Any

from shoal.base.errors import ConfigError
from shoal.neighbours.configs.deepspeed_config import DeepSpeedSettings, read

ON_OR_OFF = [True, False]
ZERO: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3, "2", "auto", 4, 1.0],
    "offload_optimizer": [{"device": "cpu"}, {"device": "nvme"}, {"device": "none"}, {}, None,
                          {"device": "gpu"}, {"device": "auto"}, {"device": "cpu", "ratio": 0.5},
                          {"device": "cpu", "ratio": 1.0, "pin_memory": True}],
    "offload_param": [{"device": "cpu"}, {"device": "nvme"}, {}, {"buffer_count": 3}],
    "cpu_offload": ON_OR_OFF, "cpu_offload_param": ON_OR_OFF, "overlap_comm": [True, "auto"],
    "reduce_bucket_size": [5e8, "auto", 100], "stage3_prefetch_bucket_size": ["auto", 5],
    "zero_hpz_partition_size": [1, 2], "zero_quantized_weights": ON_OR_OFF, "zenflow": [None],
    "contiguous_gradients": [True], "reduce_scater": [True], "mics_shard_size": [-1],
    "grad_hooks": [True], "compute_grad_norm": ON_OR_OFF, "sub_group_size": [1e9],
    "leaf_module": [{"classes": ["a"]}],
}  # fmt: skip
HALF: dict[str, list[Any]] = {
    "enabled": [True, True, False, "auto", "true", 1], "loss_scale": [0, 128, "64", True, -1, "inf"],
    "initial_scale_power": [16, 8, 0, "12"], "loss_scale_window": [1000, 0, 10, "5", -3],
    "hysteresis": [2, 1, 3, 0], "min_loss_scale": [1, 0, 2, -1], "auto_cast": ON_OR_OFF,
    "consecutive_hysteresis": ON_OR_OFF, "fp16_master_weights_and_grads": [False], "typo": [1],
}  # fmt: skip
BRAIN: dict[str, list[Any]] = {
    "enabled": [True, False, "auto"], "check_grad_overflow": ON_OR_OFF, "loss_scale": [1],
    "immediate_grad_update": ON_OR_OFF, "bf16_master_weights_and_grads": ON_OR_OFF,
}  # fmt: skip
TOP: dict[str, list[Any]] = {
    "train_batch_size": [0, 1, 7, 8, 16, 24, 32, 64, "8", "auto", 8.0, -4, None],
    "train_micro_batch_size_per_gpu": [1, 2, 3, 4, 8, "auto", "4", None, 0],
    "gradient_accumulation_steps": [1, 2, 3, 4, 8, "auto", None, 0],
    "gradient_clipping": [0, 0.0, 1, 0.5], "steps_per_print": [None, 1, 10, 2000],
    "communication_data_type": [None, "fp32", "bf16", "FP32", "fp16", "fp8", "auto"],
    "wall_clock_breakdown": ON_OR_OFF, "dataloader_drop_last": ON_OR_OFF,
    "prescale_gradients": ON_OR_OFF, "gradient_predivide_factor": [1.0, 2.0],
    "gradient_allreduce_op": ["mean", "sum", "max"], "zero_optimization": [True, False, ZERO, ZERO],
    "fp16": [HALF], "bf16": [BRAIN], "bfloat16": [BRAIN], "managed_gradient_accumulation": ON_OR_OFF,
    "sparse_gradients": ON_OR_OFF, "elasticity": [{"enabled": False}], "gradient_cliping": [1],
    "data_types": [{"grad_accum_dtype": "fp32"}, {}, {"grad_accum_dtype": "bf16"}],
    "compile": [{"deepcompile": False}, {"deepcompile": True}], "comms_logger": [{"enabled": False}],
    "tensor_parallel": [{"autotp_size": 0}, {"autotp_size": 1}, {"autotp_size": 2}],
    "checkpoint": [{"tag_validation": "Warn"}, {"use_node_local_storage": False}],
    "activation_checkpointing": [{"partition_activations": True}, {"profile": False}],
}  # fmt: skip


def draw(draws: random.Random, pool: dict[str, list[Any]], least: int, most: int) -> dict[str, Any]:
    """Some keys of a pool, with a value each; a value that is a pool is drawn from, too."""
    names = draws.sample(sorted(pool), draws.randint(least, most))
    found = {name: copy.deepcopy(draws.choice(pool[name])) for name in names}
    pools = (ZERO, HALF, BRAIN)
    return {name: draw(draws, v, 0, 3) if v in pools else v for name, v in found.items()}


def values_of_theirs(config: Any) -> dict[str, Any]:
    zero, half, kind = config.zero_config, config.float16_config, config.communication_data_type
    devices = [
        one.device if one else "none" for one in (zero.offload_optimizer, zero.offload_param)
    ]
    devices = [getattr(device, "value", device) for device in devices]
    names = {"None": "", "torch.float32": "fp32", "torch.bfloat16": "bf16"}
    cut = half.enabled and zero.stage > 0  # at stage 0 its optimizer has neither
    return {
        "batch": config.train_batch_size,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "accumulate": config.gradient_accumulation_steps,
        "stage": int(zero.stage),
        "offload_optimizer": devices[0] != "none" and zero.stage > 0,
        "offload_parameters": devices[1] != "none" and zero.stage == 3,
        "clip": config.gradient_clipping,
        "compute": "fp16" if half.enabled else "bf16" if config.bfloat16_config.enabled else "fp32",
        "reduce": names.get(str(kind), str(kind)),
        "steps_per_print": config.steps_per_print or 0,
        "wall_clock_breakdown": config.wall_clock_breakdown,
        "drop_last": config.dataloader_drop_last,
        "loss_scale": (half.loss_scale, 2.0**half.initial_scale_power, half.loss_scale_window,
                       half.min_loss_scale),
        "hysteresis": (half.hysteresis, half.consecutive_hysteresis) if cut else None,
    }  # fmt: skip


def values_of_ours(found: DeepSpeedSettings) -> dict[str, Any]:
    scale = found.loss_scale
    cut = found.compute == "fp16" and found.stage > 0
    mine = vars(found)
    return {
        **{name: mine[name] for name in ("batch", "micro_batch", "accumulate", "stage", "clip",
           "offload_optimizer", "offload_parameters", "compute", "reduce", "steps_per_print",
           "wall_clock_breakdown", "drop_last")},
        "loss_scale": (scale.fixed, scale.initial, scale.window, scale.least),
        "hysteresis": (scale.hysteresis, scale.consecutive_hysteresis) if cut else None,
    }  # fmt: skip


def compare(theirs: Any, config: dict[str, Any], ranks: int) -> tuple[str, str]:
    """One word on a configuration, and the reason; `theirs` is DeepSpeed's module."""
    theirs.dist.get_rank = lambda *_, **__: 0
    theirs.dist.get_world_size = lambda *_, **__: ranks
    why, wanted, found = "", None, None
    try:
        wanted = theirs.DeepSpeedConfig(copy.deepcopy(config))
    except Exception as failure:
        why = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
    try:
        found = read(copy.deepcopy(config), data_parallel=ranks, era="0.19.8")
    except ConfigError as failure:
        return ("both refuse", "") if wanted is None else ("Shoal refuses", str(failure))
    except Exception as failure:
        return "FAILS", repr(failure)
    if wanted is None:
        return "DeepSpeed refuses", why
    theirs_say, ours = values_of_theirs(wanted), values_of_ours(found)
    other = [name for name in ours if ours[name] != theirs_say[name]]
    told = ", ".join(f"{name}: {theirs_say[name]} read as {ours[name]}" for name in other)
    return ("DIFFERS", told) if other else ("same", "")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--draws", type=int, default=10_000)
    asked = words.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import config as theirs
    from deepspeed.utils import logger

    logger.setLevel(logging.CRITICAL)
    draws, counts = random.Random(asked.seed), collections.Counter[str]()
    examples: dict[str, tuple[dict[str, Any], int, str]] = {}
    for _ in range(asked.draws):
        config, ranks = draw(draws, TOP, 1, 5), draws.choice([1, 2, 4, 8])
        if draws.random() < 0.75:
            config.setdefault("train_batch_size", draws.choice([8, 16, 32, 64]))
        word, why = compare(theirs, config, ranks)
        kind = why.split("try: ")[0].split(": ", 2)[-1][:40] if word.endswith("refuses") else ""
        counts[f"{word}: {kind}" if kind else word] += 1
        examples.setdefault(word, (config, ranks, why))
    for word, count in counts.most_common():
        print(f"{count:6} {word}")
    for word, (config, ranks, why) in examples.items():
        print(f"{word}: {config} on {ranks}: {why}")
    sys.exit(1 if counts["DIFFERS"] or counts["FAILS"] else 0)


if __name__ == "__main__":
    main()
