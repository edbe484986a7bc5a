"""`shoal compare`: which rows there are, what is refused, and one real comparison with a crash."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

import shoal
from forks import Forks
from shoal.base.estimates.facts import MachineFacts
from shoal.cli import compare_measure, main
from shoal.cli.compare_rows import (
    NOISE,
    check_memory,
    common_micro_batch,
    plan_rows,
    training_state_bytes,
)
from shoal.machine.states import count_state_bytes, measure_peak_bytes
from shoal.trainer.jobs.benchmark_row import relative_difference

MIB = 2**20


@pytest.fixture(autouse=True)
def start_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that is missed must fail, not start processes."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("processes were about to start")

    monkeypatch.setattr(compare_measure, "supervise", started)


def refused(*arguments: str) -> str:
    """The one line that the command says before it starts anything."""
    result: Result = CliRunner().invoke(main.app, ["compare", *arguments])
    failure = result.exception
    assert getattr(failure, "exit_code", None) == 2, (result.output, failure)
    assert "\n" not in str(failure)
    assert not Path("compare").exists(), "nothing was started or written"
    return str(failure)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--layouts ddp,fsdpp", "--layouts = fsdpp: not one of single, dp, ddp"),
        ("--layouts ,", "--layouts: is empty; try: --layouts single,ddp"),
        ("--processes 2,x", "--processes = 2,x: whole numbers from 1 are wanted"),
        ("--processes 0", "--processes = 0: whole numbers from 1 are wanted"),
        ("layout.dp_shard=2", "layout.dp_shard = 2: shoal compare takes layouts by name"),
        ("data.source=stdlb", "try: stdlib"),
        ("model.build=nowhere:build", "there is no module nowhere"),
        ("train.batch=10 train.micro_batch=4", "train.batch = 10: not divisible"),
        ("a.toml b.toml", "b.toml: one run.toml at most"),
    ],
)
def test_one_line_before_anything_starts(
    arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(*arguments.split())


def test_more_processes_than_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused("--layouts", "ddp", "--processes", "1,65536", "train.batch=65536")
    assert "--processes = 65536: the states of " in said
    assert " under ddp, this machine has " in said
    assert "; try: --processes " in said


def test_inside_a_launcher_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "run it without torchrun" in refused()


def test_the_nearest_count_fits() -> None:
    machine = MachineFacts(cores=2, memory_bytes=16 * 3 * MIB, gpus=0)
    rows = plan_rows(["single", "ddp", "fsdp"], [1, 4], batch=8, micro_batch=1)
    with pytest.raises(shoal.PlanError, match=r"--processes = 4: .* under ddp.*--processes 3$"):
        check_memory(rows, MIB, machine)
    check_memory([row for row in rows if row.strategy != "ddp"], MIB, machine)  # one copy in all
    with pytest.raises(shoal.PlanError, match=r"^single: .*try: a smaller model$"):
        check_memory(rows, 4 * MIB, machine)


@pytest.mark.parametrize(
    ("name", "per_rank"), [("ddp", 16), ("zero1", 10), ("zero2", 7), ("fsdp", 4)]
)
def test_states_are_split_as_the_stage_says(name: str, per_rank: int) -> None:
    (row,) = plan_rows([name], [4], batch=8, micro_batch=1)
    assert row.layout is not None
    assert training_state_bytes(row.layout, 1000) == 4 * per_rank * 1000


def test_rows_that_cannot_run_say_why() -> None:
    rows = plan_rows(["single", "dp", "ddp", "hsdp", "scaffold"], [1, 2, 3], batch=8, micro_batch=1)
    reasons = {(row.strategy, row.parts): row.reason for row in rows}
    assert reasons["single", 1] == reasons["dp", 2] == reasons["ddp", 2] == ""
    assert ("single", 2) not in reasons
    assert ("ddp", 1) not in reasons, "that is single"
    assert "is between islands" in reasons["scaffold", 2]
    assert "train.batch = 8: not divisible" in reasons["ddp", 3]
    assert "at least 2 × 2 processes" in reasons["hsdp", 2]
    (alone,) = plan_rows(["ddp"], [1], batch=8, micro_batch=1)
    assert alone.reason == "on one process it is single; try: --processes 1,2"


def test_every_state_counts_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64, affine=False))
    run = shoal.parallelize(model, lambda p: torch.optim.AdamW(p, fused=True), _squares)
    run.step((torch.randn(8, 64), torch.randn(8, 64)))
    held = count_state_bytes(run)
    matrix_bytes = 4 * 64 * 64
    assert matrix_bytes < held.weights < 1.05 * matrix_bytes, "the buffers of BatchNorm too"
    assert held.gradients == matrix_bytes
    assert 2 * matrix_bytes <= held.optimizer < 2.05 * matrix_bytes
    assert held.total == held.weights + held.gradients + held.optimizer


def _squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets) ** 2


def test_masters_are_optimizer_states_and_views_are_not_counted_again() -> None:
    module = nn.Linear(8, 8, bias=False)
    piece = nn.Parameter(module.weight.detach().view(-1)[:32])
    piece.grad = torch.zeros(32)
    master = torch.zeros(64, dtype=torch.float64)
    program = SimpleNamespace(
        module=module,
        local={"weight": SimpleNamespace(parameter=piece)},
        parts={"weight": (master, None)},
        reducer=SimpleNamespace(sums=lambda: [piece.grad[:16]]),
    )
    optimizer = torch.optim.SGD([piece])
    held = count_state_bytes(SimpleNamespace(program=program, optimizer=optimizer))
    assert (held.weights, held.gradients, held.optimizer) == (256, 128, 512)


def test_peak_of_what_comes_and_goes() -> None:
    """A gradient that is freed and made again each time is no addition to what was held."""
    kept = [torch.zeros(4 * MIB, dtype=torch.uint8)]

    def work() -> None:
        kept.clear()
        one = torch.zeros(2 * MIB, dtype=torch.uint8)
        del one
        kept.append(torch.zeros(4 * MIB, dtype=torch.uint8))
        two = torch.zeros(3 * MIB, dtype=torch.uint8)
        del two

    peak = measure_peak_bytes(work, torch.device("cpu"))
    assert 3 * MIB <= peak < 3.1 * MIB


def test_what_another_thread_frees_is_not_held_any_more() -> None:
    """gloo's threads often let go of a buffer last; the profiler alone would see it stay."""

    def work() -> None:
        for _ in range(4):
            sent = [torch.zeros(4 * MIB, dtype=torch.uint8)]
            thread = threading.Thread(target=sent.clear)
            thread.start()
            thread.join()

    peak = measure_peak_bytes(work, torch.device("cpu"))
    assert 4 * MIB <= peak < 4.1 * MIB


