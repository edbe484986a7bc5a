"""How a command cuts the batch, before any process starts: kept choices, given sizes, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.base.errors import ConfigError, PlanError
from shoal.base.plans.plan import Plan
from shoal.cli.start import PreparedRun, prepare_run, settle_run, write_run_folder
from shoal.config.differences import compare_configurations, format_refusal
from shoal.config.load import LoadedConfig
from shoal.config.save import to_toml
from shoal.config.trust import load_trusted
from shoal.trainer.jobs.out_of_memory import apply_reduced_micro_batch

CHANGED = (
    "train.micro_batch: {} → {}, what divides the {} samples of a data-parallel rank here; masks"
)


def settled(words: str, processes: int, path: Path | None = None) -> tuple[LoadedConfig, Plan]:
    loaded = load_trusted(
        path, ["data.source=digits", "model.name=vit", *words.split()], trust=False
    )
    plan, _ = settle_run(loaded, processes)
    return loaded, plan


def changed(loaded: LoadedConfig) -> list[str]:
    return [line for line in loaded.notices if line.startswith("train.micro_batch")]


@pytest.mark.parametrize(
    ("words", "processes", "micro_batch", "passes"),
    [
        ("", 1, 16, 1),
        ("layout.strategy=ddp", 2, 8, 1),
        ("layout.strategy=fsdp train.batch=24", 3, 8, 1),
        ("layout.tp=2", 2, 16, 1),
        ("layout.pp=2", 2, 4, 4),
        ("layout.strategy=ddp train.micro_batch=2", 2, 2, 4),
        ("layout.strategy=ddp train.batch=32 train.accumulate=4", 2, 4, 4),
        ("layout.strategy=ddp train.accumulate=4", 2, 2, 4),
        ("islands.method=diloco islands.count=2", 2, 8, 1),
    ],
)
def test_what_a_pass_takes(words: str, processes: int, micro_batch: int, passes: int) -> None:
    loaded, plan = settled(words, processes)
    assert (plan.micro_batch, plan.accumulate) == (micro_batch, passes)
    assert loaded.config.train.micro_batch == micro_batch
    given = "micro_batch" in words or "accumulate" in words
    assert (loaded.origins["train.micro_batch"] == "derived") != given


def test_a_choice_follows_the_ranks_and_a_word_does_not(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    loaded, plan = settled("layout.strategy=ddp train.batch=24", 1 + 1)
    for processes, micro_batch in ((2, 12), (3, 8), (4, 6), (2, 6), (1, 6)):
        path.write_text(to_toml(loaded))
        before = loaded.config.train.micro_batch
        words = (
            f"layout.strategy={'ddp' if processes > 1 else 'single'} launch.processes={processes}"
        )
        loaded, plan = settled(words, processes, path)
        assert plan.micro_batch == loaded.config.train.micro_batch == micro_batch
        share = 24 // processes
        line = CHANGED.format(before, micro_batch, share)
        assert [one.startswith(line) for one in changed(loaded)] == [True] * (before != micro_batch)
        found = compare_configurations(path.read_text(), to_toml(loaded))
        assert format_refusal("--resume run", 3, found) == "", "no --force is needed"
    loaded, _ = settled("layout.strategy=ddp train.batch=24 train.micro_batch=12", 2)
    path.write_text(to_toml(loaded))
    with pytest.raises(ConfigError, match=r"not divisible by train\.micro_batch 12 × 3 .*try: "):
        settled("launch.processes=3", 3, path)
    loaded, _ = settled("train.micro_batch=6", 2, path)
    found = compare_configurations(path.read_text(), to_toml(loaded))
    assert "train.micro_batch: 12 → 6" in format_refusal("--resume run", 3, found)


def test_a_word_after_a_choice_is_a_change_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    loaded, _ = settled("layout.strategy=ddp train.batch=24", 2)
    path.write_text(to_toml(loaded))
    again, plan = settled("train.micro_batch=4", 2, path)
    assert plan.micro_batch == 4
    assert again.origins["train.micro_batch"] == "command line"
    found = compare_configurations(path.read_text(), to_toml(again))
    assert "train.micro_batch: 12 → 4" in format_refusal("--resume run", 3, found)


@pytest.mark.parametrize(
    ("words", "processes", "line"),
    [
        ("train.batch=10 layout.strategy=ddp", 4,
         r"train\.batch = 10: does not divide over 4 data-parallel ranks; try: train\.batch=8"),
        ("layout.strategy=ddp", 3,
         r"3 data-parallel ranks do not divide the default of 16 .*try: train\.batch=24"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_before_a_process_starts(
    words: str, processes: int, line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        settled(words, processes)


def test_a_schedule_that_can_run_no_cut_is_named() -> None:
    with pytest.raises(PlanError, match=r"layout\.schedule = dualpipe: needs .*; try: train"):
        settled("layout.pp=2 layout.schedule=dualpipe train.batch=3", 2)


def test_a_first_start_leaves_the_size_open_to_its_workers(tmp_path: Path) -> None:
    words = ["data.source=digits", "model.name=vit", f"run.folder={tmp_path}", "run.name=a"]
    first = prepare_run(words, None, 2)
    assert isinstance(first, PreparedRun)
    assert not first.sized
    first.folder.mkdir(parents=True)
    write_run_folder(first)
    assert json.loads((first.folder / "plan.json").read_text())["sized"] is False
    larger = prepare_run([str(first.folder / "run.toml"), "run.name=c", "train.batch=64"], None, 2)
    assert (larger.plan.micro_batch, larger.sized) == (32, False), "of another batch, chosen anew"
    other = prepare_run([str(first.folder / "run.toml"), "run.name=b"], None, 2)
    assert other.sized, "the run whose file it is has the size already"
    assert other.plan.micro_batch == first.plan.micro_batch


def test_what_memory_allowed_stays_on_other_ranks(tmp_path: Path) -> None:
    """`train.on_oom=halve` came down to 4 of 8; a size that the user gives afterwards wins."""
    words = ["data.source=digits", "model.name=vit", f"run.folder={tmp_path}", "run.name=a"]
    first = prepare_run([*words, "train.batch=24", "layout.strategy=ddp"], None, 3)
    first.folder.mkdir(parents=True)
    write_run_folder(first)
    kept = {"asked": None, "micro_batch": 4, "was": 8, "because": "rank 0, step 3"}
    (first.folder / "micro_batch.json").write_text(json.dumps(kept))
    for processes, size in ((3, 4), (2, 4), (4, 3), (1, 4)):
        again = prepare_run([str(first.folder / "run.toml")], None, processes)
        write_run_folder(again)
        plan = apply_reduced_micro_batch(again.plan, again.loaded.config, first.folder)
        assert (plan.micro_batch, plan.accumulate) == (size, 24 // processes // size)
    for size in (6, 12):
        given = prepare_run([str(first.folder / "run.toml"), f"train.micro_batch={size}"], None, 2)
        write_run_folder(given)
        assert (
            apply_reduced_micro_batch(given.plan, given.loaded.config, first.folder).micro_batch
            == size
        )


def test_later_starts_count_from_a_reduced_size(tmp_path: Path) -> None:
    """run.toml then holds what is trained with, and the line of a start says what changes."""
    words = ["data.source=digits", "model.name=vit", f"run.folder={tmp_path}", "run.name=a"]
    first = prepare_run([*words, "train.batch=24", "layout.strategy=ddp"], None, 2)
    first.folder.mkdir(parents=True)
    write_run_folder(first)
    kept = {"asked": None, "micro_batch": 3, "was": 6, "because": "rank 0, step 3"}
    (first.folder / "micro_batch.json").write_text(json.dumps(kept))
    apply_reduced_micro_batch(first.plan, first.loaded.config, first.folder, writes=True)
    assert "micro_batch = 3 " in (first.folder / "run.toml").read_text()
    for processes, size, said in ((2, 3, ""), (3, 2, "3 → 2"), (4, 2, ""), (1, 2, "")):
        again = prepare_run([str(first.folder / "run.toml")], None, processes)
        write_run_folder(again)
        plan = apply_reduced_micro_batch(again.plan, again.loaded.config, first.folder, writes=True)
        assert plan == again.plan, "nothing is left to lower"
        assert plan.micro_batch == size
        assert [line.split("train.micro_batch: ")[1][:5] for line in changed(again.loaded)] == (
            [said] if said else []
        )
