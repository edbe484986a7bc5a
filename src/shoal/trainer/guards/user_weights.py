"""Weights as user code sees them between the calls of a run, where a layout splits them.

    tp, ep    a part on this rank     a norm, a sum or a mean of it gives one line
    pp        on another stage        a read of its numbers raises an error that names the stage
    fsdp      rows on every rank      as a whole tensor (`data_parallel/sharded_weights.py`), also
                                      where tp or ep cuts it
    others    whole on some ranks     tensors that are written into it are compared over ranks

A weight has another class while user code runs, and torch's own inside of the run's calls: a step
costs no more than two assignments for each such weight.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError, PlanError
from shoal.parallel.program import Program
from shoal.trainer.guards import reports
from shoal.trainer.guards._torch import (
    ABSENT,
    PARTS,
    AbsentParameter,
    WatchedParameter,
    intercept_collectives,
)
from shoal.trainer.guards._torch_parts import CUTS, PartCut, PartialParameter
from shoal.trainer.guards.call_log import CollectiveCallLog
from shoal.trainer.guards.checksums import SURE, fingerprint
from shoal.trainer.rebind_optimizer import extract_shard


class UserWeights:
    """Weights of a run that are not whole on this rank.

    Args:
        program: the run's.
        meeting: log of the run's calls.
        notice: prints a line, by rank 0.

    """

    def __init__(
        self, program: Program, meeting: CollectiveCallLog, notice: Callable[[str], None]
    ) -> None:
        self.program, self.meeting, self.notice = program, meeting, notice
        self._operands, self._numbers = 0, list[torch.Tensor]()
        self.kinds: list[tuple[Any, type, type]] = []
        named = list(program.module.named_parameters())
        self.names = {id(p): name for name, p in named}
        for name, p in named:
            if p.is_meta and type(p) is nn.Parameter:
                refuse = functools.partial(self._absent_error, name)
                ABSENT[id(p)] = (refuse, program.world.device)
                PARTS[id(p)] = self
                self.kinds.append((p, AbsentParameter, nn.Parameter))
            elif type(p) is nn.Parameter:  # whole, or a part
                PARTS[id(p)] = self
                kind = PartialParameter if name in program.cuts else WatchedParameter
                if name in program.cuts:
                    CUTS[id(p)] = find_part_cut(program, name, p)
                self.kinds.append((p, kind, nn.Parameter))
        self.sharded = [p for _, p in named if hasattr(p, "device_mesh")]
        self._inner_cuts: dict[int, Any] = {}
        if self.sharded:
            from shoal.parallel.data_parallel.inner_cuts import open_inner_cuts
            from shoal.parallel.data_parallel.sharded_weights import UserDTensor, readers

            self.kinds += [(p, UserDTensor, type(p)) for p in self.sharded]
            self._inner_cuts = open_inner_cuts(
                program, {self.names[id(p)]: p for p in self.sharded}
            )
            readers.append(self)
        self._layout = program.plan.layout.text()
        self._told = self._shown = False
        self._copied = self._refuse_copies()
        intercept_collectives()

    def _refuse_copies(self) -> list[nn.Module]:
        """Make deep copies of modules that are not whole here raise, in user code."""
        parts = {id(p) for p, kind, _ in self.kinds if kind is not WatchedParameter}
        found = [
            one
            for one in self.program.module.modules()
            if any(id(p) in parts for p in one.parameters())
        ]
        for one in found:
            vars(one)["__deepcopy__"] = functools.partial(self._copy_module, one)
            vars(one)["__reduce_ex__"] = functools.partial(self._pickle_module, one)
        return found

    def _pickle_module(self, module: nn.Module, protocol: Any) -> Any:
        """Return what pickles a module, inside of a call of the run."""
        if self._shown:
            raise reports.writes_report.pickle_error(type(module).__name__, self._layout)
        return type(module).__reduce_ex__(module, protocol)

    def _copy_module(self, module: nn.Module, memo: Any) -> nn.Module:
        """Return a deep copy of a module, inside of a call of the run."""
        if self._shown:
            raise reports.writes_report.copy_error(type(module).__name__, self._layout)
        held = vars(module)
        refusals = {name: held.pop(name) for name in ("__deepcopy__", "__reduce_ex__")}
        try:
            return copy.deepcopy(module, memo)
        finally:
            held |= refusals

    def show(self) -> None:
        """Give the weights the classes that user code sees."""
        self._shown = True
        gradients = self._gradients()  # first: later a read is user code's
        for p, kind, _ in self.kinds:
            p.__class__ = kind
        for p, gradient in gradients:
            gradient.__class__ = p.__class__
            if id(p) in self._inner_cuts:
                vars(gradient)["inner_cut"] = self._inner_cuts[id(p)]

    def hide(self) -> None:
        """Restore the weights' own torch classes while a call of the run lasts."""
        self._shown = False
        for p, _, kind in self.kinds:
            p.__class__ = kind
        for p, gradient in self._gradients():
            gradient.__class__ = p.__class__

    def _gradients(self) -> list[tuple[Any, Any]]:
        return [(p, p.grad) for p in self.sharded if p.grad is not None]

    def close(self) -> None:
        """Restore the weights' own torch classes, for good."""
        self.meeting.views.discard(self)
        self.hide()
        for one in self._copied:
            vars(one).pop("__deepcopy__", None)
            vars(one).pop("__reduce_ex__", None)
        for p, _, _ in self.kinds:
            PARTS.pop(id(p), None)
            ABSENT.pop(id(p), None)
            CUTS.pop(id(p), None)
        if self.sharded:
            from shoal.parallel.data_parallel.inner_cuts import close_inner_cuts
            from shoal.parallel.data_parallel.sharded_weights import readers

            close_inner_cuts(self._inner_cuts)
            readers[:] = [one for one in readers if one is not self]

    def record_gather(self, function: str) -> AbstractContextManager[None]:
        """Return a context that records a gather in user code, which every rank must make."""
        return self.meeting.at_once(f"{function} of a weight")

    def read_part(self, function: str) -> None:
        """Print a line, once, for a reduction of a part of a weight."""
        if not self._told:
            self._told = True
            self.notice(reports.writes_report.part_of_weight_line(function, self._layout))

    def compute_with_part(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Refuse a penalty on a part of a weight, in a loop that writes out the passes.

        Raises:
            PlanError: the result would be differentiated.
        """
        if self.meeting.in_passes and result.requires_grad and torch.is_grad_enabled():
            name = self.names.get(id(tensor), "a weight")
            raise PlanError(reports.writes_report.penalty_text(name, self._layout))

    @property
    def operands(self) -> int:
        """Return a checksum of the plain tensors that user code combined with weights."""
        numbers, self._numbers = self._numbers, []
        if numbers:
            self.note_operand(torch.stack(numbers))
        return self._operands

    def note_operand(self, tensor: torch.Tensor) -> None:
        """Note a plain tensor that user code combines with a weight, so that ranks compare."""
        if not tensor.ndim:  # read together: a device is waited for once
            self._numbers.append(tensor.detach().to(self.program.world.device, torch.float64))
            return
        self._operands = (31 * self._operands + fingerprint([tensor], whole=True)) % SURE

    def _absent_error(self, name: str) -> ConfigError:
        row = self.program.rows.get(self.program.aliases.get(name, name))
        stages = ", ".join(map(str, row.stages)) if row is not None else "?"
        return ConfigError(
            f"{name} is on stage {stages} of the pipeline, and this rank has no numbers of it "
            f"(stage {self.program.pipe.rank}); try: run.state_dict(), called on every rank, or "
            f"with run.whole_weights():"
        )


def find_part_cut(program: Program, name: str, part: torch.Tensor) -> PartCut:
    """Return how this rank's part of a weight lies in the whole.

    Args:
        program: the run's.
        name: of the weight.
        part: this rank's.
    """
    shard, shape = program.shard_of(name), part.shape

    def extract(whole: torch.Tensor) -> torch.Tensor:
        return extract_shard(whole, shard).view(shape)

    return PartCut(name, torch.Size(program.rows[name].shape), extract)