def test_what_another_thread_holds_counts() -> None:
    """gloo makes copies of its own in its threads, while the caller computes."""
    copies: list[torch.Tensor] = []

    def work() -> None:
        thread = threading.Thread(
            target=lambda: copies.append(torch.zeros(4 * MIB, dtype=torch.uint8))
        )
        thread.start()
        thread.join()
        one = torch.zeros(2 * MIB, dtype=torch.uint8)
        del one
        copies.clear()

    peak = measure_peak_bytes(work, torch.device("cpu"))
    assert 6 * MIB <= peak < 6.1 * MIB


def test_a_thread_that_was_late_once_does_not_change_the_figure() -> None:
    kept: list[torch.Tensor] = []
    turns = iter(range(100))

    def work() -> None:
        late = next(turns) == 3
        kept.append(torch.zeros(4 * MIB, dtype=torch.uint8))
        if late:
            kept.append(torch.zeros(8 * MIB, dtype=torch.uint8))
        kept.clear()

    peak = measure_peak_bytes(work, torch.device("cpu"))
    assert 4 * MIB <= peak < 4.1 * MIB


def test_distance_of_weights() -> None:
    one = {"w": torch.tensor([3.0, 4.0]), "n": torch.tensor(2)}
    assert relative_difference(one, one) == 0.0
    far = {**one, "w": torch.tensor([float("nan"), 4.0])}
    assert relative_difference(far, one) is None


