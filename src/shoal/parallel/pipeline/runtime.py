"""Run a pipeline's action lists: this rank's stages, one action after another, with messages.

    F   wait for the outputs of the stage before; run the stage; send its outputs on
    B   wait for the gradients of those outputs; run backward; send the gradients of the inputs back
    I   the same for the gradients of the inputs only · W  later, those of the weights

Order of one action: wait for its inputs, post the receives of the next one, compute, send. Between
its F and its B or W a micro-batch keeps its graph, by the edges of its outputs, and its
arrivals, so as much is alive as the schedule counts. Gradients are sums over micro-batches in the
order of the list.

A short step has fewer micro-batches than the schedule can be made for (a multiple of the ranks for
`interleaved`): the list of the next larger step is run, without the missing micro-batches.
No action waits for those, and no rank keeps more than in a full step. If the schedule holds
two copies of the model (dualpipe), each runs its part of a step's micro-batches; an evaluation goes
through the first.
Source: Narayanan et al. 2021; Qi et al. 2023; the lists are the planner's
(planning/pipeline_schedules.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shoal.base.errors import BugError, PlanError
from shoal.base.plans.pipeline_actions import Action, PipelineSchedule
from shoal.fabric import World
from shoal.fabric.device import allocation_count, is_accelerator
from shoal.parallel.pipeline.action_times import ActionTimes
from shoal.parallel.pipeline.stage_messages import (
    MessageRoute,
    StageMessage,
    StageMessenger,
    derive_route,
    needed_message,
    produced_message,
)
from shoal.parallel.pipeline.stage_tensors import (
    Form,
    PlainTensorPacking,
    TensorForm,
    ValuePacking,
    to_non_leaf,
)
from shoal.parallel.program import Pass, Program, Reducer
from shoal.planning.pipeline_schedules import shorten_schedule
from shoal.planning.schedule_checks import CLOSES, check_schedule
from shoal.wire import phases

if TYPE_CHECKING:  # imported late: most schedules never split a backward pass
    from shoal.parallel.pipeline.split_backward import WeightGradients


class RunnableStage(Protocol):
    """Protocol of a stage: a piece of the model that the runtime runs."""

    def run(self, call: Callable[[Any], Any], arrivals: tuple[Any, ...]) -> Any:
        """Return the tensors for the next stage, or the model's outputs on the last one."""

    def check_forwards(self) -> None:
        """Raise PlanError if user code has set a forward that a stage needs."""


FORWARD_ONLY = 0
"""Key, instead of a number of micro-batches, of the action list of an evaluation."""


