"""What a validation reads, in which micro-batches, and that its figures do not hang on these."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from trainer_small import run_of, sgd

from shoal.base.errors import ConfigError
from shoal.config.load import load_config
from shoal.config.resolve import resolve_batch, resolve_length, resolve_validation
from shoal.config.sections import Config, ModelSection, TrainSection
from shoal.data.digits import EvenSubset
from shoal.data.sources import Source
from shoal.models.loss import token_loss
from shoal.trainer.jobs import run_end
from shoal.trainer.jobs import validation as validate
from shoal.trainer.jobs.validation import ValidationData, _split_for_all_ranks, make_validator
from shoal.trainer.run import Run
from shoal.wire.phases import set_phase_listener


class Labels:
    """23 samples of 3 classes."""

    def __init__(self, count: int = 23) -> None:
        generator = torch.Generator().manual_seed(4)
        self.x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Couples(nn.Module):
    """Centres its inputs over the batch, so the loss of a sample hangs on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x - x.mean(0))


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return token_loss(outputs, targets)


def begun(
    folder: Path, model: nn.Module, *, loss: Any = token_loss, fits: int = 8, **other: Any
) -> tuple[Run, list[int], Any]:
    """A run with a plan that says what fits, the sizes of its forward passes, its validation."""
    (folder / "plan.json").write_text(
        json.dumps({"predicted": {"validation_micro_batch": fits, "step_s": 6.0}})
    )
    (folder / "run.toml").write_text('[train]\nvalidate_samples = "64"  # derived\n')
    run = run_of(model, sgd, loss, batch=4, micro_batch=2, precision="fp64", folder=folder)
    sizes: list[int] = []
    run.model.register_forward_hook(lambda m, args, out: sizes.append(len(args[0])))
    held = other.pop("held", Labels())
    most = other.pop("most", None)
    source = Source(Labels(), held, None, None, None, None, "labels", "samples", most)
    config = Config(model=ModelSection(build="own:model"), train=TrainSection(**other))
    return run, sizes, make_validator(run, source, config)


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == name]


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def test_more_samples_at_once_give_the_same_figures(tmp_path: Path) -> None:
    values = []
    for fits in (2, 8):
        (folder := tmp_path / str(fits)).mkdir()
        run, sizes, validate = begun(folder, plain(), fits=fits)
        values.append(validate())
        validate()
        run.close()
    assert sizes[-3:] == [8, 8, 7]
    assert values[0] == pytest.approx(values[1], rel=1e-14)
    assert values[0]["targets"] == 23
    (told,) = [e["text"] for e in events(tmp_path / "8", "notice")]
    assert told == "validation at the end: 23 held-out samples, 8 at a time; about 11.5 s each time"
    assert len(events(tmp_path / "8", "validated")) == 2


def test_progress_is_told_with_the_number_of_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.wire.phases.EVERY_S", 0.0)
    run, _, validate = begun(tmp_path, plain(), fits=8)
    heard: list[str] = []
    set_phase_listener(lambda phases: heard.extend(f"{p.name} {p.done}/{p.of}" for p in phases))
    try:
        validate()
        told = heard[-1]
        run.evaluate(DataLoader(Labels(), 5))
    finally:
        set_phase_listener(None)
        run.close()
    assert told == "validation 3/3"
    assert heard[-1] == "validation 5/5", "batches of one's own are counted too"


def test_what_looks_across_samples_keeps_the_micro_batch_of_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run, sizes, validate = begun(tmp_path, Couples())
    first = validate()
    assert sizes[-12:] == [2] * 11 + [1]
    before, told = len(sizes), events(tmp_path, "notice")[-1]["text"]
    assert validate() == first
    assert len(sizes) == before + 12, "tried once"
    run.close()
    assert told.startswith("validation: 2 samples at a time, as in training: with 8 the loss of ")
    assert told.endswith("so the model looks across samples")


