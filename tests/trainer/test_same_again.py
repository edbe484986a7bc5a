"""A resume says the whole difference, a line each, and stops at what changes the result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_small import Rows, linear, run_of

from shoal.base.errors import ConfigError
from shoal.base.runlog import environment
from shoal.cli import start
from shoal.config.differences import (
    Difference,
    compare_configurations,
    compare_environments,
    format_refusal,
)
from shoal.fabric import start_world
from shoal.proof.start_proof import prove_run
from shoal.trainer.main_job import train
from shoal.trainer.run_folder import resume_checks


def again(folder: Path, *overrides: str, force: bool = False) -> tuple[int, list[str]]:
    """Resume in this process; gives the exit code and what the run says it differs in."""
    prepared = start.prepare_run(list(overrides), folder, 1, force=force)
    start.write_run_folder(prepared)
    code = train(folder, prove_run, world=start_world({}))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return code, [e for e in events if e["event"] == "resumed"][-1]["differs"]


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As `shoal train --resume` starts its workers."""
    monkeypatch.setenv(resume_checks.STRICT, "strict")
    monkeypatch.setenv("SHOAL_ATTEMPT", "0")
    return


@pytest.mark.usefixtures("strict")
def test_a_resume_of_the_command_stops_and_names_all(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, then what is free, then settings and code before a start, then data at one."""
    (tmp_path / "rows.json").write_text(json.dumps(list(range(12))))
    (tmp_path / "my_rows.py").write_text(
        "import json, torch\n\n\ndef data():  # a comment\n"
        "    return [(torch.ones(4) * i, torch.tensor(i % 3)) for i in json.load(open('rows.json'))]\n"
    )
    monkeypatch.delitem(sys.modules, "my_rows", raising=False)
    folder, code = run("data.source=my_rows:data")
    assert code == 0
    assert again(folder) == (0, [])
    code, told = again(folder, "train.steps=6", "checkpoint.every=2", "data.workers=0")
    assert (code, told) == (0, ["train.steps: 4 → 6", "checkpoint.every: 0 → 2"])

    with pytest.raises(ConfigError) as refused:
        start.prepare_run(["optimizer.lr=0.5", "optimizer.clip=3", "launch.restarts=1"], folder, 1)
    assert str(refused.value) == (
        f"--resume {folder}: not what step 6 was trained with (then → now): optimizer.lr: 0.001 → "
        f"0.5; optimizer.clip: 1.0 → 3.0; put that back, or say --force to go on with what is now"
    )
    source = tmp_path / "my_rows.py"
    source.write_text(source.read_text().replace("  # a comment", "").replace("\n\n\n", "\n\n"))
    start.prepare_run([], folder, 1)
    source.write_text(source.read_text().replace("i % 3", "i % 2"))
    with pytest.raises(ConfigError, match=r"code of my_rows.py: as it was → changed; put"):
        start.prepare_run([], folder, 1)
    source.write_text(source.read_text().replace("i % 2", "i % 3"))

    (tmp_path / "rows.json").write_text(json.dumps([i + 7 * (i == 5) for i in range(12)]))
    metrics = (folder / "metrics.jsonl").read_bytes()
    match = (
        r"with \(then → now\): data: as it was, 11 samples looked at → 1 of them other ones; put"
    )
    with pytest.raises(ConfigError, match=match):
        again(folder, "train.steps=7")
    assert (folder / "metrics.jsonl").read_bytes() == metrics, "nothing was touched"
    monkeypatch.setenv("SHOAL_ATTEMPT", "1")
    code, told = again(folder, "train.steps=7")
    assert code == 0, "a restart of the same run never stops for it"
    assert told[-1].startswith("data: as it was")


def test_what_is_forced_goes_on_and_is_told(run: Any) -> None:
    folder, _ = run()
    code, told = again(folder, "optimizer.lr=0.5", "train.seed=3", "train.steps=5", force=True)
    assert code == 0
    assert told == ["optimizer.lr: 0.001 → 0.5", "train.steps: 4 → 5", "train.seed: 0 → 3"]
    assert start.prepare_run([], folder, 1).resumed, "what was forced is the run's from then on"


def test_an_own_loop_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rate, clipping and schedule, its own source, its data: a warning, and it goes on."""
    (tmp_path / "my_net.py").write_text("width = 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_net", raising=False)
    __import__("my_net")

    def made(lr: float, clip: float) -> Any:
        return run_of(
            linear(), lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),
            batch=4, micro_batch=4, folder=tmp_path / "run", clip=clip,
        )  # fmt: skip

    first, rows = made(0.1, 1.0), Rows(8)
    for batch in first.loader(rows):
        first.step(batch)
    first.save()
    first.close()
    (tmp_path / "my_net.py").write_text("width = 9\n")
    rows.targets = rows.targets + 1
    second = made(0.2, 0.5)
    caplog.clear()
    second.restore()
    (told,) = [r.getMessage() for r in caplog.records if "different" in r.getMessage()]
    assert told.startswith(
        "shoal: different from step 2: clip: 1.0 → 0.5; optimizer group 0: lr as"
    )
    assert "optimizer group 0: lr as given: 0.1 → 0.2" in told
    assert "my_net.py: as it was → changed" in told
    assert second.optimizer.param_groups[0]["lr"] == 0.1, "the rate is the loop's own state"
    caplog.clear()
    second.loader(rows)
    (told,) = [r.getMessage() for r in caplog.records if "different" in r.getMessage()]
    assert told.endswith(
        "different from the checkpoint: data: as it was, 8 samples looked at → 8 of them other ones"
    )
    second.close()