class PipeRuntime:
    """Runtime of one rank of a pipeline.

    Attributes:
        stages: this rank's, by number.
        stage_rank: rank of `pipe` that holds stage 0, 1, …
        pipe: the ranks of this pipeline.
        make: returns the action lists for a number of micro-batches, the same on every rank;
            PlanError if the schedule cannot have that number.
        crossing: packs the values that pass between stages.
        copies: of the model, as in `PipelineSchedule`.
        kept: micro-batches whose graph is alive now, as (stage, micro-batch).
        times: of the actions, in the steps for which they are requested.
    """

    def __init__(
        self,
        stages: Mapping[int, RunnableStage],
        stage_rank: Sequence[int],
        pipe: World,
        make: Callable[[int], PipelineSchedule],
        crossing: ValuePacking | None = None,
        copies: int = 1,
    ) -> None:
        self.stages, self.stage_rank, self.pipe = dict(stages), tuple(stage_rank), pipe
        self.make = make
        self.crossing = crossing or PlainTensorPacking()
        self.pieces = len(self.stage_rank) // copies
        self.messages = StageMessenger(pipe)
        self.times = ActionTimes(pipe.device)
        self.asked = allocation_count(pipe.device)
        self.messages.early = not is_accelerator(pipe.device)
        self.schedules: dict[int, PipelineSchedule] = {}
        self.routes: dict[int, MessageRoute] = {}
        self.kept: dict[tuple[int, int], _OpenMicroBatch] = {}

    def run(self, program: Program, passes: Sequence[Pass], reducer: Reducer) -> None:
        """Run one step's passes, forward and backward; to be a program's `run`.

        Args:
            passes: the micro-batches of this pipeline, the same on all its ranks; may be none.

        Raises:
            PlanError: shapes that depend on data, or a forward that user code has set.
            ClusterError: a message is lost.
        """
        if not passes:
            return
        for stage in self.stages.values():
            stage.check_forwards()
        schedule = self.schedule(len(passes))
        acts = schedule.ranks[self.pipe.rank]
        last = max((n for n, act in enumerate(acts) if act.kind in CLOSES), default=-1)
        step = self._start_step(len(passes), passes)
        for position, act in enumerate(acts):
            closes = act.kind in CLOSES
            if closes:
                reducer.prepare_backward(position == last)
            if (mark := self.times.mark_action) is None:
                step.run_action(position)
            else:
                with mark(act):
                    step.run_action(position)
            if closes:
                reducer.end_backward(passes[act.micro_batch].index >= 0)
        self.messages.wait_for_sends()
        self.messages.early = self._allocator_was_idle()

    def _allocator_was_idle(self) -> bool:
        """Return whether the allocator took no device memory since the last call."""
        before, self.asked = self.asked, allocation_count(self.pipe.device)
        return self.asked == before

    @torch.no_grad()
    def forward_only(self, one: Pass) -> Any:
        """Return the model's outputs for one micro-batch on the rank of the last stage, else None.

        Every rank of the pipeline calls it for the same micro-batches in the same order. The first
        stages go on with the next one meanwhile. Call `settle` after the last.
        """
        if FORWARD_ONLY not in self.schedules:
            first_copy = self.stage_rank[: self.pieces]
            lists = [
                tuple(Action("F", s, 0) for s, at in enumerate(first_copy) if at == rank)
                for rank in range(self.pipe.size)
            ]
            found = PipelineSchedule("forward only", tuple(lists), first_copy, 1)
            self.schedules[FORWARD_ONLY] = found
        step = self._start_step(FORWARD_ONLY, [one])
        for position in range(len(step.acts)):
            step.run_action(position)
        return step.outputs

    def wait_for_sends(self) -> None:
        """Wait until the other ranks have received all messages of this one."""
        self.messages.wait_for_sends()

    def schedule(self, micro_batches: int) -> PipelineSchedule:
        """Return the checked lists for a number of micro-batches, also of short steps."""
        if micro_batches not in self.schedules:
            full = self._smallest_schedule(micro_batches)
            if full.stage_rank != self.stage_rank:
                raise BugError(
                    f"pipeline: schedule {full.name} holds its stages on ranks {full.stage_rank}, "
                    f"they lie on {self.stage_rank}"
                )
            short = shorten_schedule(full, micro_batches)
            check_schedule(short)
            self.schedules[micro_batches] = short
        return self.schedules[micro_batches]

    def _smallest_schedule(self, micro_batches: int) -> PipelineSchedule:
        """Return the schedule of the fewest micro-batches, at least this many, that is possible."""
        why: PlanError | None = None
        for more in range(2 * self.pipe.size):
            try:
                return self.make(micro_batches + more)
            except PlanError as cannot:
                why = why or cannot
        raise why or BugError("pipeline: no rank")

    def _start_step(self, number: int, passes: Sequence[Pass]) -> _PipelineStep:
        schedule = self.schedules[number]
        if number not in self.routes:
            self.routes[number] = derive_route(schedule, self.pipe.rank)
        signature = functools.cache(lambda place: passes[place].signature)
        self.messages.start_step(self.routes[number], self.stage_rank, signature)
        self.kept.clear()
        if number == FORWARD_ONLY or not self.times.is_wanted:
            return _PipelineStep(self, schedule, passes)
        self.times.start_actions(schedule.ranks[self.pipe.rank])
        return _TimedStep(self, schedule, passes)


@dataclass
class _OpenMicroBatch:
    """State of one micro-batch on one stage until its backward pass.

    Attributes:
        roots: edges of the outputs that need a gradient, or of the loss.
        seed: the loss's own gradient, on the last stage.
        leaves: arrivals that get a gradient.
        weights: the remaining work after I.
    """

    roots: list[GradientEdge]
    seed: torch.Tensor | None
    leaves: list[torch.Tensor]
    weights: WeightGradients | None = None


