"""Islands that were started differently, or keep too little, are told so before they train."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.estimates.facts import MachineFacts
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.checkpoint.format.checkpoint_faults import DamagedStepError
from shoal.checkpoint.format.listing import list_checkpoints
from shoal.checkpoint.format.manifest import FILE_NAME
from shoal.cli.islands import _copy_island_checkpoints, _rename_surplus_islands
from shoal.cli.start import _check_islands_resume, _has_island_folders
from shoal.config.load import LoadedConfig, load_config
from shoal.config.save import MICRO_BATCH, is_derived, to_toml
from shoal.config.sections import Config
from shoal.forecast.machines.measured_machine import estimate_this_machine
from shoal.forecast.time.codec_costs import CODINGS
from shoal.islands.common_round import ResumePoint
from shoal.trainer.autotune import micro_batch_size
from shoal.trainer.islands.island_join import (
    FEEDS_BACK,
    OWN,
    _delete_later_checkpoints,
    agree_micro_batch,
    check_agreement,
    check_donors,
    join_islands,
    list_held_rounds,
    restore_round,
    shared_settings,
)

ONE = IslandsPolicy("diloco", count=2).resolved()


class Others:
    """A plane whose other islands say what is given."""

    def __init__(self, *others: dict[str, Any]) -> None:
        self.others = others

    def gather(self, message: bytes, *, deadline_s: float) -> list[bytes]:
        return [message, *(json.dumps(other).encode() for other in self.others)]


def run_of(**settings: Any) -> Any:
    plan = SimpleNamespace(
        layout=SimpleNamespace(text=lambda: "single"), batch=8, micro_batch=2, compute="fp32", residual="fp32", seed=1, keep=2,
        parameters=10,
    )  # fmt: skip
    return SimpleNamespace(plan=SimpleNamespace(**{**vars(plan), **settings}))


def test_every_key_of_islands_must_be_alike() -> None:
    """Another pace would deal samples twice, another bound admit others, another server step apart."""
    own = shared_settings(run_of(), ONE)
    for key in vars(ONE):
        assert (f"islands.{key}" in own) == (key not in OWN)
    check_agreement(Others(own), own)
    with pytest.raises(ConfigError, match="islands.pace = equal on island 1, speed on island 0: .*"
                       "try: islands.pace=speed on all of them"):  # fmt: skip
        check_agreement(Others({**own, "islands.pace": "equal"}), own)
    with pytest.raises(ConfigError, match="train.seed = None on island 2, 1 on island 0"):
        check_agreement(Others(own, {k: v for k, v in own.items() if k != "train.seed"}), own)


def test_one_checkpoint_is_too_few() -> None:
    with pytest.raises(ConfigError, match="checkpoint.keep = 1: .*try: checkpoint.keep=2"):
        join_islands(run_of(keep=1), ONE)


def test_an_island_that_holds_nothing_is_named_on_all() -> None:
    check_donors(ResumePoint(7, (0, 1, 2)))
    with pytest.raises(CheckpointError, match="island 2: holds no round of this run, island 1 holds"
                       " round 7; try: shoal train --resume on island 2, with .*; only if they are "
                       "lost, copy checkpoints/ of island 1's run folder"):  # fmt: skip
        check_donors(ResumePoint(7, (0, 1, 1)))
    with pytest.raises(CheckpointError, match="lost, bring them back from a copy, or start a new"):
        check_donors(ResumePoint(7, (0, 1, 1)), owned=True)


def checkpoint(folder: Path, step: int) -> None:
    path = folder / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    (path / FILE_NAME).write_text(str(path))


def steps(folder: Path) -> list[int]:
    return [found.step for found in list_checkpoints(folder / "checkpoints")]


def test_later_checkpoints_are_forgotten(tmp_path: Path) -> None:
    for step in (50, 100, 150):
        checkpoint(tmp_path, step)
    _delete_later_checkpoints(tmp_path, 100)
    assert steps(tmp_path) == [100, 50]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_manifest_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """All islands will go on from a round before it."""
    checkpoint(tmp_path, 50)
    heard: list[tuple[str, str]] = []

    def emit(event: str, *, file: str, **fields: Any) -> None:
        heard.append((event, file))

    assert list_held_rounds(tmp_path, 50, emit) == {}
    assert heard == [("checkpoint_damaged", f"checkpoints/step-50/{FILE_NAME}")]


@pytest.mark.parametrize("others_hold_it_whole", [True, False])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_round_that_is_damaged_is_put_aside_and_an_earlier_one_is_agreed_on(
    tmp_path: Path, others_hold_it_whole: bool, rounds: int
) -> None:
    """Of an island that holds no other, somebody must decide that it begins anew."""
    for step in (50, 100)[2 - rounds :]:
        checkpoint(tmp_path, step)
    here: dict[str, Any] = {"1": ("a", 50), "2": ("b", 100)}
    if rounds == 1:
        del here["1"]
    told: list[str] = []

    def restore(step: int) -> None:
        if step == 100:
            raise DamagedStepError("step-100 is damaged")

    def gather(message: bytes, deadline_s: float) -> list[bytes]:
        return [message, json.dumps(others_hold_it_whole).encode()]

    recorder = SimpleNamespace(folder=tmp_path, notice=told.append)
    run: Any = SimpleNamespace(
        restore=restore, recorder=recorder, world=SimpleNamespace(is_first=True)
    )
    plane: Any = SimpleNamespace(gather=gather)
    if rounds == 1:
        with pytest.raises(DamagedStepError):
            restore_round(run, plane, here, 2)
        assert steps(tmp_path) == [100]
        return
    assert not restore_round(run, plane, here, 2)
    assert list(here) == ["1"]
    assert steps(tmp_path) == [50]
    assert told == [
        "round 2 is damaged here, so all islands go on from an earlier one; kept as "
        "step-100.damaged"
    ]
    assert restore_round(run, plane, here, 1) == others_hold_it_whole


def test_a_new_island_gets_all_that_another_holds(tmp_path: Path) -> None:
    """The newest alone may be a round that the others never had."""
    for step in (50, 100):
        checkpoint(tmp_path / "island-0", step)
    for step in (30, 50):
        checkpoint(tmp_path / "island-1", step)
    _copy_island_checkpoints(tmp_path, 3)
    assert steps(tmp_path / "island-2") == [100, 50]
    assert steps(tmp_path / "island-1") == [50, 30]
    assert len(list((tmp_path / "island-2" / "checkpoints").iterdir())) == 2


def test_islands_begin_where_a_run_without_them_ended(tmp_path: Path) -> None:
    for step in (50, 100):
        checkpoint(tmp_path, step)
    _copy_island_checkpoints(tmp_path, 2)
    assert steps(tmp_path / "island-0") == steps(tmp_path / "island-1") == [100, 50]
    _copy_island_checkpoints(tmp_path / "new", 2)
    assert not (tmp_path / "new").exists()


def test_three_islands_two_and_three_again(tmp_path: Path) -> None:
    """What the third held when it stopped is kept, and does not stand in the way later."""
    for island in range(3):
        checkpoint(tmp_path / f"island-{island}", 50)
    old = tmp_path / "island-2"
    assert _rename_surplus_islands(tmp_path, 3) == []
    assert _rename_surplus_islands(tmp_path, 2) == [(old, tmp_path / "set-aside-island-2")]
    assert not old.exists()
    for island in range(2):
        checkpoint(tmp_path / f"island-{island}", 100)
    assert _rename_surplus_islands(tmp_path, 3) == []
    _copy_island_checkpoints(tmp_path, 3)
    assert steps(old) == [100, 50]
    assert _rename_surplus_islands(tmp_path, 2) == [(old, tmp_path / "set-aside-island-2-2")]
    assert steps(tmp_path / "set-aside-island-2") == [50]


def test_the_planner_knows_which_codecs_keep_what_they_leave_out() -> None:
    assert {name for name, coding in CODINGS.items() if coding.feedback} == set(FEEDS_BACK)


def test_the_one_island_that_is_left_goes_on_in_its_folder(tmp_path: Path) -> None:
    """Else it would begin anew, or where the run was before there were islands."""
    one = IslandsPolicy("diloco", count=1)
    assert not _has_island_folders(one, tmp_path)
    checkpoint(tmp_path, 50)
    assert not _has_island_folders(one, tmp_path)
    _check_islands_resume(one, tmp_path)
    for island in range(2):
        checkpoint(tmp_path / f"island-{island}", 100)
    assert _has_island_folders(one, tmp_path)
    _check_islands_resume(one, tmp_path)
    with pytest.raises(ConfigError, match="islands.method = none: .* by islands.*islands.count=1"):
        _check_islands_resume(IslandsPolicy(), tmp_path)
    far = IslandsPolicy("diloco", count=2, at="10.0.0.1:29400", index=1)
    with pytest.raises(ConfigError, match="islands.at = 10.0.0.1:29400: .* by islands"):
        _check_islands_resume(far, tmp_path)


@dataclass(frozen=True)
class ProgramOfPlan:
    """The part of a program that a change of the micro-batch replaces."""

    plan: Plan


class RunOfPlan(SimpleNamespace):
    """A run whose plan is its program's."""

    @property
    def plan(self) -> Plan:
        return self.program.plan


