"""A run folder belongs to one run; what is in it is never mixed with an earlier run's."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from trainer_small import Rows, linear, pair, run_of

import stranger
from shoal.base.errors import CheckpointError, ConfigError
from shoal.fabric import start_world
from shoal.trainer.run_folder.folder_lease import acquire_folder, check_shared_folder
from shoal.view.run_table import list_runs


def test_old_checkpoints_are_not_mixed_with_a_new_run(tmp_path: Path) -> None:
    first = run_of(linear(), folder=tmp_path)
    for _ in range(3):
        first.step(pair())
    first.save()
    first.close()
    second = run_of(linear(seed=1), folder=tmp_path)
    before = [p.clone() for p in second.model.parameters()]
    with pytest.raises(
        ConfigError, match="holds checkpoints of an earlier run, up to step 3; call"
    ):
        second.step(pair())
    assert all(torch.equal(a, b) for a, b in zip(before, second.model.parameters(), strict=True))
    assert second.restore()
    assert second.step(pair()).step == 4
    second.close()


def test_a_loop_records_its_plan_and_the_batch_once_it_is_known(tmp_path: Path) -> None:
    """Readers of the folder know the layout at once, the batch from its loader on."""
    run = run_of(linear(), folder=tmp_path)

    def recorded() -> tuple[int, int, str]:
        plan = json.loads((tmp_path / "plan.json").read_text())
        return plan["batch"], plan["accumulate"], plan["unit"]

    run.step(pair(6))  # a batch of any size
    assert recorded() == (0, 0, "targets")
    run.loader(Rows())
    assert recorded() == (32, 1, "targets")
    run.close()
    (row,) = list_runs(tmp_path)
    assert (row.state, row.layout, row.unit) == ("ended", "single", "targets")


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from shoal.checkpoint.format.lease import RunLease; "
        "lease = RunLease(Path(sys.argv[1]), 'x'); lease.acquire(); "
        "print('mine', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout.readline().strip() == "mine"
        with pytest.raises(CheckpointError, match=f"pid {owner.pid}"):
            run_of(linear(), folder=tmp_path)
    finally:
        owner.kill()
        owner.wait(10)
    run_of(linear(), folder=tmp_path).close()  # the kernel took the dead owner's lock away


def test_a_folder_of_somebody_elses_is_one_line(tmp_path: Path) -> None:
    """Whose it is, or that the disk refuses; with several ranks all of them say it."""
    stranger.needed("a run folder of another user's")
    folder, world = tmp_path / "theirs", start_world({})
    folder.mkdir()
    (shut := tmp_path / "shut").mkdir()
    shut.chmod(0o777)
    (shut / "owner.lock").touch(0o644)
    for parent in (folder, *list(folder.parents)[:3]):
        parent.chmod(0o755)

    def asked() -> list[str]:
        said = []
        for place, ask in ((folder, check_shared_folder), (shut, acquire_folder)):
            try:
                ask(place, world, *([said.append] if ask is acquire_folder else []))
            except (ConfigError, CheckpointError) as refused:
                said.append(str(refused))
        return said

    name = pwd.getpwuid(os.geteuid()).pw_name
    assert stranger.as_nobody(asked) == [
        f"folder = {place}: nothing can be written there: Permission denied (it is {name}'s); "
        f"try: another folder, or a copy of this one that is yours"
        for place in (folder, shut)
    ]


def test_what_is_damaged_in_the_folder_is_put_aside(tmp_path: Path) -> None:
    """As `shoal train --resume` does, before a loop of one's own writes on."""
    (tmp_path / "events.jsonl").write_bytes(b'{"event":"notice","text":"a"}\nnull\n{"event":"not')
    run_of(linear(), folder=tmp_path).close()
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").open()]
    assert told[0]["text"] == "a"
    assert told[1]["text"].endswith(
        "1 line that cannot be read, put aside into events.jsonl.damaged"
    )
    assert (tmp_path / "events.jsonl.damaged").read_bytes() == b"null\n"


def test_every_loader_resumes_where_it_stood(tmp_path: Path) -> None:
    """Two phases over two datasets of equal length, batches of the second taken ahead."""

    class Named(Rows):
        def __init__(self, start: int) -> None:
            super().__init__(22)
            self.start, self.seen = start, []

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.seen.append(index)
            return super().__getitem__(index)

    run = run_of(linear(), folder=tmp_path, batch=4, micro_batch=4)
    one, other = Named(0), Named(1)
    for _, batch in zip(range(2), run.loader(one), strict=False):
        run.step(batch)
    ahead = [batch for _, batch in zip(range(3), run.loader(other), strict=False)]
    run.step(ahead[0])
    run.save()
    run.close()
    again = run_of(linear(), folder=tmp_path, batch=4, micro_batch=4)
    assert again.restore()
    assert next(iter(again.loader(Named(0)))).position == 8
    assert next(iter(again.loader(Named(1)))).position == 4
    again.close()


def test_what_no_checkpoint_can_hold_is_refused_at_the_start(tmp_path: Path) -> None:
    model = linear()
    model.register_buffer("phase", torch.zeros(3, dtype=torch.complex128))
    with pytest.raises(ConfigError, match="model: phase is complex128, which checkpoints cannot"):
        run_of(model, folder=tmp_path)


class Averaging(nn.Module):
    """Keeps a moving average of its inputs in a buffer, as some users' modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x - self.average)


def test_a_skipped_step_leaves_a_moving_average_alone() -> None:
    run = run_of(Averaging())
    run.step(pair())
    kept = run.model.average.clone()
    inputs, targets = pair()
    assert run.step((inputs * float("nan"), targets)).skipped
    assert torch.equal(run.model.average, kept)