class _PipelineStep:
    """One step of one rank: its list, and the tensors passed between its own stages."""

    def __init__(
        self, runtime: PipeRuntime, schedule: PipelineSchedule, passes: Sequence[Pass]
    ) -> None:
        self.runtime, self.schedule, self.passes = runtime, schedule, passes
        self.messages = runtime.messages
        self.acts = schedule.ranks[runtime.pipe.rank]
        self.here: dict[StageMessage, tuple[list[torch.Tensor], Form]] = {}
        self.outputs: Any = None

    def run_action(self, position: int) -> None:
        """Run one action: wait, post, compute, send; see the module."""
        act = self.acts[position]
        tensors, form = self._receive(needed_message(self.schedule, act))
        if position + 1 < len(self.acts):
            coming = needed_message(self.schedule, self.acts[position + 1])
            if coming is not None and not self.messages.is_local(coming):
                self.messages.post_receive(coming)
        with self.passes[act.micro_batch].keyed_context():
            if act.kind == "F":
                made, form = self._forward(act, tensors, form)
            else:
                phases.record_step_part(phases.BACKWARD)
                made, form = self._backward(act, tensors), ()
                phases.record_step_part(phases.PASSES)
        self._send(produced_message(self.schedule, act), made, form)

    def _receive(self, message: StageMessage | None) -> tuple[list[torch.Tensor], Form]:
        if message is None:
            return [], ()
        if self.messages.is_local(message):
            return self.here.pop(message)
        return self.messages.receive(message)

    def _send(self, message: StageMessage | None, tensors: list[torch.Tensor], form: Form) -> None:
        if message is None:
            return
        if self.messages.is_local(message):
            self.here[message] = tensors, form
        else:
            self.messages.send(message, tensors, form)

    def _forward(
        self, act: Action, tensors: list[torch.Tensor], form: Form
    ) -> tuple[list[torch.Tensor], Form]:
        """Run the stage; return the crossing tensors, detached from the graph, which is kept."""
        runtime, one = self.runtime, self.passes[act.micro_batch]
        arrivals, leaves = [], []
        for tensor, value in zip(tensors, form, strict=True):
            if value.requires_grad and torch.is_grad_enabled():
                leaves.append(tensor.requires_grad_())
                tensor = to_non_leaf(tensor)
            arrivals.append(runtime.crossing.unpack(tensor, value.tag))
        outputs = runtime.stages[act.stage].run(one.outputs, tuple(arrivals))
        if act.stage % self.schedule.stages_per_copy == self.schedule.stages_per_copy - 1:
            if torch.is_grad_enabled():
                self._keep_graph(act, [one.compute_loss(outputs)], leaves, is_loss=True)
            else:
                self.outputs = outputs
            return [], ()
        packed = [runtime.crossing.pack(value) for value in outputs]
        values = [value for value, _ in packed]
        if torch.is_grad_enabled():
            self._keep_graph(act, values, leaves, is_loss=False)
        crossing = tuple(
            TensorForm(tuple(value.shape), value.dtype, value.requires_grad, tag)
            for value, tag in packed
        )
        return [value.detach() for value in values], crossing

    def _keep_graph(
        self, act: Action, values: list[torch.Tensor], leaves: list[torch.Tensor], *, is_loss: bool
    ) -> None:
        # Edges, not tensors: the memory of the outputs is free once they were sent.
        roots = [get_gradient_edge(value) for value in values if value.requires_grad]
        seed = torch.ones_like(values[0]) if is_loss else None
        self.runtime.kept[act.stage, act.micro_batch] = _OpenMicroBatch(roots, seed, leaves)

    def _backward(self, act: Action, seeds: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run B, I or W; return the gradients of the arrivals, zeros for missing ones."""
        key = act.stage, act.micro_batch
        if act.kind == "W":
            weights = self.runtime.kept.pop(key).weights
            if weights is not None:
                weights.accumulate()
            return []
        kept = self.runtime.kept[key]
        if kept.seed is not None:
            seeds = [kept.seed] if kept.roots else []
        if act.kind == "I":
            from shoal.parallel.pipeline.split_backward import input_gradients

            found, kept.weights = input_gradients(kept.roots, seeds, kept.leaves)
        else:
            del self.runtime.kept[key]
            if kept.roots:
                torch.autograd.backward(kept.roots, seeds)
            found = tuple(leaf.grad for leaf in kept.leaves)
        gradients = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(kept.leaves, found, strict=True)
        ]
        kept.roots, kept.leaves = [], []
        return gradients


class _TimedStep(_PipelineStep):
    """A step whose actions are timed: before its wait, before its work, after its work."""

    def _receive(self, message: StageMessage | None) -> tuple[list[torch.Tensor], Form]:
        self.runtime.times.read()
        found = super()._receive(message)
        self.runtime.times.read()
        return found

    def _send(self, message: StageMessage | None, tensors: list[torch.Tensor], form: Form) -> None:
        self.runtime.times.read()
        super()._send(message, tensors, form)
