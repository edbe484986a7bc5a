"""Checks of written-out passes in a first step: terms of losses, coupled samples, own weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from shoal.parallel.program import Program
from shoal.trainer.guards.coupled_passes import CoupledPassesCheck
from shoal.trainer.guards.first_step_checks import refuse_mean
from shoal.trainer.guards.loss_terms import LossTermsCheck, read_script, watch_weight_gradients
from shoal.trainer.guards.pass_leaves import PassLeavesCheck
from shoal.trainer.step.micro_batch import JOINING


class PassChecks:
    """Checks of the passes of one step on this rank.

    Args:
        program: the run's.
        notice: prints a line of this rank.
        coupled_notice: prints a line that the trial of the passes may print too.
        passes: micro-batches of the step over all ranks, at most.
        coupled: samples of a micro-batch are compared on purpose.
        groups: of the optimizer.
    """

    def __init__(
        self,
        program: Program,
        notice: Callable[[str], None],
        coupled_notice: Callable[[str], None],
        *,
        passes: int,
        coupled: bool,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        self.program, self.notice = program, notice
        first, ranks = program.world.is_first, program.world.size if program.data.size > 1 else 1
        self._terms = LossTermsCheck(notice, is_first=first, passes=passes, ranks=ranks)
        self._leaves = PassLeavesCheck(program, notice)
        self._is_alone = passes < 2 or not first
        self._coupled: CoupledPassesCheck | None = None
        self._targets: Any = None
        if not self._is_alone and not coupled:
            self._coupled = CoupledPassesCheck(
                program.module,
                coupled_notice,
                passes,
                groups,
                differentiates=program.plan.layout.cp == 1,
            )

    @contextmanager
    def follow(self, targets: Any) -> Iterator[None]:
        """Follow the work of a loop on a micro-batch.

        Args:
            targets: of the micro-batch.
        """
        if self._coupled is not None:
            self._coupled.reset_outputs()
            self._targets = targets
        gradients = watch_weight_gradients(self.program, self.notice)
        with self._leaves.follow(), nullcontext() if self._is_alone else gradients:
            yield
        self._targets = None

    def check(self, index: int, loss: torch.Tensor, count: Any, call: int) -> None:
        """Check a loss that goes into a backward pass.

        Args:
            index: of the micro-batch.
            loss, count: as `run.backward` got them.
            call: the index of the call in its micro-batch.

        Raises:
            ConfigError: the loss is a mean with a count, or was summed over ranks.
        """
        if count is not None:
            refuse_mean(loss, count, "run.backward: got", 'reduction="sum"')
        if index == JOINING:
            return
        self._terms.check(loss, count, call)
        self._leaves.check(loss)
        if self._coupled is not None:
            self._coupled.check(loss, self._targets, read_script())

    def close(self) -> None:
        """Print what the passes together show, and remove hooks."""
        self._terms.close()
        if self._coupled is not None:
            self._coupled.close()