@pytest.mark.parametrize(
    ("others", "is_open", "size"),
    [
        (([4, True], [2, True]), True, 2),
        (([8, True],), True, 8),
        (([2, False],), True, 8),  # given there: refused by its key, as any other value
        (([2, True],), False, 8),
    ],
)
def test_islands_take_the_least_micro_batch_that_nobody_gave(
    tmp_path: Path, others: Any, is_open: bool, size: int
) -> None:
    """Of machines with unlike memory; or after one island halved its size."""
    plan = Plan(Layout(), batch=8, micro_batch=8, accumulate=1)
    loaded = LoadedConfig(Config())
    loaded.replace("train", "derived" if is_open else "command line", batch=8, micro_batch=8)
    (tmp_path / "run.toml").write_text(to_toml(loaded))
    (tmp_path / "plan.json").write_text(plan.to_json({"chosen": False}))
    notices: list[str] = []
    program = ProgramOfPlan(plan)
    run: Any = RunOfPlan(
        program=program,
        feed=SimpleNamespace(plan=plan),
        guards=SimpleNamespace(model=SimpleNamespace(program=program)),
        world=SimpleNamespace(writes_files=True),
        recorder=SimpleNamespace(folder=tmp_path, notice=notices.append),
    )
    plane: Any = Others(*others)
    agree_micro_batch(run, plane, is_open=is_open)
    assert (run.feed.plan.micro_batch, run.program.plan.micro_batch) == (size, size)
    assert run.feed.plan.accumulate == 8 // size
    assert load_config(tmp_path / "run.toml").config.train.micro_batch == size
    assert is_derived(tmp_path / "run.toml", MICRO_BATCH) == is_open
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert (kept["micro_batch"], kept.get("sized", False)) == (size, size < 8)
    told = ["train.micro_batch: 8 → 2, the least of all islands"]
    assert notices == (told if size < 8 else [])


