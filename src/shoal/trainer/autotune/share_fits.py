"""Check that a rank's whole share fits into one forward pass, when a first loader is opened.

A user's own loop passes its model to `parallelize`, and its samples to the loader. A copy of the
model on the meta device then runs two samples, and the check counts the bytes that autograd saves.
If that leaves half of the memory free, the share is one pass. Else, and on accelerators, the
planner chooses (`micro_batch_size.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.base.errors import ConfigError, PlanError
from shoal.base.estimates.facts import FREE, STATE_BYTES, read_machine_facts
from shoal.base.plans.plan import Plan
from shoal.data.loading.dataset_kind import Collate, is_indexed
from shoal.data.loading.sample_inspection import first_samples
from shoal.fabric import World
from shoal.fabric.device import is_accelerator
from shoal.trace.isolation.module_copies import copy_to_meta
from shoal.trainer._torch import pytree
from shoal.trainer.step.call_contract import Loss, split_batch

if TYPE_CHECKING:
    from shoal.base.estimates.estimate import ModelFacts
    from shoal.trainer.autotune.trial_passes import PassBytes, Trial
    from shoal.trainer.run import Run

EXAMPLES = 2
"""Samples of the batch that the meta copy runs."""

WHOLE = ("single", "ddp", "zero1", "zero2")
"""Strategies under which every rank has the module whole."""


class MicroBatchChooser:
    """Chooser of a run's micro-batch, when its first loader is opened.

    Args:
        module: the model before it is sharded; a meta copy of it is kept.
        optimizer: of the run.
        loss: of the run.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
        self.module, self.loss, self.optimizer, self.why = module, loss, optimizer, ""
        self._twin: nn.Module | None = None
        kinds = {parameter.device.type for parameter in module.parameters()}
        self.handed = "builder" if kinds <= {"meta"} else "host" if kinds <= {"cpu"} else "device"

    def make_meta_copy(self) -> nn.Module:
        """Return a copy of the model on the meta device, made at the first call before sharding."""
        if self._twin is None:
            try:
                self._twin = copy_to_meta(self.module)
            except Exception as failure:  # copying a user's object may raise anything
                self.why, self._twin = f"the model cannot be copied: {failure}", nn.Identity()
        return self._twin

    def choose(self, run: Run, dataset: Any, collate: Collate | None, workers: int) -> None:
        """Keep a rank's share as its micro-batch, or let the planner choose one."""
        sample, fits = None, False
        if run.world.is_first:
            try:
                sample = read_few_samples(dataset, collate, workers)
                fits = is_small_share(run, sample)
            except Exception as failure:  # training meets the same error again
                self.why = f"no sample can be looked at: {failure}"
            if not fits:
                self.make_meta_copy()
                known = not (self.why or is_accelerator(run.world.device))
                fits = known and self._fits(run.plan, sample, run.world)
        with run.meeting.at("run.loader"):  # every rank waits here for rank 0
            if run.world.size > 1:
                fits = bool(run.world.broadcast_json(fits))
            if not fits:
                self._apply_planner_choice(run, sample, partial(self._trial, run, dataset, collate))

    def _trial(self, run: Run, dataset: Any, collate: Collate | None) -> PassBytes | None:
        """Run the model in a forked process, if it is whole here and on the host."""
        from shoal.trainer.autotune.trial_passes import run_trial_passes

        devices = {parameter.device.type for parameter in run.model.parameters()}
        if run.plan.layout.strategy not in WHOLE or devices != {"cpu"}:
            return None
        return run_trial_passes(lambda: run.model, dataset, collate, run.plan.call)

    def _apply_planner_choice(self, run: Run, sample: Any, trial: Trial) -> None:
        """Set the planner's choice; all ranks call it, and rank 0 has the sample."""
        from shoal.trainer.autotune.micro_batch_size import choose_size
        from shoal.trainer.autotune.rank_layouts import loop_case_settings, trace_facts_from_sample

        plan = run.plan

        def facts(*, kernels: str, element_bytes: int) -> ModelFacts:
            if self.why:
                raise PlanError(self.why)
            return trace_facts_from_sample(
                self.make_meta_copy(), sample, self.loss, plan.call,
                kernels=kernels, element_bytes=element_bytes, blocks=plan,
                residual=plan.residual,
            )  # fmt: skip

        def further() -> dict[str, Any]:
            return {
                **loop_case_settings(self.make_meta_copy(), self.optimizer),
                "handed": self.handed,
            }

        said = "batch={} and micro_batch={}"
        settled, line = choose_size(plan, facts, further, run.world, said, trial)
        set_micro_batch(run, settled)
        if line:
            run.recorder.notice(line)

    def _fits(self, plan: Plan, sample: Any, world: World) -> bool:
        """Return whether the estimate of a share leaves half of a rank's memory free."""
        from shoal.trainer.step.saved_activations import count_saved_bytes

        try:
            kept = count_saved_bytes(self.make_meta_copy(), split_batch(sample)[0], plan.call)
        except Exception:  # the model does not run on shapes alone
            return False
        states = STATE_BYTES * plan.parameters
        share = plan.batch // plan.layout.data_degree
        needed = states + 2 * kept * share / EXAMPLES  # gradients of activations beside them
        return needed <= FREE * read_machine_facts().memory_bytes / world.local_size


