"""Detect foreign writes to weights, gradients and the optimizer, and the ranks that made them.

Ranks agree on weights because all of them take the same steps. The user's own `optimizer.step()`,
`load_state_dict` on rank 0, a scheduler that follows a rank's own loss: each makes ranks diverge
without an error. torch counts the writes into every tensor, so reading the counters between two
steps costs microseconds. The step's one all-reduce compares written tensors over ranks.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.base.plans.placement import DATA_AXES, find_lowest_copies
from shoal.parallel._torch import version_counter
from shoal.parallel.program import Program
from shoal.trainer._torch import get_step_pre_hooks
from shoal.trainer.guards import reports
from shoal.trainer.guards.checksums import (
    Marks,
    fingerprint,
    has_nonzero_gradient,
    is_value_check_step,
    list_changed_gradients,
    read_gradient_marks,
)
from shoal.trainer.guards.corruption import CorruptionCheck
from shoal.trainer.guards.guard import Guard
from shoal.trainer.guards.model_checks import describe_layers, refuse_different_layers
from shoal.trainer.step.micro_batch import combine_contexts
from shoal.trainer.step.step_vector import Invariant, InvariantGroup, StepNumbers

if TYPE_CHECKING:  # steps that nobody writes out do without
    from shoal.trainer.guards.gradient_halves import HalfStepGradients

Holders = dict[str, tuple[int, int]]
"""Name of a parameter → ids of its layer and of itself; its number where passes replace it."""

Counters = dict[int, tuple[int, int, torch.dtype]]
"""By id of a tensor: its write counter, its address, its dtype."""

COMPARED = ("weights_written", "operands", "training_mode", "weights", "trainable", "layers")
"""Values that all ranks share; replicas share the last three."""

UNCOUNTED = 2
"""Value of `weights_written` for weights that changed though no write was counted."""

CLOSELY = 8
"""First steps in which every tensor's counter is read; most later steps read only a few."""

_all: weakref.WeakSet[ExternalWriteGuard] = weakref.WeakSet()