@pytest.mark.parametrize(
    ("at", "concurrent", "runs"),
    [("127.0.0.1:9", 0, 3), ("127.0.0.1:9", 2, 2), ("10.0.0.1:9", 0, 1)],
)
def test_islands_of_one_machine_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: str, concurrent: int, runs: int
) -> None:
    """Of owners that take turns those that train at a time."""
    seen: list[int] = []

    def choose(plan: Plan, *_: Any, sharing: int) -> tuple[Plan, str]:
        seen.append(sharing)
        return plan, ""

    monkeypatch.setattr(micro_batch_size, "is_micro_batch_open", lambda folder: True)
    monkeypatch.setattr(micro_batch_size, "choose_size", choose)
    policy = IslandsPolicy("fedavg", count=3, at=at, data="own", concurrent=concurrent)
    world: Any = SimpleNamespace(writes_files=False)
    nothing: Any = None
    micro_batch_size.choose_micro_batch(
        replace(Config(), islands=policy), Plan(Layout()), nothing, world, tmp_path, nothing
    )
    assert seen == [runs]
    whole = estimate_this_machine(MachineFacts(cores=4, memory_bytes=12 * 2**30, gpus=0), 1)
    part = micro_batch_size._divide_memory(whole, runs)
    assert part.device.memory_bytes == part.node_memory_bytes == 12 * 2**30 / runs
