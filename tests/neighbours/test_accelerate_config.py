"""Accelerate's configuration file: every key that its code knows, and the run.toml that comes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import ConfigError
from shoal.cli.config_import import import_
from shoal.config.load import load_config
from shoal.neighbours.configs.accelerate_config import BLOCK_OF, AccelerateSettings, read
from shoal.neighbours.configs.written_config import NARROW_BLOCKS, KeyRow, read_table

KNOWN = json.loads((Path(__file__).parent / "accelerate_documented.json").read_text())
TABLE: dict[str, KeyRow] = read_table("accelerate_keys")
ASKED_ALONE = {  # by `accelerate config`, or by the environment, under names of their own
    "mpirun_config.mpirun_ccl",
    "fp8_config.fp8_amax_history_length",
    "fp8_config.fp8_amax_compute_algorithm",
    "fp8_config.fp8_optimization_level",
    "fsdp_config.fsdp_ignored_modules",
}
CHANGED: dict[str, Any] = {
    "distributed_type": "MULTI_CPU",
    "num_processes": 4,
    "num_machines": 2,
    "mixed_precision": "bf16",
    "dynamo_config.dynamo_backend": "INDUCTOR",
    "fsdp_config.fsdp_sharding_strategy": "HYBRID_SHARD",
    "fsdp_config.fsdp_reshard_after_forward": False,
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "Block,Layer",
    "deepspeed_config.zero_stage": 3,
    "deepspeed_config.offload_optimizer_device": "cpu",
    "deepspeed_config.gradient_clipping": 0.5,
    "megatron_lm_config.megatron_lm_gradient_clipping": 0.5,
    "megatron_lm_config.megatron_lm_recompute_granularity": "full",
    "megatron_lm_config.megatron_lm_sequence_parallelism": True,
    "parallelism_config.parallelism_config_cp_comm_strategy": "alltoall",
}
BASE: dict[str, Any] = {"distributed_type": "NO", "num_processes": 8}


def with_key(path: str, value: Any) -> dict[str, Any]:
    """A file in which a key counts: its block's own `distributed_type` stands beside it."""
    config = json.loads(json.dumps(BASE))
    block, _, name = path.rpartition(".")
    config["distributed_type"] = BLOCK_OF.get(block or path, "MULTI_GPU")
    if path.startswith("parallelism_config"):
        config["num_processes"] = 1
    if path.endswith("_cp_comm_strategy"):
        config |= {"num_processes": 8, block: {"parallelism_config_cp_size": 8}}
    if path.endswith("lm_sequence_parallelism"):
        config[block] = {"megatron_lm_tp_degree": 2}
    if path.endswith("offload_param_device"):
        config[block] = {"zero_stage": 3}
    (config.setdefault(block, {}) if block else config)[name] = value
    return config


def imported(tmp_path: Path, config: dict[str, Any]) -> AccelerateSettings:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return read(path)


def by_fate(fate: str) -> list[str]:
    return [path for path, key in TABLE.items() if key.fate == fate]


def test_every_key_of_accelerates_own_stands_in_the_table_and_no_other() -> None:
    assert len(KNOWN["keys"]) > 100
    assert set(TABLE) == set(KNOWN["keys"]) | ASKED_ALONE
    assert not ASKED_ALONE & set(KNOWN["keys"])


