"""Every key that DeepSpeed documents stands in the table, and every key of the table does as it says.

`deepspeed_documented.json` is the bare list of names on DeepSpeed's page of its configuration, with
the page's address and commit; names inside of what stands in the table as one word (compression's
blocks, arguments of optimizers) by their whole path.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import ConfigError
from shoal.neighbours.configs.deepspeed_config import DeepSpeedSettings, read
from shoal.neighbours.configs.written_config import KeyRow, parse_version, read_table


def keys() -> dict[str, KeyRow]:
    return read_table("deepspeed_keys")


PAGE = json.loads((Path(__file__).parent / "deepspeed_documented.json").read_text())
BASE = {
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
    "fp16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {}},
}
HONOURED: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD"},
    "optimizer.type": "SGD",
    "optimizer.params": {"lr": 0.5},
    "scheduler": {"type": "WarmupLR"},
    "scheduler.type": "WarmupLR",
    "scheduler.params": {"warmup_num_steps": 4},
    "gradient_clipping": 0.5,
    "communication_data_type": "fp32",
    "steps_per_print": 10,
    "wall_clock_breakdown": True,
    "dataloader_drop_last": True,
    "fp16": {"enabled": False},
    "fp16.enabled": False,
    "fp16.loss_scale": 128,
    "fp16.initial_scale_power": 8,
    "fp16.loss_scale_window": 10,
    "fp16.hysteresis": 3,
    "fp16.min_loss_scale": 4,
    "fp16.consecutive_hysteresis": True,
    "bf16": {"enabled": True},
    "bf16.enabled": True,
    **{
        f"{name}{key}": value
        for name in ("tensorboard", "csv_monitor")
        for key, value in {
            "": {"enabled": True},
            ".enabled": True,
            ".output_path": "out",
            ".job_name": "one",
        }.items()
    },
    "wandb": {"enabled": True},
    "wandb.enabled": True,
    "wandb.group": "g",
    "wandb.team": "t",
    "wandb.project": "p",
    "zero_optimization": {"stage": 1},
    "zero_optimization.stage": 2,
    "zero_optimization.cpu_offload": True,
    "zero_optimization.offload_optimizer": {"device": "cpu"},
    "zero_optimization.offload_optimizer.device": "nvme",
    "zero_optimization.cpu_offload_param": True,
    "zero_optimization.offload_param": {"device": "cpu"},
    "zero_optimization.offload_param.device": "nvme",
}
ARGUMENTS = {"total_num_steps": 20, "cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
OTHER = {"warmup_type": "linear", "betas": [0.8, 0.9], "torch_adam": True, "cycle_momentum": False,
         "adam_w_mode": False, "lr_range_test_staircase": True}  # fmt: skip


def with_key(path: str, value: Any, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """A copy of a configuration with one more key."""
    found = json.loads(json.dumps(BASE if config is None else config))
    at = found
    *blocks, name = path.split(".")
    for block in blocks:
        at = at.setdefault(block, {})
    at[name] = value
    return found


def read_with(path: str, value: Any, era: str = "", **more: Any) -> DeepSpeedSettings:
    return read(with_key(path, value, **more), data_parallel=1, era=era)


def bare(settings: DeepSpeedSettings) -> DeepSpeedSettings:
    """Without what was said."""
    return dataclasses.replace(settings, verdicts=(), told=())


def by_fate(*fates: str) -> list[str]:
    paths = (path for path, key in keys().items() if key.fate in fates)
    return sorted(path for path in paths if not path.startswith("args."))


def test_every_documented_key_stands_in_the_table() -> None:
    table = keys()
    assert len(PAGE["keys"]) > 300
    missing = []
    for path in PAGE["keys"]:
        if path.startswith(("optimizer.params.", "scheduler.params.")):
            continue  # below
        above = path
        while above and above not in table:
            above = above.rpartition(".")[0]
        opaque = above and not any(one.startswith(f"{above}.") for one in table)
        whole = above in table and (above == path or opaque or "off" in table[above].values)
        if not whole:
            missing.append(path)
    assert not missing


def test_every_documented_argument_is_read_or_of_a_refused_class() -> None:
    """Arguments of the one-bit optimizers and of Muon go with their classes."""
    refused = {"adam_lr", "muon_lr", "ns_method", "freeze_step", "cuda_aware", "comm_backend_name",
               "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper",
               "max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "momentum",
               "factor_threshold"}  # fmt: skip
    names = {path.rpartition(".")[2] for path in PAGE["keys"] if ".params." in path}
    ours = {path.rpartition(".")[2] for path in keys() if path.startswith("args.")}
    documented = {
        path.split(".")[2]
        for path in PAGE["keys"]
        if path.startswith(("optimizer.params.", "scheduler.params."))
    }
    assert documented <= names
    assert documented - refused <= ours
    for name in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon", "Lamb"):
        with pytest.raises(ConfigError, match="try: AdamW"):
            read_with("optimizer", {"type": name})


@pytest.mark.parametrize("path", by_fate("honoured"))
def test_honoured_keys_change_what_is_read(path: str) -> None:
    config: dict[str, Any] = dict(BASE)
    if path == "optimizer" or path.startswith("scheduler"):
        config.pop("optimizer")
    if path.startswith("scheduler.") and path != "scheduler.type":
        config["scheduler"] = {"type": "WarmupLR"}
    if path.startswith("bf16"):
        config.pop("fp16")
    before = read(config, data_parallel=1)
    after = read_with(path, HONOURED[path], config=config)
    assert bare(after) != bare(before)
    assert any(one.path == path and one.fate == "honoured" for one in after.verdicts)


@pytest.mark.parametrize("path", by_fate("told"))
def test_told_keys_tell_and_change_nothing(path: str) -> None:
    block = any(one.startswith(f"{path}.") for one in keys())
    after = read_with(path, {} if block else 7)
    expected = bare(read(BASE, data_parallel=1))
    if path.startswith("activation_checkpointing."):
        expected = dataclasses.replace(expected, recompute=(path.rpartition(".")[2],))
    assert bare(after) == expected
    assert any(one.path == path and one.fate == "told" for one in after.verdicts)
    if not block:
        assert any(path in line and keys()[path].words in line for line in after.told)


def outermost(path: str) -> str:
    return path.partition(".")[0]


@pytest.mark.parametrize("path", by_fate("refused", "0.19.7", "0.19.8"))
def test_refused_keys_raise_with_the_nearest_unless_harmless(path: str) -> None:
    table = keys()
    key, top = table[path], outermost(path)
    if path != top and "off" in table[top].values:  # a block's own keys are as the block
        switch = "deepcompile" if top == "compile" else "enabled"
        on = (
            2
            if (switch := "autotp_size" if top == "tensor_parallel" else switch) == "autotp_size"
            else True
        )
        config = with_key(f"{top}.{switch}", on)
        with pytest.raises(ConfigError, match="try: "):
            read(
                with_key(path, config.get(top, {}).get(path[len(top) + 1 :], 7), config),
                data_parallel=1,
            )
        off = read(with_key(path, 0 if path.endswith(switch) else 7), data_parallel=1)
        assert bare(off) == bare(read(BASE, data_parallel=1))
        return
    own = any(one.startswith(f"{path}.") for one in table) and "off" not in key.values
    value: Any = "other" if not own else 7
    if "off" in key.values:
        value = {"deepcompile": True, "enabled": True, "autotp_size": 2}
    with pytest.raises(ConfigError) as failure:
        read_with(path, value)
    assert key.words in str(failure.value)
    for harmless in key.values:
        off = {"enabled": False} if f"{path}.enabled" in table or path in ("amp", "nebula") else {}
        plain: Any = off if harmless == "off" else json.loads(harmless or "{}")
        if plain is None or plain == "auto":
            continue
        after = read_with(path, plain)
        assert bare(after) == bare(read(BASE, data_parallel=1))
        assert any(one.path == path and one.fate == "told" for one in after.verdicts)


@pytest.mark.parametrize("path", [one for one in by_fate("0.19.7", "0.19.8") if one.count(".") < 2])
def test_what_a_version_took_away_is_refused_from_it_on(path: str) -> None:
    key = keys()[path]
    top = outermost(path)
    plain = False if keys()[path].values[0] in ("off", "false", "") else json.loads(key.values[0])
    before = ".".join(map(str, (0, 19, parse_version(key.fate)[2] - 1)))
    read_with(path, plain, before)
    told = key.fate if top == path or top == "zero_optimization" else keys()[top].fate
    with pytest.raises(ConfigError, match=f"DeepSpeed {told} took it away"):
        read_with(path, plain, key.fate)


@pytest.mark.parametrize(
    "path", sorted(one for one in keys() if one.count(".") == 2 and one[:5] == "args.")
)
def test_arguments_of_optimizers_and_schedules(path: str) -> None:
    """A default that is written changes nothing, another value what is read; refused ones raise."""
    _, kind, name = path.split(".")
    key: KeyRow = keys()[path]
    block = "optimizer" if kind in ("Adam", "Lion") else "scheduler"
    needed = {
        one.rpartition(".")[2]: ARGUMENTS[one.rpartition(".")[2]]
        for one in keys()
        if one.startswith(f"args.{kind}.") and keys()[one].values == ("!",)
    }
    config = {"train_batch_size": 8, "gradient_clipping": 0}
    plain = with_key(block, {"type": kind, "params": needed}, config)
    before = read(plain, data_parallel=1)
    default = json.loads(key.values[0] or "null") if key.values != ("!",) else ARGUMENTS[name]
    if default is not None:
        same = read(with_key(f"{block}.params.{name}", default, plain), data_parallel=1)
        assert bare(same) == bare(before)
    other = OTHER.get(name, (ARGUMENTS.get(name) or 3) * 2)
    changed = with_key(f"{block}.params.{name}", other, plain)
    if key.fate == "refused":
        with pytest.raises(ConfigError, match=f"{name} = .*try: "):
            read(changed, data_parallel=1)
    elif key.fate == "told":
        assert bare(read(changed, data_parallel=1)) == bare(before)
    else:
        assert bare(read(changed, data_parallel=1)) != bare(before)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("gradient_cliping", "no such key; try: gradient_clipping"),
        ("zero_optimization.stagee", "no such key; try: stage"),
        ("zero_optimization.offload_optimizer.devise", "try: device"),
        ("activation_checkpointing.partitioned_activations", "try: partition_activations"),
        ("bf16.loss_scale", "try: fp16.loss_scale"),
        ("checkpoint.parallel_write.pipeline_stages", "try: pipeline_stage"),
        ("elasticity.max_gpu", "try: max_gpus"),
        ("args", "no such key"),
        ("optimizer.Adam", "no such key"),
        ("optimizer.params.weight_decai", "try: weight_decay"),
        ("something_else", "no such key, here or in DeepSpeed"),
    ],
)
def test_keys_that_nobody_knows(path: str, line: str) -> None:
    """DeepSpeed ignores a top-level one, and one of activation_checkpointing, without a word."""
    with pytest.raises(ConfigError) as failure:
        read_with(path, 7)
    assert line in str(failure.value)
    assert path in str(failure.value)


@pytest.mark.parametrize(
    ("path", "default", "asks"),
    [
        ("gradient_allreduce_op", "mean", "sum"),
        ("managed_gradient_accumulation", True, False),
        ("sequence_parallel_size", 1, 2),
        ("data_types.grad_accum_dtype", "fp32", "bf16"),
        ("fp16.fp16_master_weights_and_grads", False, True),
        ("bf16.bf16_master_weights_and_grads", False, True),
        ("bf16.bf16_optimizer_states", False, True),
        ("zero_optimization.zero_hpz_partition_size", 1, 2),
        ("zero_optimization.zero_quantized_weights", False, True),
        ("zero_optimization.zero_quantized_gradients", False, True),
        ("zero_optimization.zenflow", None, {"topk_ratio": 0.1}),
        ("zero_optimization.offload_optimizer.ratio", 1.0, 0.5),
        ("zero_optimization.offload_optimizer.super_offload", False, True),
        ("zero_optimization.mics_shard_size", -1, 4),
        ("checkpoint.use_node_local_storage", False, True),
        ("sparse_gradients", False, True),
        ("tensor_parallel", {"autotp_size": 1}, {"autotp_size": 4}),
        ("compile", {"deepcompile": False}, {"deepcompile": True}),
        ("torch_autocast", {"dtype": "bfloat16"}, {"enabled": True, "dtype": "bfloat16"}),
        ("amp", {"enabled": False, "opt_level": "O1"}, {"enabled": True}),
    ],
)
def test_defaults_of_deepspeed_are_harmless_and_no_other_value(
    path: str, default: Any, asks: Any
) -> None:
    """By DeepSpeed's own defaults, not by the table's: what a table gets wrong is seen here."""
    assert bare(read_with(path, default)) == bare(read(BASE, data_parallel=1))
    with pytest.raises(ConfigError, match="is not here; try: "):
        read_with(path, asks)
