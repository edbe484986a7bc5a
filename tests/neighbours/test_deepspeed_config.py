"""A DeepSpeed configuration read as it is meant: batches, precision, optimizer, "auto", eras.

Figures beside a case are DeepSpeed 0.19.8's own, from its source (runtime/config.py,
precision_config.py, zero/config.py) and from runs of it.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import ConfigError
from shoal.neighbours.configs.deepspeed_config import DeepSpeedSettings, LossScaleSettings, read
from shoal.neighbours.deepspeed_engine import DeepSpeedLossScale

BATCH = {"train_batch_size": 8, "gradient_clipping": 1.0}
PRINTED = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "fp16": {"enabled": True},
}


def read_one(config: dict[str, object], ranks: int = 1, **more: object) -> DeepSpeedSettings:
    return read({**BATCH, **config}, data_parallel=ranks, **more)  # type: ignore[arg-type]


def refused(config: object, ranks: int = 1, **more: object) -> str:
    with pytest.raises(ConfigError) as failure:
        read(config, data_parallel=ranks, **more)  # type: ignore[arg-type]
    assert "\n" not in str(failure.value)
    return str(failure.value)


def test_the_printed_one() -> None:
    found = read(PRINTED, data_parallel=2, era="0.19.8")
    assert (found.batch, found.micro_batch, found.accumulate) == (32, 4, 4)
    assert (found.stage, found.offload_optimizer, found.offload_parameters) == (2, True, False)
    assert found.compute == "fp16"
    assert found.loss_scale == LossScaleSettings(0.0, 65536.0, 1000, 2, False, 1.0, True)
    assert found.clip == 1.0
    assert found.optimizer == "AdamW"
    adam = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert found.optimizer_args == adam  # torch's own AdamW would decay by 0.01


@pytest.mark.parametrize(
    ("batch", "micro", "steps", "ranks", "gives"),
    [
        (16, 4, 2, 2, (16, 4, 2)),
        (16, 4, None, 2, (16, 4, 2)),
        (16, None, 2, 2, (16, 4, 2)),
        (16, None, None, 2, (16, 8, 1)),
        (None, 4, 2, 2, (16, 4, 2)),
        (None, 4, None, 2, (8, 4, 1)),
        (16, "auto", "auto", 4, (16, 4, 1)),
        ("auto", 4, "auto", 4, (16, 4, 1)),
        (32.0, "2", None, 2, (32, 2, 8)),
    ],
)
def test_batches(
    batch: object, micro: object, steps: object, ranks: int, gives: tuple[int, int, int]
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = dict(zip(names, (batch, micro, steps), strict=True))
    config = {name: value for name, value in values.items() if value is not None}
    found = read({**config, "gradient_clipping": 0}, data_parallel=ranks)
    assert (found.batch, found.micro_batch, found.accumulate) == gives


@pytest.mark.parametrize(
    ("config", "ranks", "line"),
    [
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, 2, "10 ≠ micro-batch 4 × "),
        ({"train_batch_size": 2}, 4, "try: train_batch_size = 4"),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 3}, 2, "= 12"),
        ({"train_batch_size": 0}, 2, "from 1 on"),
        ({"gradient_accumulation_steps": 3}, 2, "try: train_micro_batch_size_per_gpu = 1"),
        ({"train_batch_size": "auto"}, 2, "no number of samples"),
        ({"train_batch_size": True}, 2, "a whole number from 1 on is wanted"),
        ({"train_batch_size": 8.5}, 2, "a whole number from 1 on is wanted"),
    ],
)
def test_batches_that_do_not_multiply(config: dict[str, object], ranks: int, line: str) -> None:
    assert line in refused({"gradient_clipping": 1.0, **config}, ranks)


def test_clipping_nobody_speaks_of() -> None:
    """DeepSpeed's #8068 made it 1.0; v0.19.2 has 0.0 and v0.19.3 has 1.0."""
    plain = {"train_batch_size": 8}
    eras = {"0.16.9": 0.0, "0.19.2": 0.0, "0.19.3": 1.0, "0.19.8+cu130": 1.0, "0.20": 1.0, "1": 1.0}
    for era, clip in eras.items():
        found = read(plain, data_parallel=1, era=era)
        assert found.clip == clip
        assert any(f"is not said: {clip}, the default of {era}" in line for line in found.told)
    line = refused(plain)
    assert "0.0 (none) before 0.19.3" in line
    assert "1.0 from it on" in line
    found = read(plain, data_parallel=1, unsaid_clip=1.0)
    assert found.clip == 1.0
    assert any("not said: 1.0 (" in line for line in found.told)
    assert read({**plain, "gradient_clipping": 0.3}, data_parallel=1, era="0.19").clip == 0.3
    assert "0.19.3" in refused(plain, era="0.19")
    assert "era new" in refused(plain, era="new")