@pytest.mark.proof
def test_these_are_the_keys_of_the_accelerate_that_is_installed() -> None:
    accelerate = pytest.importorskip("accelerate")
    assert accelerate.__version__ == KNOWN["accelerate"]
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("keys_of", Path(__file__).with_name("accelerate_keys_of.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.keys() == KNOWN["keys"]


@pytest.mark.parametrize("path", by_fate("honoured"))
def test_honoured_keys_change_what_is_written(path: str, tmp_path: Path) -> None:
    key = TABLE[path]
    if any(one.startswith(f"{path}.") for one in TABLE):
        return  # a block: its keys are rows of their own
    if path.endswith("deepspeed_config_file"):
        assert imported(tmp_path, with_key(path, "ds.json")).ds_file == "ds.json"
        return
    two = {"i": 2, "i1": 2, "b": True, "n": 2.0}
    value = CHANGED.get(path, two.get(key.kind, "cpu"))
    config = with_key(path, value)
    if path.endswith(("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")):
        config["num_processes"] = 2
    if path == "distributed_type":
        config["distributed_type"] = value
    without = json.loads(json.dumps(config))
    block, _, name = path.rpartition(".")
    (without[block] if block else without).pop(name)
    if path in ("distributed_type", "num_processes"):
        without |= {path: BASE[path]}
    if "num_processes" in config and config["num_processes"] == 2:
        without["num_processes"] = 1
    after, before = imported(tmp_path, config), imported(tmp_path, without)
    assert after.values != before.values
    assert any(one.path == path and one.fate == "honoured" for one in after.verdicts)


@pytest.mark.parametrize("path", by_fate("told"))
def test_told_keys_change_nothing_and_are_told(path: str, tmp_path: Path) -> None:
    if any(one.startswith(f"{path}.") for one in TABLE):
        return
    config = with_key(path, 7)
    after = imported(tmp_path, config)
    block, _, name = path.rpartition(".")
    (config[block] if block else config).pop(name)
    assert after.values == imported(tmp_path, config).values
    assert any(path in line and TABLE[path].words in line for line in after.told)


@pytest.mark.parametrize("path", by_fate("refused"))
def test_refused_keys_raise_with_the_nearest_unless_harmless(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as failure:
        imported(tmp_path, with_key(path, "other"))
    assert f"try: {TABLE[path].words}" in str(failure.value)
    for one in TABLE[path].values:
        imported(tmp_path, with_key(path, json.loads(one)))


WRITTEN = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: {kind}
downcast_bf16: 'no'
{block}
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
use_cpu: false
"""
HAND = '[launch]\nprocesses = {ranks}\n[precision]\ncompute = "bf16"\n'
CASES: dict[str, tuple[str, str, str]] = {
    "ddp": ("MULTI_GPU", "", '[layout]\nstrategy = "ddp"\n'),
    "fsdp": (
        "FSDP",
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_activation_checkpointing: true\n"
        "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n",
        '[layout]\nstrategy = "fsdp"\nblocks = ["LlamaDecoderLayer"]\n[fsdp]\nreshard = "no"\n'
        '[memory]\nrecompute = "full"\n',
    ),
    "fsdp of version 1, without its prefix": (
        "FSDP",
        "fsdp_config:\n  sharding_strategy: 2\n  offload_params: true\n",
        '[layout]\nstrategy = "fsdp"\n[fsdp]\nreshard = "no"\n[memory]\noffload = "parameters"\n',
    ),
    "a mesh": (
        "FSDP",
        "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
        "  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2\n",
        "[layout]\ndp_replicate = 2\ndp_shard = 2\ntp = 2\nzero = 3\n",
    ),
    "zero3 with both on the host": (
        "DEEPSPEED",
        "deepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: cpu\n"
        "  offload_param_device: cpu\n  gradient_accumulation_steps: 4\n  zero3_init_flag: true\n",
        '[layout]\nstrategy = "fsdp"\n[memory]\noffload = "parameters"\noffload_to = "host"\n'
        "[train]\naccumulate = 4\n[optimizer]\nclip = 1.0\n",
    ),
    "megatron": (
        "MEGATRON_LM",
        "megatron_lm_config:\n  megatron_lm_tp_degree: 2\n  megatron_lm_pp_degree: 2\n"
        "  megatron_lm_num_micro_batches: 4\n  megatron_lm_sequence_parallelism: true\n"
        "  megatron_lm_recompute_activations: true\n  megatron_lm_gradient_clipping: 0.5\n"
        "  megatron_lm_use_distributed_optimizer: true\n",
        '[layout]\ntp = 2\npp = 2\ndp_shard = 2\nzero = 1\nsequence_parallel = "on"\n'
        '[train]\naccumulate = 4\n[memory]\nrecompute = "selective"\n[optimizer]\nclip = 0.5\n',
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_run_as_by_hand(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("yaml")
    kind, block, text = CASES[name]
    source, out, hand = (tmp_path / one for one in ("default_config.yaml", "run.toml", "hand.toml"))
    source.write_text(WRITTEN.format(kind=kind, block=block))
    narrow = "" if kind == "MULTI_GPU" else 'residual = "bf16"\n'
    hand.write_text(HAND.format(ranks=8) + narrow + text)
    import_(str(source), 0, "", out, as_json=False)
    assert load_config(out).config == load_config(hand).config
    lines = capsys.readouterr().out.splitlines()
    assert (f"differs  {NARROW_BLOCKS}" in lines) == bool(narrow)
    assert lines[0].startswith('kept     distributed_type = "')
    assert lines[-1].startswith(f"next: shoal plan {out}")
    assert any(line.startswith("no batch, optimizer or data is in the file") for line in lines)


def test_a_file_of_deepspeeds_inside_says_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside, source, out = (tmp_path / one for one in ("ds.json", "config.json", "run.toml"))
    inside.write_text('{"train_batch_size": 32, "bf16": {"enabled": true}, "gradient_clipping": 1}')
    block: dict[str, Any] = {"deepspeed_config_file": str(inside)}
    config = {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": block}
    source.write_text(json.dumps(config))
    import_(str(source), 0, "", out, as_json=False)
    found = load_config(out).config
    assert (found.train.batch, found.precision.compute) == (32, "bf16")
    assert found.precision.residual == "bf16"
    assert (found.launch.processes, found.layout.strategy) == (4, "ddp")
    assert "kept     train_batch_size = 32" in capsys.readouterr().out
    block["zero_stage"] = 3
    source.write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match="zero_stage: deepspeed_config.deepspeed_config_file says"
    ):
        read(source)


def test_several_machines_and_other_forms_of_old(tmp_path: Path) -> None:
    config = {**BASE, "distributed_type": "MULTI_GPU", "num_machines": 2, "fp16": True}
    found = imported(tmp_path, {**config, "dynamo_backend": "INDUCTOR"}).values
    assert (found["launch.processes"], found["launch.nodes"]) == (4, 2)
    assert (found["precision.compute"], found["train.compile"]) == ("fp16", "blocks")
    unread = imported(tmp_path, {**config, "fsdp_config": {"fsdp_offload_params": True}})
    assert "memory.offload" not in unread.values
    assert any("distributed_type is MULTI_GPU, not FSDP" in line for line in unread.told)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("distributed_type: FSPD\nnum_processes: 2", "try: FSDP"),
        ("distributed_type: NO\nnum_process: 2", "num_process: no such key; try: num_processes"),
        ("distributed_type: MULTI_GPU", "num_processes is not said"),
        ("distributed_type: MULTI_GPU\nnum_processes: -1", "num_processes = -1: a whole number"),
        ("distributed_type: NO\nmixed_precision: fp8", "mixed_precision = fp8"),
        ("distributed_type: NO\ndebug: no\ndebug: yes", "debug: stands twice; try"),
        ("distributed_type: XLA\nnum_processes: 8", "distributed_type = XLA"),
        ("distributed_type: NO\ngradient_accumulation_steps: 2",
         "no such key; try: deepspeed_config.gradient_accumulation_steps"),
        ("distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2", "num_machines = 2"),
        ("distributed_type: FSDP\nnum_processes: 8\n"
         "parallelism_config: {parallelism_config_tp_size: 2}", "try: num_processes = 2"),
        ("distributed_type: NO\ndynamo_config: {dynamo_backend: TENSORRT}", "try: INDUCTOR"),
        ("- a list", "a table of keys is wanted"),
        ("a: [", "while parsing"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line_and_writes_nothing(
    text: str, line: str, tmp_path: Path
) -> None:
    pytest.importorskip("yaml")
    source, out = tmp_path / "default_config.yaml", tmp_path / "run.toml"
    source.write_text(text)
    with pytest.raises(ConfigError) as failure:
        import_(str(source), 0, "", out, as_json=False)
    assert line in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not out.exists()


def test_without_yamls_package_json_is_read_and_yaml_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    assert imported(tmp_path, BASE).ranks == 1
    path = tmp_path / "default_config.yaml"
    path.write_text("distributed_type: 'NO'\n")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        read(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[neighbours\]'"):
        read(path)
