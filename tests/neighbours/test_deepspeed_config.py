"""A DeepSpeed configuration read as it is meant: batches, precision, optimizer, "auto", eras.

Figures beside a case are DeepSpeed 0.19.8's own, from its source (runtime/config.py,
precision_config.py, zero/config.py) and from runs of it.
"""

import base64
import json
from pathlib import Path

import pytest

from shoal.base.errors import ConfigError
from shoal.neighbours.deepspeed_config import LossScale, Settings, read

BATCH = {"train_batch_size": 8, "gradient_clipping": 1.0}
PRINTED = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "fp16": {"enabled": True},
}


def read_one(config: dict[str, object], ranks: int = 1, **more: object) -> Settings:
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
    assert found.loss_scale == LossScale(0.0, 65536.0, 1000, 2, False, 1.0, True)
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
        ({"train_batch_size": 2}, 4, "nearest: train_batch_size = 4"),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 3}, 2, "= 12"),
        ({"train_batch_size": 0}, 2, "from 1 on"),
        ({"gradient_accumulation_steps": 3}, 2, "nearest: train_micro_batch_size_per_gpu = 1"),
        ({"train_batch_size": "auto"}, 2, "no number of samples"),
        ({"train_batch_size": True}, 2, "a number from 1 on is wanted"),
        ({"train_batch_size": 8.5}, 2, "a whole number is wanted"),
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
        assert f"gradient_clipping = {clip}, DeepSpeed {era}'s default" in found.told
    line = refused(plain)
    assert "0.0 (none) before 0.19.3" in line
    assert "1.0 from it on" in line
    found = read(plain, data_parallel=1, unsaid_clip=1.0)
    assert found.clip == 1.0
    assert any("1.0 taken" in line for line in found.told)
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