class ExternalWriteGuard(Guard):
    """Guard against foreign writes to weights, gradients, layers and modes.

    Args:
        program: the run's.
        optimizer: its optimizer, whose `step` only the run may call.
        notice: prints a line, by rank 0.
        agreed: returns whether all ranks pass the same text.
        drift: checks for silent corruption.

    Attributes:
        weights_written: foreign code wrote weights since the last step.
        changed_gradients: user code changed gradients between the passes and the update.
        watching: False: every change is intended.
        operands: returns a checksum of the plain tensors that user code combined with weights.
    """

    def __init__(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer,
        notice: Callable[[str], None],
        agreed: Callable[[str], bool],
        drift: CorruptionCheck,
    ) -> None:
        self.program, self.optimizer, self.notice = program, optimizer, notice
        self._agreed, self.drift = agreed, drift
        self.ours, self.watching = False, True
        self.weights_written = self._uncounted = False
        self.changed_gradients = False
        self._step, self._call = 0, "run.forward_backward"
        self._halves: HalfStepGradients | None = None
        pieces = {id(one.parameter): one.parameter for one in program.local.values()}
        if program.plan.layout.zero < 3:  # under zero 3 torch makes them anew in every pass
            pieces.update({id(p): p for p in program.parameters.values()})
        self.pieces: list[nn.Parameter] = list(pieces.values())
        pieces.update({id(p): p for p in program.parameters.values()})
        self.graded: list[nn.Parameter] = list(pieces.values())
        # From the first to the last: most writes touch most weights.
        self._some = [each[:: max(1, len(each) // CLOSELY)] for each in (self.pieces, self.graded)]
        self._counted = [[(id(p), p) for p in each] for each in (self._some[0], self.pieces)]
        self._closely, self._under_way = True, False
        self._in_parts = program.plan.layout.zero > 0 or bool(program.cuts) or program.pipe.size > 1
        world, replicas = program.world, program.replicas
        self._everyone = InvariantGroup(range(world.size), world.rank)
        places = {number: rank for rank, number in enumerate(world.ranks)}
        alike = [places[number] for number in replicas.ranks]
        if (layout := program.plan.layout).cp > 1 and program.mirrored is None:
            lowest = find_lowest_copies(layout, world.size, (*DATA_AXES, "cp"), ())
            alike = [rank for rank, first in enumerate(lowest) if first == lowest[world.rank]]
        self._replicas = InvariantGroup(alike, world.rank)
        self._weights = self._read_counters()
        self._gradients: Marks = read_gradient_marks(self.graded)
        self._bits = fingerprint(self.pieces)
        self._training = self._count_trainable()
        self._held = self._parameter_owners()
        self._hook = optimizer.register_step_pre_hook(self._refuse_foreign_step)
        self._parts_written = self._other_made = self._own_write = False
        self.operands: Callable[[], int] = _no_operands
        watch_new_optimizers()
        _all.add(self)

    @property
    def checked_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are checked in the current step."""
        return self.graded if self._closely else self._some[1]

    def before(self, step: int, batch: Any) -> None:
        """Check weights and gradients before a step.

        Raises:
            ConfigError: gradients that no step will use, or other parameters than before.
        """
        self._step = step
        changed = self._changed_gradients() if self.watching else []  # of aliases, where they lie
        if self._halves is not None:
            self._halves.release()
        for one in list(_all) if len(_all) > 1 else ():
            # The loss of one run may go through the model of another.
            if one is not self and one._halves is not None:
                one._halves.release_if_over()
        if not self.watching:
            return
        failed, self._under_way = self._under_way, True  # a step that failed leaves half gradients
        if changed and not failed and has_nonzero_gradient(changed):
            self._under_way = False
            raise reports.writes_report.foreign_change_error()
        if self._closely and (held := self._parameter_owners()) != self._held:
            reports.writes_report.refuse_changed_modules(self._held, held)
        if self._closely and (trains := self._count_trainable()) != self._training:
            self._training = trains
            if self.program.plan.layout.zero == 3:  # else the step's all-reduce finds it
                reports.writes_report.refuse_changed_trainable(step, trains, self._agreed)
        now = self._read_counters()
        self.weights_written = now != self._weights
        if self.weights_written:
            reports.writes_report.refuse_moved_weights(self.program, self._weights, now)
            self._note_written_parts(now)
        self._uncounted = False
        if not self.weights_written and is_value_check_step(
            step
        ):  # `.data` leaves no trace in the counters
            self.weights_written = self._uncounted = fingerprint(self.pieces) != self._bits

    def _note_written_parts(self, now: Counters) -> None:
        """Print a line, once, if user code wrote weights of which each rank holds a part."""
        held = self.program.parameters
        names = [
            name
            for name in self.program.cuts
            if name in held and now.get(id(held[name])) != self._weights.get(id(held[name]))
        ]
        if names and not self._parts_written and not self._own_write:
            self._parts_written = True
            layout = self.program.plan.layout.text()
            self.notice(reports.writes_report.written_parts_line(names, layout))

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept another optimizer that the user set as `run.optimizer`.

        Raises:
            ConfigError: it holds whole weights, and the layout steps parts of them.
        """
        if self.program.plan.layout.zero in (1, 2):
            raise reports.optimizer_report.other_optimizer_error(self.program.plan.layout.text())
        self._hook.remove()
        self.optimizer = optimizer
        self._hook = optimizer.register_step_pre_hook(self._refuse_foreign_step)

    def note_new_optimizer(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
    ) -> None:
        """Print a line if user code makes an optimizer over weights of this run.

        Args:
            optimizer: the new one.
            group: its parameters.
        """
        ours = {id(p) for p in self.program.parameters.values()}
        given = group.get("params", ())
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        mine = [p for p in given if id(p) in ours]
        if mine and optimizer is not self.optimizer and not self.ours and not self._other_made:
            self._other_made = True
            self.notice(reports.optimizer_report.new_optimizer_line(type(optimizer).__name__))

    def between(self, step: int) -> None:
        """Check what user code did to the gradients since the passes.

        Raises:
            ConfigError: all gradients were removed.
        """
        regraded = self._changed_gradients() if self.watching else []
        rows = self._halves is not None and self._halves.close()  # puts aliases' gradients back
        self.changed_gradients = rows or bool(regraded)
        if regraded:
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            reports.writes_report.refuse_dropped_gradients(
                held, self._gradients, self._step, self._call
            )

    def mark_own_step(self) -> AbstractContextManager[None]:
        """Return the context of the run's own step of the optimizer.

        It raises a ConfigError if a step hook of the user's takes a part's norm for the whole
        gradient's.
        """
        if not self._in_parts or len(get_step_pre_hooks(self.optimizer)) == 1:
            return _OwnStep(self)
        from shoal.trainer.guards.gradient_passes import HookGradients

        stepped = [one.parameter for one in self.program.local.values()]
        hooks = HookGradients(self.program, stepped, self._step).watch_hooks(self.optimizer)
        return combine_contexts(_OwnStep(self), hooks)

    def sums(self, step: int) -> Mapping[str, Sequence[float]]:
        """Return the number of ranks with uncounted writes, and the corruption check's sums."""
        return {"uncounted": [float(self._uncounted)], "drift": self.drift.sums()}

    def invariants(self, step: int) -> Sequence[Invariant]:
        """Return the values that must be equal on all ranks that train one model.

        Written weights are read whole; others in part, in steps 1, 2, 4, 8, …
        """
        program, everyone, replicas = self.program, self._everyone, self._replicas
        if everyone.size == 1 and not is_value_check_step(step):  # whose report reads them
            return ()
        written = UNCOUNTED if self._uncounted else int(self.weights_written)
        holders = replicas if program.pipe.size > 1 else everyone  # stages hold unlike weights
        found = [
            Invariant("weights_written", written, holders),
            Invariant("training_mode", program.module.training, everyone),
        ]
        if self.operands is not _no_operands:
            found.append(Invariant("operands", self.operands(), everyone))
        if program.plan.layout.zero < 3 and (self.weights_written or is_value_check_step(step)):
            held = [p for name, p in program.parameters.items() if not program.is_expert(name)]
            read = fingerprint(held, whole=self.weights_written)
            found.append(Invariant("weights", int(read), replicas))
        if self._closely:
            found.append(Invariant("trainable", self._count_trainable(), replicas))
        if is_value_check_step(step):
            layers = zlib.crc32("\n".join(describe_layers(program.module)).encode())
            found.append(Invariant("layers", layers, replicas))
        return [*found, *self.drift.invariants()]

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """Refuse the update if ranks hold different models, or if other code wrote to weights.

        Args:
            step: number of the step, from 1; 0: an evaluation.
            numbers: the all-reduced `sums` and `invariants` of all ranks.

        Raises:
            ConfigError: the same on all ranks.
        """
        if len(_all) > 1:  # losses may run other runs' models
            for one in [each for each in _all if each is not self]:
                one._gradients = read_gradient_marks(one.checked_parameters)
        if not self.watching:
            return
        # First the certain bit flips: they must not be reported as the user's mistake.
        self.drift.agree(numbers, alone=True)
        if numbers.sums("uncounted")[0] or numbers.invariants.differs(*COMPARED):
            reports.writes_report.refuse_rank_differences(
                self, step, numbers.invariants, refuse_different_layers
            )
        self.drift.agree(numbers)

    def allow_write(self, *, soon: bool = True) -> None:
        """Accept what Shoal itself has written to weights since the last step.

        Args:
            soon: as of `discard_checksums`.
        """
        self._own_write = True
        self.drift.discard_checksums(soon=soon)

    def after(self, following: int = 0, call: str = "run.forward_backward") -> None:
        """Record the state after a step, half of one, or an evaluation.

        Args:
            following: the step that comes next, if weights may have moved.
            call: the call that ended the passes of half a step.
        """
        self._under_way = self._own_write = False
        if following:
            self._closely = following <= CLOSELY or is_value_check_step(following)
        self._weights = self._read_counters()
        if is_value_check_step(following):
            self._bits = fingerprint(self.pieces)
        if self._in_parts and self.watching:
            from shoal.trainer.guards.gradient_halves import HalfStepGradients

            self._halves = self._halves or HalfStepGradients(self.program, self.notice)
            if following:
                self._halves.forbid_clipping()
            else:
                self._halves.open(self._step, call)
        self._call = call
        for one in list(_all) if len(_all) > 1 else (self,):
            one._gradients = read_gradient_marks(one.checked_parameters)

    def updated(self, step: int, *, skipped: bool = False) -> None:
        """Record the state after the update of a step, or after its checkpoint was loaded."""
        self.after(step + 1)
        if self.watching:
            self.drift.record_checksums(step)

    def close(self) -> None:
        """Remove the hooks from the optimizer and the gradients."""
        self._hook.remove()
        _all.discard(self)
        if self._halves is not None:
            self._halves.release()

    def _parameter_owners(self) -> Holders:
        """Return a parameter's name → ids of its layer, and of itself if no pass replaces it."""
        stays, order = self.program.plan.layout.zero < 3, dict[int, int]()
        return {
            # Under zero 3: its number, equal for tied ones.
            f"{name}.{key}".lstrip("."): (
                id(layer),
                id(parameter) if stays else order.setdefault(id(parameter), len(order)),
            )
            for name, layer in self.program.module.named_modules()
            for key, parameter in layer._parameters.items()
            if parameter is not None
        }

    def _count_trainable(self) -> int:
        return sum(p.requires_grad for p in self.program.parameters.values())

    def _read_counters(self) -> Counters:
        some = self._counted[self._closely]
        return {key: (version_counter(p), p.data_ptr(), p.dtype) for key, p in some}

    def _changed_gradients(self) -> list[nn.Parameter]:
        return list_changed_gradients(self._gradients, self.graded)

    def _refuse_foreign_step(self, *_what: object) -> None:
        if self.watching and not self.ours:
            raise reports.optimizer_report.foreign_step_error()


class _OwnStep(AbstractContextManager[None]):
    """Context in which a run's own optimizer steps; as a generator it would take five more calls.

    Args:
        guard: of the run.
    """

    def __init__(self, guard: ExternalWriteGuard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._guard.ours = True

    def __exit__(self, *_what: object) -> None:
        self._guard.ours = False


@functools.cache
def watch_new_optimizers() -> None:
    """Make torch's optimizers report groups of parameters that they are given, from now on."""
    add: Any = torch.optim.Optimizer.add_param_group

    @functools.wraps(add)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        if isinstance(given := param_group.get("params"), Iterator):  # read twice
            param_group = {**param_group, "params": list(given)}
        for one in list(_all):
            if one.watching:
                one.note_new_optimizer(self, param_group)
        add(self, param_group)

    torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def is_watched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter of a run of this process."""
    return any(one is tensor for guard in _all for one in guard.graded)


def _no_operands() -> int:
    """Return the checksum of no tensors, under layouts whose ranks hold every weight."""
    return 0
