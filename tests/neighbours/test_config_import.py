"""`shoal config import`: a DeepSpeed file becomes the run.toml that one would write by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import ConfigError
from shoal.cli.config_import import import_, translate_settings
from shoal.cli.plan_subject import resolve_subject
from shoal.config.load import load_config
from shoal.config.resolve import make_plan
from shoal.forecast.search.layout_search import search_layouts
from shoal.forecast.search.plan_document import plan_record
from shoal.neighbours.configs.deepspeed_config import read
from shoal.neighbours.configs.written_config import NARROW_BLOCKS

ADAM = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}
ADAM_TOML = 'name = "adamw"\nlr = 3e-4\nbetas = [0.9, 0.95]\nweight_decay = 0.1\n'
OWN = 'schedule = "constant"\nwarmup_steps = 0\n'

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": (
        {"train_batch_size": 64, "gradient_clipping": 0.5},
        f'[train]\nbatch = 64\nmicro_batch = 8\n[layout]\nstrategy = "ddp"\n'
        f'[precision]\ncompute = "fp32"\n[optimizer]\nclip = 0.5\n{OWN}',
    ),
    "accumulated": (
        {"train_batch_size": 64, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}},
        f'[train]\nbatch = 64\nmicro_batch = 2\n[layout]\nstrategy = "ddp"\n'
        f'[precision]\ncompute = "bf16"\nresidual = "bf16"\n[optimizer]\n{OWN}',
    ),
    "zero1": (
        {"train_micro_batch_size_per_gpu": 2, "zero_optimization": True, "optimizer": ADAM,
         "bf16": {"enabled": True}},
        f'[train]\nbatch = 16\nmicro_batch = 2\n[layout]\nstrategy = "zero1"\n'
        f'[precision]\ncompute = "bf16"\nresidual = "bf16"\n[optimizer]\n{ADAM_TOML}{OWN}',
    ),
    "zero2 in buckets": (
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "optimizer": ADAM,
         "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8,
                               "contiguous_gradients": True, "allgather_bucket_size": 2e8},
         "bf16": {"enabled": "true"}, "communication_data_type": "fp32"},
        f'[train]\nbatch = 32\nmicro_batch = 1\n[layout]\nstrategy = "zero2"\n'
        f'[precision]\ncompute = "bf16"\nresidual = "bf16"\nreduce = "fp32"\n[optimizer]\n{ADAM_TOML}{OWN}',
    ),
    "zero2 with its optimizer on the host": (
        {"train_batch_size": 32, "gradient_accumulation_steps": 4,
         "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
         "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
         "fp16": {"enabled": True}},
        f'[train]\nbatch = 32\nmicro_batch = 1\n[layout]\nstrategy = "zero2"\n'
        f'[precision]\ncompute = "fp16"\n[memory]\noffload = "optimizer"\n'
        f'[optimizer]\nlr = 1e-4\nbetas = [0.9, 0.999]\nweight_decay = 0\n{OWN}',
    ),
    "zero3": (
        {"train_batch_size": 16, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True},
         "optimizer": {"type": "Adam", "params": {"lr": 2e-5}}},
        f'[train]\nbatch = 16\nmicro_batch = 2\n[layout]\nstrategy = "fsdp"\n'
        f'[precision]\ncompute = "bf16"\nresidual = "bf16"\n[optimizer]\nlr = 2e-5\nbetas = [0.9, 0.999]\n'
        f"weight_decay = 0\n{OWN}",
    ),
    "zero3 on the host": (
        {"train_batch_size": 16, "bfloat16": {"enabled": True}, "optimizer": ADAM,
         "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},
                               "offload_param": {"device": "cpu"}, "sub_group_size": 1e9}},
        f'[train]\nbatch = 16\nmicro_batch = 2\n[layout]\nstrategy = "fsdp"\n'
        f'[precision]\ncompute = "bf16"\nresidual = "bf16"\n[memory]\noffload = "parameters"\n'
        f"[optimizer]\n{ADAM_TOML}{OWN}",
    ),
    "a warm-up": (
        {"train_batch_size": 32, "zero_optimization": {"stage": 1}, "optimizer": ADAM,
         "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}},
        f'[train]\nbatch = 32\nmicro_batch = 4\n[layout]\nstrategy = "zero1"\n'
        f'[precision]\ncompute = "fp32"\n[optimizer]\n{ADAM_TOML}schedule = "constant"\n'
        f"warmup_steps = 100\n",
    ),
    "a warm-up and a fall": (
        {"train_batch_size": 32, "optimizer": ADAM,
         "scheduler": {"type": "WarmupDecayLR",
                       "params": {"total_num_steps": 900, "warmup_num_steps": 90,
                                  "warmup_max_lr": 3e-4}}},
        f'[train]\nsteps = 900\nbatch = 32\nmicro_batch = 4\n[layout]\nstrategy = "ddp"\n'
        f'[precision]\ncompute = "fp32"\n[optimizer]\n{ADAM_TOML}schedule = "linear"\n'
        f"warmup_steps = 90\n",
    ),
    "a cosine": (
        {"train_batch_size": 32, "optimizer": ADAM, "tensorboard": {"enabled": True},
         "scheduler": {"type": "WarmupCosineLR",
                       "params": {"total_num_steps": 900, "warmup_num_steps": 90}}},
        f'[train]\nsteps = 900\nbatch = 32\nmicro_batch = 4\non = ["shoal.sinks:TensorBoard"]\n'
        f'[layout]\nstrategy = "ddp"\n[precision]\ncompute = "fp32"\n[optimizer]\n{ADAM_TOML}'
        f'schedule = "cosine"\nwarmup_steps = 90\n',
    ),
    "sgd": (
        {"train_batch_size": 32, "fp16": {"enabled": True, "loss_scale": 1024},
         "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
        f'[train]\nbatch = 32\nmicro_batch = 4\n[layout]\nstrategy = "ddp"\n'
        f'[precision]\ncompute = "fp16"\nloss_scale = 1024\n[optimizer]\nname = "sgd"\nlr = 0.1\n'
        f"momentum = 0.9\nweight_decay = 0\nbetas = [0.9, 0.999]\n{OWN}",
    ),
    "auto, as a trainer would have it": (
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2,
         "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
         "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": "auto", "eps": "auto",
                                                   "weight_decay": "auto"}},
         "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto",
                               "stage3_param_persistence_threshold": "auto"},
         "bf16": {"enabled": True}, "steps_per_print": 100},
        f'[train]\nbatch = 16\nmicro_batch = 2\n[layout]\nstrategy = "fsdp"\n'
        f'[precision]\ncompute = "bf16"\nresidual = "bf16"\n[optimizer]\nlr = 5e-5\nbetas = [0.9, 0.999]\n'
        f"weight_decay = 0\nclip = 1.0\n{OWN}",
    ),
}  # fmt: skip


def planned(path: Path) -> dict[str, Any]:
    """What `shoal plan PATH model.name=llama-2-7b --on 8xA100-80GB --json` shows."""
    loaded = load_config(path, ["model.name=llama-2-7b", "data.sequence=2048"])
    subject = resolve_subject(loaded, "8xA100-80GB")
    return plan_record(search_layouts(subject.case, subject.space), subject.space, top=5, notes=[])


@pytest.mark.parametrize("name", CASES)
def test_the_same_plan_as_by_hand(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, text = CASES[name]
    source, out, hand = (tmp_path / one for one in ("ds_config.json", "run.toml", "hand.toml"))
    source.write_text(json.dumps(config))
    hand.write_text(f"{text}[launch]\nprocesses = 8\n")
    import_(str(source), 8, "0.19.8", out, as_json=False)
    assert load_config(out).config == load_config(hand).config
    assert make_plan(load_config(out).config) == make_plan(load_config(hand).config)
    assert planned(out) == planned(hand)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(("kept ", "left "))
    assert lines[-1].startswith(f"next: shoal plan {out}")
    assert out.read_text().startswith("# written by shoal config import\n")


def test_plans_tell_these_files_apart(tmp_path: Path) -> None:
    """A plan that ignored the file would be the same for all of them."""
    found = set()
    for config, _ in CASES.values():
        source, out = tmp_path / "ds_config.json", tmp_path / "run.toml"
        source.write_text(json.dumps(config))
        out.unlink(missing_ok=True)
        import_(str(source), 8, "0.19.8", out, as_json=False)
        record = planned(out)
        found.add(json.dumps(record, sort_keys=True, default=str))
    assert len(found) >= 8


def test_what_differs_is_said() -> None:
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1, "eps": 1e-6}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}},
        "fp16": {"enabled": True, "hysteresis": 4},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
        "activation_checkpointing": {"cpu_checkpointing": True},
        "dataloader_drop_last": True,
    }
    values, differs = translate_settings(read(config, data_parallel=1), 1)
    assert values["layout.strategy"] == "single"
    assert (values["memory.offload"], values["memory.offload_to"]) == ("parameters", "files")
    assert (values["optimizer.schedule"], values["train.steps"]) == ("one-cycle", 4000)
    for words in ("one process splits nothing", "fp16.hysteresis: a run finds", "the optimizer's",
                  "matrices only", "eps = 1e-06", "OneCycle", "memory.recompute=full",
                  "an epoch's last step"):  # fmt: skip
        assert any(words in line for line in differs), words
    assert NARROW_BLOCKS not in differs, "products in fp16 have fp32 residuals"
    config |= {"fp16": {}, "bf16": {"enabled": True}}
    assert NARROW_BLOCKS in translate_settings(read(config, data_parallel=1), 1)[1]


@pytest.mark.parametrize(
    ("config", "era", "line"),
    [
        (
            {},
            "",
            "0.0 (none) before 0.19.3, and 1.0 from it on; try: the key in the file, or --era",
        ),
        ({}, "0.19", "try: 0.19.3"),
        ({"scheduler": {"type": "LRRangeTest", "params": {}}}, "0.19.8", "try: shoal find lr"),
        ({"scheduler": {"type": "StepLR", "params": {}}}, "0.19.8", "try: optimizer.schedule="),
        ({"optimizer": {"type": "RMSprop"}}, "0.19.8", "optimizer.params.lr"),
        ({"elasticity": {"enabled": True}}, "0.19.7", "elasticity = "),
        ({"elasticity": {"enabled": False}}, "0.19.8", "DeepSpeed 0.19.8 took it away"),
        ({"train_batch_size": 9}, "0.19.8", "try: train_batch_size"),
    ],
)
def test_what_is_refused_writes_nothing(
    config: dict[str, Any], era: str, line: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "ds_config.json", tmp_path / "run.toml"
    source.write_text(json.dumps({"train_batch_size": 8, **config}))
    with pytest.raises(ConfigError) as failure:
        import_(str(source), 2, era, out, as_json=False)
    assert line in str(failure.value)
    assert failure.value.exit_code == 2
    assert not out.exists()


def test_nothing_of_the_users_is_replaced(tmp_path: Path) -> None:
    source, out = tmp_path / "ds_config.json", tmp_path / "run.toml"
    source.write_text('{"train_batch_size": 8}')
    out.write_text("[train]\n")
    with pytest.raises(ConfigError, match="exists"):
        import_(str(source), 2, "0.19.8", out, as_json=False)
    with pytest.raises(ConfigError, match="no folder"):
        import_(str(source), 2, "0.19.8", tmp_path / "none" / "run.toml", as_json=False)
    assert out.read_text() == "[train]\n"