TOY = """
import json, os, pathlib, signal, torch
from torch import nn

def began():
    lines = pathlib.Path("compare/custom-toy-1/rows.jsonl").read_text().splitlines()
    return json.loads(lines[-1]).get("began")

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))
    def forward(self, x):
        once = pathlib.Path("died-once")
        if os.environ["WORLD_SIZE"] == "2" and os.environ["RANK"] == "1" and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["WORLD_SIZE"] == "2" and os.environ["RANK"] == "1" and began() == 4:
            self.passes = getattr(self, "passes", 0) + 1
            if self.passes == 4:
                os.kill(os.getpid(), signal.SIGSTOP)
        return self.net(x)

def build():
    return Toy()

class Data:
    def __len__(self):
        return 30
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.tensor(index % 4)

def data():
    return Data(), Data()
"""


def test_rows_are_held_side_by_side_at_the_largest_size_that_each_can_run() -> None:
    """A pipeline wants two passes for each stage by itself, but runs two as well."""
    for names, counts, batch, size in (
        (["single"], [1], 16, 16),
        (["single", "ddp"], [1, 2], 16, 8),
        (["single", "ddp", "pp"], [1, 2, 4], 16, 4),
        (["ddp", "fsdp"], [2, 3], 24, 4),
        (["dualpipe", "ddp"], [2], 16, 4),
    ):
        rows = plan_rows(names, counts, batch=batch, micro_batch=0)
        assert not any(row.reason for row in rows), rows
        assert common_micro_batch(rows, batch) == size
    assert common_micro_batch(plan_rows(["ddp"], [3], batch=16, micro_batch=0), 16) == 2


def test_a_real_comparison(tmp_path: Path, programs: Forks) -> None:
    """Rows on 1 and 2 processes; rank 1 is killed in the first row of two, and hangs in the last."""
    (tmp_path / "toy.py").write_text(TOY)
    arguments = [
        "model.build=toy:build", "data.source=toy:data", "train.batch=8", "--json",
        "--layouts", "zero1,ddp,fsdp,zero2", "--processes", "1,2", "--steps", "3",
    ]  # fmt: skip
    done = programs.run("-m", "shoal", "compare", *arguments, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    folder = tmp_path / "compare" / "custom-toy-1"
    assert json.loads((folder / "compare.json").read_text()) == record
    assert not (tmp_path / "runs").exists()
    assert record["machine"]["torch"] == torch.__version__
    assert record["unit"] == "samples"
    rows = {row["layout"]: row for row in record["rows"]}
    assert list(rows) == ["single", "zero1", "ddp", "fsdp", "zero2"]
    hung = rows["zero2"]["reason"]
    assert hung.startswith("rank 1 hung in steps "), hung
    assert hung.endswith(": its process is stopped (SIGSTOP)")
    assert "rank 1 on " in done.stderr, "told with its stacks"
    (stacks,) = (folder / "logs").glob("hang-*.txt")
    assert str(stacks.relative_to(tmp_path)) in done.stderr
    assert "killed by SIGKILL" in rows["zero1"]["reason"]
    assert rows["zero1"]["per_s"] is rows["zero1"]["speedup"] is None
    single, ddp = rows["single"], rows["ddp"]
    assert single["speedup"] == 1.0
    for name, parts in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        row = rows[name]
        assert not row["reason"]
        assert row["parts"] == parts
        assert len(row["step_s"]) == 3
        assert len(row["losses"]) == 5, "those of the warm-up too"
        assert len(row["memory"]) == parts
        assert row["difference"] < NOISE["fp32"]
        assert not row["exceeds_noise"]
    # Bytes: gradients once, all-reduced over two ranks, and the tally's few numbers.
    sent = ddp["sent_bytes"]["all_reduce"]
    assert 4 * ddp["parameters"] <= sent < 4 * ddp["parameters"] + 400
    assert not sum(single["sent_bytes"].values())
    weights = [rank["weights"] for rank in rows["fsdp"]["memory"]]
    assert max(weights) < 0.6 * ddp["memory"][0]["weights"]