def test_files_and_base64(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(PRINTED))
    wanted = read(PRINTED, data_parallel=2, era="0.19.8")
    assert read(file, data_parallel=2, era="0.19.8") == wanted
    assert read(str(file), data_parallel=2, era="0.19.8") == wanted
    text = base64.urlsafe_b64encode(file.read_bytes()).decode()
    assert read(text, data_parallel=2, era="0.19.8") == wanted
    assert "no such file" in refused(str(tmp_path / "missing.json"))
    file.write_text('{"train_batch_size": 8, "train_batch_size": 4}')
    assert "train_batch_size: stands twice" in refused(file)
    file.write_text("[1]")
    assert "a table of keys is wanted" in refused(file)


HJSON = """{
  // of a tutorial
  train_batch_size: 8,
  gradient_clipping: 0.5,  # none is 0
  fp16: {enabled: true,},
}"""


@pytest.mark.proof  # where the extra is installed
def test_comments_and_trailing_commas(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(HJSON)
    found = read(file, data_parallel=1)
    assert (found.batch, found.clip, found.compute) == (8, 0.5, "fp16")
    file.write_text("{train_batch_size: 8, train_batch_size: 8}")
    assert "stands twice" in refused(file)
    file.write_text('{"train_batch_size": [')
    assert "pip" not in refused(file)


def test_hjson_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    file = tmp_path / "ds_config.json"
    file.write_text(HJSON)
    assert refused(file).endswith("(HJSON) need: pip install 'shoal[neighbours]'")
    file.write_text('{"train_batch_size": 8, "gradient_clipping": 0.5}')
    assert read(file, data_parallel=1).clip == 0.5


@pytest.mark.parametrize(
    ("kind", "params", "gives"),
    [
        ("Adam", {}, ("AdamW", 0.0)),
        ("adamw", {"adam_w_mode": False}, ("AdamW", 0.0)),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, ("Adam", 0.1)),
        ("AdamW", {"torch_adam": True}, ("AdamW", None)),  # torch's own default, 0.01
        ("ADAM", {"torch_adam": True, "adam_w_mode": False}, ("Adam", None)),
        ("Lion", {"betas": [0.9, 0.99]}, ("Lion", 0.0)),
        ("adagrad", {"lr": 0.1}, ("Adagrad", None)),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, ("SGD", None)),
    ],
)
def test_optimizers(kind: str, params: dict[str, object], gives: tuple[str, object]) -> None:
    found = read_one({"optimizer": {"type": kind, "params": params}})
    assert (found.optimizer, found.optimizer_args.get("weight_decay")) == gives
    said = any("unless adam_w_mode = false" in line for line in found.told)
    assert said == (kind == "Adam" and "adam_w_mode" not in params)


@pytest.mark.parametrize(
    ("kind", "params", "line"),
    [
        ("sgd", {}, "try: SGD"),  # torch.optim.sgd is a module, which DeepSpeed would call
        ("AdamV", {}, "try: Adam"),
        (None, {}, "try: AdamW"),
        ("Adam", {"max_grad_norm": 1.0}, "try: gradient_clipping"),
        ("Adam", {"lr": "auto"}, "only the trainer that fills it in knows it"),
        ("Adam", {"amsgrad": True}, "try: torch_adam = true"),
        ("Adam", {"bias_correction": False}, "try: torch_adam = true"),
        ("LBFGS", {}, "try: AdamW"),
    ],
)
def test_optimizers_that_are_not_here(kind: object, params: dict[str, object], line: str) -> None:
    assert line in refused({**BATCH, "optimizer": {"type": kind, "params": params}})


def test_the_scripts_own_count() -> None:
    blocks = {"optimizer": {"type": "OneBitAdam"}, "scheduler": {"type": "mine"}}
    found = read_one(blocks, brought=("optimizer", "scheduler"))
    assert (found.optimizer, found.scheduler) == ("", "")
    assert "optimizer: the script's own counts, as in DeepSpeed" in found.told