def test_which_keys_change_the_result() -> None:
    then = '[train]\nbatch = 8\nmicro_batch = 2\n[layout]\ncompress = "none"\ntp = 1\n'
    now = '[train]\nbatch = 16\nmicro_batch = 2\n[layout]\ncompress = "int8"\ntp = 2\n'
    found = {one.key: one.changes for one in compare_configurations(then, now)}
    assert found == {"train.batch": True, "layout.compress": True, "layout.tp": False}
    assert compare_configurations(then, then) == []
    assert compare_configurations("[[[", now) == []
    older = "[optimizer]\nlr = 0.001\n"  # another Shoal, with fewer keys
    assert compare_configurations(older, "[optimizer]\nlr = 0.001\nclip = 1.0\n") == []
    moved = ('[run]\nname = "a"\n', '[run]\nname = "b"\n')
    assert compare_configurations(*moved) == []
    assert [one.line for one in compare_configurations("[model]\nwidth = 3\n", "[model]\n")] == [
        "model.width: 3 → not given"
    ]


def test_versions_are_told_and_stop_nothing() -> None:
    found = compare_environments(
        {"versions": {"torch": "1.0", "python": environment.library_versions()["python"]}}
    )
    assert [one.line for one in found] == [f"version of torch: 1.0 → {torch.__version__}"]
    assert format_refusal("--resume a", 3, found) == ""
    assert format_refusal("--resume a", 3, [*found, Difference("data", 1, 2)]).count("→") == 2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (b"a = 1  # b\n", b"a = 1\n", True),
        (b"a = 1\n\n# b\nc = 2\n", b"a = 1\nc = 2\n", True),
        (b"a = '# b'\n", b"a = '# c'\n", False),
        (b'a = """\n# b\n\n"""\n', b'a = """\n"""\n', False),
        (b"a = 1  # don't\nb = 'c'\n", b"a = 1\nb = 'c'\n", True),
        (b"if a:\n    b\n", b"if a:\n  b\n", False),
    ],
)
def test_comments_and_empty_lines_are_not_code(
    tmp_path: Path, one: bytes, other: bytes, same: bool
) -> None:
    for name, text in (("one.py", one), ("other.py", other)):
        (tmp_path / name).write_bytes(text)
    found = [environment.source_digest(tmp_path / name) for name in ("one.py", "other.py")]
    assert (found[0] == found[1]) == same


def test_a_dataset_that_workers_read_is_looked_at_by_a_process_of_its_own() -> None:
    class Once(Rows):
        opened = False

        def __getitem__(self, index: int) -> Any:
            self.opened = True
            return super().__getitem__(index)

    rows = Once(8)
    seen = resume_checks.digest_samples(rows, 2)
    assert not rows.opened
    assert seen == resume_checks.digest_samples(rows, 0) != []


def test_paths_are_resolved_as_the_system_does(tmp_path: Path, monkeypatch: Any) -> None:
    """One question per folder, and not one per folder of each module."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real" / "inside").mkdir(parents=True)
    (tmp_path / "real" / "inside" / "one.py").touch()
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "real" / "two.py").symlink_to("inside/one.py")
    known: dict[str, str] = {}
    for path in (
        *("folder/inside/one.py", "folder/two.py", "folder/../real/two.py", "./real/two.py"),
        *(f"{tmp_path}/folder/inside/../two.py", f"{tmp_path}/real/inside/one.py", "none/x.py"),
        *(str(getattr(module, "__file__", "/")) for module in list(sys.modules.values())),
    ):
        assert environment._resolve(path, known) == os.path.realpath(path), path


def test_a_return_to_a_checkpoint_reports_no_difference_again() -> None:
    """As a replay that goes back where its run did: its settings are those of its start."""
    said: list[str] = []
    recorder = SimpleNamespace(
        events=SimpleNamespace(emit=lambda *_, **__: None),
        warn=said.append,
        reported_differences=set(),
    )
    run = SimpleNamespace(
        recorder=recorder,
        step_count=4,
        program=SimpleNamespace(world=SimpleNamespace(writes_files=True)),
    )
    for found in (["launch.restarts: 3 → 0"], ["launch.restarts: 3 → 0"], ["layout: ddp → fsdp"]):
        resume_checks.report_resume(run, Path("step-4"), found, False, here=True)
    assert said == [
        "different from step 4: launch.restarts: 3 → 0", "different from step 4: layout: ddp → fsdp"
    ]  # fmt: skip