def test_a_loss_of_the_users_keeps_it_too(tmp_path: Path) -> None:
    run, sizes, validate = begun(tmp_path, plain(), loss=own_loss, validate_every=5)
    validate()
    run.close()
    assert sizes == [2] * 11 + [1]
    assert events(tmp_path, "notice")[-1]["text"] == (
        "validation every 5 steps and at the end: 23 held-out samples, 2 at a time as in training "
        "(the loss may look across samples); about 11.5 s each time"
    )


@pytest.mark.parametrize(
    ("keys", "most", "read"),
    [({}, 5, 5), ({"validate_samples": "4"}, 5, 4), ({"validate_samples": "9"}, None, 9)],
)
def test_what_is_read_is_bounded(
    tmp_path: Path, keys: dict[str, str], most: int | None, read: int
) -> None:
    run, _, validate = begun(tmp_path, plain(), most=most, **keys)
    part = EvenSubset(Labels(), read, True)
    with torch.no_grad():
        outputs = run.model(torch.stack([part[i][0] for i in range(read)]))
    total, count = token_loss(outputs, torch.stack([part[i][1] for i in range(read)]))
    assert validate()["loss"] == pytest.approx(float(total / count), rel=1e-12)
    run.close()
    assert f"{read} of 23 held-out samples" in events(tmp_path, "notice")[-1]["text"]


def test_the_first_samples_of_a_stream(tmp_path: Path) -> None:
    class Stream:
        def __iter__(self) -> Any:
            return itertools.cycle(Labels()[i] for i in range(23))

    run, _, validate = begun(tmp_path, plain(), held=Stream(), validate_samples="7")
    assert validate()["targets"] == 7
    run.close()
    assert "the first 7 held-out samples" in events(tmp_path, "notice")[-1]["text"]


@pytest.mark.parametrize(
    ("keys", "read"),
    [
        ({"epochs": 3}, 64),  # 3 × 23 samples, in steps of 4
        ({"epochs": 40}, 144),
        ({"epochs": 40, "validate_every": 50}, 64),
        ({"epochs": 40, "validate_samples": "all"}, 300),
    ],
)
def test_of_much_a_part_of_what_is_trained_is_read(
    tmp_path: Path, keys: dict[str, Any], read: int
) -> None:
    """By default; the number is kept in run.toml, so that resumes read the same samples."""
    run, _, validate = begun(tmp_path, plain(), held=Labels(300), **keys)
    assert validate()["targets"] == read
    run.close()
    text = events(tmp_path, "notice")[-1]["text"]
    if "validate_samples" in keys:
        assert "300 held-out samples" in text
        assert "validate_samples" not in text
        return
    assert f"{read} of 300 held-out samples" in text
    assert "(all: train.validate_samples=all)" in text
    kept = (tmp_path / "run.toml").read_text()
    assert re.search(rf'validate_samples = "{read}" +# derived', kept), kept


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["train.steps=3"], "64"),
        (["train.steps=3000", "train.batch=8"], "3600"),
        (["train.steps=3000", "train.batch=8", "train.validate_every=1000"], "1200"),
        (["train.validate_samples=0"], "0"),  # of a run of 0.1: all
        (["train.validate_samples=all"], "all"),
        (["train.epochs=2"], "auto"),  # workers know how many steps an epoch has
    ],
)
def test_a_start_settles_how_much(words: list[str], kept: str) -> None:
    loaded = load_config(None, words)
    resolve_batch(loaded, 1)
    resolve_length(loaded)
    resolve_validation(loaded)
    assert loaded.config.train.validate_samples == kept


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, ["train.validate_samples=every"])
    assert str(refusal.value) == (
        "train.validate_samples = every: not a number of samples, and neither auto nor all; "
        "try: train.validate_samples=all"
    )


