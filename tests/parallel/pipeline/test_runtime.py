"""One rank's side of a pipeline: stages that hand over locally, short steps, what is refused."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "worlds"))

import pipe_case
from shoal.base.errors import BugError, ClusterError, PlanError
from shoal.base.plans.pipeline_actions import Action, PipelineSchedule
from shoal.fabric import start_world
from shoal.parallel.pipeline import runtime as pipe_runtime
from shoal.parallel.pipeline.runtime import PipeRuntime
from shoal.parallel.pipeline.stage_messages import (
    StageMessage,
    StageMessenger,
    derive_route,
    needed_message,
    produced_message,
)
from shoal.parallel.pipeline.stage_tensors import PlainTensorPacking, TensorForm
from shoal.planning.pipeline_schedules import make_schedule
from shoal.planning.schedule_checks import check_schedule


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 4), ("zbv", 1), ("gpipe", 1)])
def test_stages_of_one_rank_hand_over_without_messages(schedule: str, chunks: int) -> None:
    told = pipe_case.equality(start_world({}), schedule, 3, chunks)
    assert told["far"] <= 1e-14
    assert told["loss"] <= 1e-14
    assert told["eval"] <= 1e-14
    assert told["most"] == told["planned"]
    assert told["sent"] == [0, 0]
    assert told["left"] == 0
    assert told["armed"] == [False] * (told["closes"] - 1) + [True]


def test_a_step_without_micro_batches_does_nothing() -> None:
    reducer = pipe_case.Told()
    pipe_case.build(start_world({}), "gpipe", 1).run(None, [], reducer)
    assert reducer.armed == []


class Rank:
    """A place in a pipeline that nothing is sent from."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.group = rank, size, None
        self.device = torch.device("cpu")


def runtime(rank: int, size: int, name: str, **given: Any) -> PipeRuntime:
    make = functools.partial(make_schedule, name, size, **given)
    lists = make(2 * size)
    return PipeRuntime({}, lists.stage_rank, Rank(rank, size), make, copies=lists.copies)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 7, 9])
