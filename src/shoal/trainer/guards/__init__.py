"""Guards of a run: each watches its steps for one kind of mistake, in the order of their calls.

`guard.py` defines the interface of a guard. `reports/` holds the texts of errors and notices,
imported when there is one to print.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch

from shoal.parallel.program import Program
from shoal.trainer.guards.batch_consistency import BatchConsistencyGuard
from shoal.trainer.guards.corruption import CorruptionCheck
from shoal.trainer.guards.external_writes import ExternalWriteGuard
from shoal.trainer.guards.guard import Guard, Guards
from shoal.trainer.guards.hidden_state import HiddenStateGuard
from shoal.trainer.guards.model_checks import ModelGuard
from shoal.trainer.guards.optimizer_checks import OptimizerGuard
from shoal.trainer.guards.optimizer_settings import OptimizerSettingsGuard
from shoal.trainer.guards.untrained_weights import UntrainedWeightsGuard
from shoal.trainer.metrics_recorder import MetricsRecorder

if TYPE_CHECKING:
    from shoal.optim.average import WeightAverage
    from shoal.trainer.guards.rank_findings import RankFindings
    from shoal.trainer.step.call_contract import Loss


class RunGuards(Guards):
    """All guards of one run.

    Args:
        program: the run's.
        optimizer: the run's.
        recorder: prints lines, keeps events.
        average: of the weights, if the run keeps one.
        given: which of "batch" and "micro_batch" the user set.
        unheld: names of weights that no optimizer holds, and of those that look forgotten.
        agreed: returns whether all ranks pass the same text.

    Attributes:
        writes: finds foreign writes to weights and gradients, and memory corruption.
        optimizer: checks the optimizer, in the first steps above all.
        untrained: finds weights without a gradient.
        model: finds mistakes in the model's mode and hooks.
        batches: compares the batches of ranks, and knows how their lists are read.
        findings: prints lines of guards; of several ranks, those of each in the first steps.
    """

    def __init__(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer,
        recorder: MetricsRecorder,
        average: WeightAverage | None,
        given: Collection[str],
        unheld: tuple[Collection[str], Collection[str]],
        agreed: Callable[[str], bool],
    ) -> None:
        ranks = program.world.size
        self.findings: RankFindings | MetricsRecorder = recorder
        compared: list[Guard] = []
        if ranks > 1:
            from shoal.trainer.guards.rank_findings import RankFindings

            self.findings = findings = RankFindings(program, recorder)
            compared.append(findings)
            if program.data.size > 1 or program.plan.layout.cp > 1:
                from shoal.trainer.guards._torch import intercept_collectives

                intercept_collectives()
            divided = program.data.size == 1 or program.pipe.size > 1 or program.cuts
            if not divided and any(True for _ in program.module.buffers()):
                from shoal.trainer.guards.written_buffers import WrittenBuffersGuard

                compared.append(WrittenBuffersGuard(program, findings.notice))
        notice = self.findings.notice
        if program.plan.layout.tp > 1 or program.plan.layout.cp > 1:
            from shoal.trainer.guards.traced_values import TracedValuesGuard

            compared.append(TracedValuesGuard(program, notice))
        drift = CorruptionCheck(program, optimizer, average, recorder)
        self.writes = ExternalWriteGuard(program, optimizer, notice, agreed, drift)
        self.optimizer = OptimizerGuard(optimizer, program, notice)
        first = program.data.rank == program.tensor.rank == 0
        own = self.findings.emit_rank_notice if first else _drop_line
        stage = own if program.pipe.size > 1 else notice
        self.model = ModelGuard(program, "micro_batch" not in given, notice, stage)
        self.batches = BatchConsistencyGuard(
            program,
            program.plan.batch * ("batch" in given),
            notice,
            program.plan.micro_batch * ("micro_batch" in given),
            self.model.trial,
        )
        self.untrained = UntrainedWeightsGuard(program, *unheld, notice)
        super().__init__(
            [
                # Ranks that ran different blocks have mixtures for weights and gradients: what
                # later guards would find is a consequence.
                *layout_guards(program),
                # Before the weights, which differ because of it one step later.
                *([OptimizerSettingsGuard(optimizer, program.world)] if ranks > 1 else []),
                # Before the weights' checksums: an update that moved nothing ends the run.
                self.optimizer,
                # Before the batch: it may be right, and the weights wrong.
                self.writes,
                # Samples before the results that depend on them.
                self.batches,
                self.model,
                HiddenStateGuard(program, notice),
                # Innermost around the passes: it watches torch's `detach`, which others call.
                self.untrained,
                *compared,
            ],
            on=program.plan.guards == "on",
        )
        if not self.on:
            self.optimizer.state_checked = self.optimizer.movement.done = True
            self.writes.watching = False
            from shoal.trainer.guards.reports.start_report import OFF

            notice(OFF)

    def watch_loss(self, program: Program, loss: Loss | None) -> None:
        """Compare the tensors of a loss over ranks in the first steps, if it has some.

        Args:
            program: the run's.
            loss: the user's; None: user code computes it.
        """
        if program.world.size == 1 or loss is None:
            return
        from shoal.trainer.guards.loss_trial import list_loss_values

        values = list_loss_values(loss, program.module)
        tensors = {n: one for n, one in values.items() if isinstance(one, torch.Tensor)}
        if tensors:
            from shoal.trainer.guards.loss_tensors import LossTensorsGuard

            self.add(LossTensorsGuard(program, tensors, self.findings.notice))


def _drop_line(line: str) -> None:
    """Drop a line, which another rank of the stage prints."""


def layout_guards(program: Program) -> list[Guard]:
    """Return the guards that evaluations use too: those of layouts that gather blocks."""
    if program.unit_log is None:
        return []
    from shoal.trainer.guards.unit_order import UnitOrderGuard

    return [UnitOrderGuard(program.unit_log, program.world)]