@pytest.mark.parametrize(
    ("zero", "stage", "offload"),
    [
        (True, 1, (False, False, "host")),
        (False, 0, (False, False, "host")),
        ({"stage": "2"}, 2, (False, False, "host")),
        ({"stage": "auto"}, 0, (False, False, "host")),
        ({"stage": 3, "cpu_offload": True}, 3, (True, False, "host")),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, 3, (False, True, "host")),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, 3, (False, True, "files")),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, 2, (False, False, "host")),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, 0, (False, False, "host")),
        ({"stage": 1, "offload_optimizer": {"device": "auto"}}, 1, (False, False, "host")),
    ],
)
def test_zero(zero: object, stage: int, offload: tuple[object, ...]) -> None:
    found = read_one({"zero_optimization": zero})
    gives = (found.offload_optimizer, found.offload_parameters, found.offload_to)
    assert (found.stage, gives) == (stage, offload)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"zero_optimization": {"stage": 4}}, "try: 3"),
        ({"zero_optimization": 2}, "a table of keys is wanted"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "gpu"}}}, "cpu, nvme"),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
            "is offload_optimizer's old name",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16 is enabled too"),
        ({"fp16": {"enabled": True, "loss_scale": True}}, "a number from 0 on"),
        ({"fp16": {"enabled": True, "loss_scale": "inf"}}, "a number from 0 on"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "above 0"),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, "from 1 on"),
        ({"fp16": {"enabled": "yes"}}, "true or false is wanted"),
        ({"communication_data_type": "fp16"}, "try: fp32"),
        ({"gradient_clipping": -1}, "a number from 0 on"),
        ({"gradient_accumulation_steps": None, "train_batch_size": None}, "no batch size"),
    ],
)
def test_values_that_are_refused(config: dict[str, object], line: str) -> None:
    assert line in refused({**BATCH, **config})


def test_loss_scales() -> None:
    """At stage 0 DeepSpeed's fp16 optimizer halves at once and goes on at the least scale."""
    half = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50, "min_loss_scale": 2}
    plain = read_one({"fp16": {**half, "hysteresis": 3}})
    assert plain.loss_scale == LossScaleSettings(0.0, 256.0, 50, 1, False, 2.0, False)
    assert any("at stage 0" in line for line in plain.told)
    cut = {"stage": 1}
    found = read_one({"fp16": {**half, "consecutive_hysteresis": True}, "zero_optimization": cut})
    assert found.loss_scale == LossScaleSettings(0.0, 256.0, 50, 2, True, 2.0, True)
    fixed = read_one({"fp16": {"enabled": True, "loss_scale": "128", "loss_scale_window": 0}})
    assert fixed.loss_scale.fixed == 128.0
    assert read_one({"bfloat16": {"enabled": "true"}}).compute == "bf16"


SCALES = json.loads((Path(__file__).parent / "deepspeed_scales.json").read_text())["runs"]


@pytest.mark.parametrize("run", SCALES)
def test_loss_scales_move_as_deepspeeds_scaler_does(run: dict[str, Any]) -> None:
    """Update by update, every scale is that of DeepSpeed 0.19.8."""
    names = ("initial", "window", "hysteresis", "consecutive_hysteresis", "least")
    scale, scales, ends = (
        DeepSpeedLossScale(LossScaleSettings(0.0, *(run[name] for name in names))),
        [],
        None,
    )
    for place, overflows in enumerate(run["overflows"]):
        try:
            scale.lower() if overflows else scale.handle_clean_step()
        except ConfigError:
            ends = place
            break
        scales.append(scale.value)
    assert (scales, ends) == (run["scales"], run["ends_at"])
    assert len(set(scales)) > 3


def test_sums_over_micro_batches() -> None:
    """DeepSpeed's default is the model's own format, in which many small terms are lost."""
    brain = {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    said = "data_types.grad_accum_dtype is not said: DeepSpeed adds gradients up in bf16"
    assert any(said in line for line in read_one(brain).told)
    for quiet in ({"data_types": {"grad_accum_dtype": "fp32"}}, {"gradient_accumulation_steps": 1}):
        assert not any("not said: DeepSpeed adds" in one for one in read_one(brain | quiet).told)


def test_auto_is_resolved_once_and_said() -> None:
    found = read(
        {
            "train_micro_batch_size_per_gpu": 2,
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-5, "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 9},
            },
            "fp16": {"enabled": "auto"},
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        },
        data_parallel=4,
    )
    assert (found.batch, found.clip, found.compute) == (8, 1.0, "fp32")
    assert found.optimizer_args["betas"] == (0.9, 0.999)
    assert found.scheduler_args["warmup_max_lr"] is None  # the optimizer's own rate
    line = next(line for line in found.told if line.startswith('"auto"'))
    assert line.startswith('"auto" is what holds without the key: train_batch_size, ')
    assert "zero_optimization.reduce_bucket_size" in line
    assert 'gradient_clipping = "auto": 1.0, as Accelerate fills it in' in found.told


def test_the_configuration_is_left_as_it_was() -> None:
    config = {**BATCH, "bfloat16": {"enabled": "auto"}, "zero_optimization": True}
    before = json.dumps(config)
    read(config, data_parallel=1)
    assert json.dumps(config) == before
