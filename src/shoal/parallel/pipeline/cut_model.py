"""From a plain module and one sample to checked pipeline stages, in four steps.

    1. the trunk: the repeated blocks, in call order (`trace.record`)
    2. watch a forward pass, in training and in evaluation: what depends on what (`liveness`)
    3. deal the calls to stages by cost: what crosses, what each stage keeps (`deal`)
    4. verify: run the code between the blocks as every stage will, and compare

All steps run the real module on real inputs, under no_grad, and leave no trace in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from shoal.parallel.pipeline.partition_model import StageCut, deal
from shoal.parallel.pipeline.verify import verify
from shoal.trace.liveness import alike, merged, watch
from shoal.trace.record import Record, in_training
from shoal.trace.untouched import attributes_kept


def cut_stages(record: Record, stages: int, costs: Mapping[str, float] | None = None) -> StageCut:
    """Cut a model into `stages` between the blocks of its trunk, and check the cut.

    costs   of units by name (blocks, embedding, head), in any unit; absent ones cost nothing; else
            by FLOP and parameters
    Gives   which call runs where, what crosses, what each stage keeps; the same on every rank
    Errors  PlanError for more stages than blocks, for a block whose work is read later otherwise
            than through what it returns, and for values that leave torch between the blocks
    """
    # What a block leaves aside, its stage's checks need once more.
    with attributes_kept(record.module), in_training(record.module):
        return _cut(record, stages, costs)


def _cut(record: Record, stages: int, costs: Mapping[str, float] | None) -> StageCut:
    module = record.module
    flow = watch(record)
    with _evaluating(module):
        evaluated = watch(record)
        both = alike(flow, evaluated)  # else evaluation is refused when it calls other blocks
    cut = deal(module, merged(flow, evaluated) if both else flow, stages, costs)
    verify(record, cut, flow)
    if both:
        with _evaluating(module):
            verify(record, cut, evaluated)
    return cut


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """In evaluation mode; then every part is in its own mode again."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