def test_a_short_step_is_the_next_full_one_without_the_rest(micro_batches: int) -> None:
    short = runtime(0, 4, "interleaved", chunks=2).schedule(micro_batches)
    full = make_schedule("interleaved", 4, -(-micro_batches // 4) * 4, chunks=2)
    assert short.micro_batches == micro_batches
    for few, all_of_them in zip(short.ranks, full.ranks, strict=True):
        assert list(few) == [act for act in all_of_them if act.micro_batch < micro_batches]
    kept = zip(check_schedule(short).in_flight, check_schedule(full).in_flight, strict=True)
    assert all(one <= other for one, other in kept)


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_two_copies_share_a_short_step(ranks: int) -> None:
    """Any number of micro-batches: half of them, or one more, go through the first copy."""
    pipe = runtime(0, ranks, "dualpipe")
    for micro_batches in range(1, 2 * ranks + 3):
        short = pipe.schedule(micro_batches)
        full = make_schedule("dualpipe", ranks, max(2 * ranks, micro_batches + micro_batches % 2))
        runs = {
            copy: {a.micro_batch for acts in short.ranks for a in acts if a.stage // ranks == copy}
            for copy in (0, 1)
        }
        first = (micro_batches + 1) // 2
        assert runs == {0: set(range(first)), 1: set(range(first, micro_batches))}
        kept = zip(check_schedule(short).in_flight, check_schedule(full).in_flight, strict=True)
        assert all(one <= other for one, other in kept)


def test_a_schedule_that_cannot_be_made_says_why() -> None:
    def never(micro_batches: int) -> PipelineSchedule:
        raise PlanError(f"no schedule for {micro_batches}")

    with pytest.raises(PlanError, match="no schedule for 3"):
        PipeRuntime({}, (0, 1), Rank(0, 2), never).schedule(3)


def test_stages_lie_where_the_schedule_runs_them() -> None:
    make = functools.partial(make_schedule, "gpipe", 2)
    with pytest.raises(BugError, match=r"gpipe holds its stages on ranks \(0, 1\), they lie on"):
        PipeRuntime({}, (1, 0), Rank(0, 2), make).schedule(2)


def test_a_list_that_is_no_step_is_not_run() -> None:
    wrong = PipelineSchedule("mine", ((Action("F", 0, 0),),), (0,), 1)
    with pytest.raises(PlanError, match="B0@0 is missing"):
        PipeRuntime({}, (0,), Rank(0, 1), lambda m: wrong).schedule(1)


@pytest.mark.parametrize(
    "schedule",
    [make_schedule("1f1b", 4, 6), make_schedule("interleaved", 4, 8, 2),
     make_schedule("zbv", 4, 8), make_schedule("dualpipe", 4, 8)],
    ids=lambda schedule: schedule.name,
)  # fmt: skip
def test_every_message_has_one_sender_and_one_taker(schedule: PipelineSchedule) -> None:
    acts = [act for acts in schedule.ranks for act in acts]
    made = [m for m in (produced_message(schedule, act) for act in acts) if m]
    taken = [m for m in (needed_message(schedule, act) for act in acts) if m]
    assert len(made) == len(set(made))
    assert sorted(made) == sorted(taken)
    rank_of = schedule.stage_rank
    between = {m for m in made if rank_of[m.stage] != rank_of[m.source]}
    routes = [derive_route(schedule, rank) for rank in range(len(schedule.ranks))]
    coming = [m for one in routes for told in one.incoming.values() for m in told]
    assert sorted(coming) == sorted(between)
    assert between == {m for one in routes for m in one.taken_at}


class Sent:
    """A wire that keeps what is sent, and never delivers."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor, peer: int) -> Sent:
        self.tensors.append(tensor)
        return self

    def receive(self, shape: Any, dtype: Any, peer: int) -> Sent:
        return self

    def wait(self) -> torch.Tensor:
        raise RuntimeError("Connection closed by peer\nand more")


def mail(rank: int) -> StageMessenger:
    schedule = make_schedule("gpipe", 3, 4)
    messages = StageMessenger(Rank(rank, 3))
    messages.wire = Sent()
    messages.start_step(derive_route(schedule, rank), schedule.stage_rank, lambda number: "alike")
    return messages


def test_shapes_that_depend_on_data_are_refused() -> None:
    messages = mail(0)
    one = TensorForm((2, 3), torch.float64, True)
    messages.send(StageMessage("F", 1, 0), [torch.zeros(2, 3)], (one,))
    messages.send(StageMessage("F", 1, 1), [torch.zeros(2, 3)], (one,))
    assert [tensor.dtype for tensor in messages.wire.tensors].count(torch.int64) == 2
    with pytest.raises(PlanError) as refused:
        messages.send(StageMessage("F", 1, 2), [torch.zeros(1, 3)], (one._replace(shape=(1, 3)),))
    assert str(refused.value) == (
        "pipeline: outputs of stage 0 for stage 1, micro-batch 2: are [1, 3] float64 with "
        "gradient, and were [2, 3] float64 with gradient for inputs of the same shapes: shapes "
        "that depend on data cannot cross between stages; try: another layout.pp, or "
        "layout.pp=1"
    )


def test_a_lost_message_is_named() -> None:
    with pytest.raises(ClusterError) as lost:
        mail(1).receive(StageMessage("F", 1, 0))
    assert str(lost.value) == (
        "pipeline: outputs of stage 0 for stage 1, micro-batch 0: did not come from rank 0 of the "
        "pipeline: Connection closed by peer"
    )
    messages = mail(1)
    messages.forms[2, "alike", True] = (TensorForm((), torch.float64, True),)
    with pytest.raises(ClusterError, match="gradients of stage 2 for stage 1, micro-batch 0: did"):
        messages.receive(StageMessage("B", 1, 0))
    messages = mail(1)
    messages.send(StageMessage("B", 0, 0), [torch.zeros(2)], ())
    with pytest.raises(ClusterError, match="rank 0 does not receive what was sent to it: Conn"):
        messages.wait_for_sends()


def test_receives_are_posted_ahead_as_far_as_their_form_is_known() -> None:
    messages = mail(1)
    messages.post_receive(StageMessage("F", 1, 1))
    assert messages.posted == {}  # the header is awaited by nobody yet
    messages.forms[1, "alike", True] = (TensorForm((2,), torch.float64, False),)
    messages.post_receive(StageMessage("F", 1, 1))
    assert list(messages.posted) == [StageMessage("F", 1, 0), StageMessage("F", 1, 1)]
    messages.posted.clear()
    messages.early = False
    messages.post_receive(StageMessage("F", 1, 3))
    assert messages.posted == {}


def test_on_a_device_receives_are_posted_ahead_once_its_allocator_asks_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two times in the first step, once for its update; then for a step of another shape."""
    asked = iter([0, 2, 3, 3, 3, 4])
    monkeypatch.setattr(pipe_runtime, "is_accelerator", lambda device: True)
    monkeypatch.setattr(pipe_runtime, "allocation_count", lambda device: next(asked))
    one = runtime(0, 2, "gpipe")
    assert not one.messages.early
    assert [one._allocator_was_idle() for _ in range(5)] == [False, False, True, True, False]
    monkeypatch.undo()
    one = runtime(0, 2, "gpipe")
    assert one.messages.early
    assert one._allocator_was_idle(), "on the CPU"


class Parts:
    """Stands for a tensor, as a part of one does."""

    def __init__(self, local: torch.Tensor, dim: int) -> None:
        self.local, self.dim = local, dim


class OfParts(PlainTensorPacking):
    def pack(self, value: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        return (value.local, (value.dim,)) if isinstance(value, Parts) else super().pack(value)

    def unpack(self, tensor: torch.Tensor, tag: tuple[int, ...]) -> Any:
        return Parts(tensor, *tag) if tag else tensor


class Doubles(nn.Module):
    """A stage that hands on a stand-in for its output."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.tensor(3.0, dtype=torch.float64)), last
        self.arrivals: tuple[Any, ...] = ()

    def forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        came = self.arrivals[0] if self.arrivals else Parts(inputs["x"], 5)
        assert came.dim == 5
        made = came.local * self.weight
        return made if self.last else (Parts(made, 5),)


def test_what_stands_for_a_tensor_crosses_as_it() -> None:
    make = functools.partial(make_schedule, "zbv", 1)
    stages = {s: pipe_case.Cut(Doubles(last=s == 1)) for s in (0, 1)}
    for stage in stages.values():
        stage.module.double()
    pipe = PipeRuntime(stages, (0, 0), start_world({}), make, OfParts())
    pipe.run(None, [pipe_case.Slow(0, {"x": torch.ones(1, 1)}, [])], pipe_case.Told())
    assert [float(s.module.weight.grad) for s in stages.values()] == [3.0, 3.0]
    with pytest.raises(BugError, match="a Parts cannot cross between stages"):
        PlainTensorPacking().pack(Parts(torch.ones(1), 0))