@pytest.mark.parametrize("degree", [1, 2])
def test_a_held_out_stream_that_every_rank_reads_whole_is_told(degree: int) -> None:
    plan: Any = SimpleNamespace(batch=4, micro_batch=2, layout=SimpleNamespace(data_degree=degree))
    run: Any = SimpleNamespace(plan=plan)
    reading = ValidationData(iter(()), None, None, 2, "")
    told = validate._format_notice(run, reading, Config(), None)
    whole = (
        " of what can only be iterated, so that each of 2 ranks reads all of them (try: a "
        "dataset with __getitem__ and __len__)"
    )
    more = whole if degree > 1 else ""
    assert told == f"validation at the end: held-out samples{more}, 2 at a time"
    some = ValidationData(Labels(), 23, 23, 2, "")
    assert "iterated" not in validate._format_notice(run, some, Config(), None)


@pytest.mark.parametrize(("samples", "told"), [(3, True), (15, True), (16, False)])
def test_few_held_out_samples_are_told(samples: int, told: bool) -> None:
    plan: Any = SimpleNamespace(batch=4, micro_batch=2, layout=SimpleNamespace(data_degree=1))
    run: Any = SimpleNamespace(plan=plan)
    line = validate._format_notice(
        run, ValidationData(Labels(), samples, samples, 2, ""), Config(), None
    )
    assert ("so few say little, try: data.validation=0.1 or a file of its own" in line) == told


def test_the_sample_of_text_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(nn.Linear(4, 3), sgd)
    assert list(run_end._count_until_timeout(run, 12)) == list(range(12))
    monkeypatch.setattr(run_end, "SAMPLE_S", 0.0)
    assert list(run_end._count_until_timeout(run, 12)) == [0]


@pytest.mark.parametrize(
    ("samples", "micro_batch", "ranks", "found"),
    [(9, 8, 2, 8), (8, 8, 2, 4), (3, 8, 2, 1), (1, 8, 2, 0), (None, 8, 2, 8), (1, 8, 1, 8)],
)
def test_every_rank_of_a_layout_that_gathers_has_a_micro_batch(
    samples: int | None, micro_batch: int, ranks: int, found: int
) -> None:
    """A training of `shoal train` ended with status 2 after its last step."""
    layout = SimpleNamespace(data_degree=ranks, strategy="fsdp")
    run: Any = SimpleNamespace(
        plan=SimpleNamespace(layout=layout), program=SimpleNamespace(together=True)
    )
    reading = ValidationData(None, samples, samples, micro_batch, "")
    if not found:
        with pytest.raises(ConfigError, match=r"^validation: 1 held-out sample, and layout fsdp"):
            _split_for_all_ranks(run, reading)
        return
    assert _split_for_all_ranks(run, reading).micro_batch == found
    run.program.together = False
    assert _split_for_all_ranks(run, reading) is reading


def test_a_validation_reads_as_all_ranks_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        validate, "_split_for_all_ranks", lambda run, one: replace(one, micro_batch=1)
    )
    run, sizes, act = begun(tmp_path, plain())
    act()
    assert set(sizes) == {1}
    run.close()


SMALL = """
import torch
from torch import nn

def build(): return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3))
def data(): return [(torch.full((4,), i / 64), torch.tensor(i % 3)) for i in range(64)]
"""


@pytest.mark.proof("faults")
@pytest.mark.parametrize(("share", "status"), [("0.02", 2), ("0.05", 0)])
def test_a_command_with_few_held_out_samples(
    programs: Any, tmp_path: Path, share: str, status: int
) -> None:
    """One sample for two ranks is refused before the first step; three are dealt out."""
    (tmp_path / "small.py").write_text(SMALL)
    done = programs.run(
        "-m", "shoal", "train", "model.build=small:build", "data.source=small:data",
        "train.steps=3", "train.batch=8", "train.micro_batch=4", "launch.processes=2",
        "layout.strategy=fsdp", "run.name=a", f"data.validation={share}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert (tmp_path / "runs/a/metrics.jsonl").exists() == (status == 0)
    assert ("1 held-out sample, and layout fsdp" in done.stderr) == (status == 2)