def read_few_samples(dataset: Any, collate: Collate | None, workers: int) -> Any:
    """Join the first samples to a batch; the dataset and its readers stay as they were.

    Args:
        dataset: of the loader.
        collate: joins samples to a batch.
        workers: processes that read it for training.

    Returns:
        For an indexed dataset zeros of the right shapes: a separate process reads the samples,
            since
        a dataset or collate may draw, count or open files. For a stream its first samples.

    Raises:
        Exception: any exception of the dataset or collate.
        ConfigError: the samples cannot be read here.
    """
    if not is_indexed(dataset):
        if workers:
            raise ConfigError("a stream is read by its worker processes alone")
        return first_samples(dataset, collate, EXAMPLES)
    from shoal.trainer.run_folder.resume_checks import read_in_fork

    def read(data: Any) -> list[Any]:
        leaves, spec = pytree.tree_flatten(first_samples(data, collate, EXAMPLES))
        shapes = [[list(x.shape), str(x.dtype)[6:]] for x in leaves if isinstance(x, torch.Tensor)]
        return [pytree.treespec_dumps(spec), shapes] if len(shapes) == len(leaves) else []

    told = read_in_fork(read, dataset, workers=1)
    if not told:
        raise ConfigError("its samples are no tensors alone, or take long to read")
    leaves = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in told[1]]
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(told[0]))


def is_small_share(run: Run, sample: Any) -> bool:
    """Return whether a share fits a CPU's memory for any use of the weights by the model.

    A weight is used once on each element of a sample, and a layer uses every pair of elements. The
    backward pass needs that many saved values at most; the limit leaves room for four times as
    many.
    """
    leaves = pytree.tree_leaves(sample)
    if run.world.device.type != "cpu" or not all(isinstance(x, torch.Tensor) for x in leaves):
        return False
    elements = sum(leaf.numel() for leaf in leaves) // EXAMPLES
    weights, layers = run.plan.parameters, sum(1 for _ in run.model.modules())
    values = run.plan.micro_batch * elements * (weights + elements * layers)
    return 32 * values <= FREE * read_machine_facts().memory_bytes / run.world.local_size


def set_micro_batch(run: Run, plan: Plan) -> None:
    """Set another micro-batch in a run, and in the loaders that it opens."""
    if plan.micro_batch != run.plan.micro_batch:
        run.program = run.guards.model.program = replace(run.program, plan=plan)
        run.feed.plan = plan
