"""From a plain module and one sample to checked pipeline stages, in four steps.

    1. find the trunk: the repeated blocks, in call order (`trunk`)
    2. watch a forward pass, in training and in evaluation: what depends on what (`liveness`)
    3. deal the calls to stages by cost: what crosses, what each stage keeps (`deal`)
    4. verify: run the code between the blocks as every stage will, and compare

All steps run the real module on real inputs, under no_grad, and leave no trace in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from shoal.parallel.pipeline.partition_model import StageCut, deal
from shoal.parallel.pipeline.verify import verify
from shoal.trace.liveness import alike, merged, watch
from shoal.trace.trunk import Run, Trunk, attributes_kept


def cut_stages(
    module: nn.Module,
    trunk: Trunk,
    run: Run,
    stages: int,
    costs: Mapping[str, float] | None = None,
) -> StageCut:
    """Cut `module`, whose blocks are `trunk`'s, into `stages`, and check the cut.

    run     calls a module on a sample of real inputs
    costs   of units by name (blocks, embedding, head), in any unit; absent ones cost nothing; else
            by FLOP and parameters
    Gives   which call runs where, what crosses, what each stage keeps; the same on every rank
    Errors  PlanError for more stages than blocks, for a block whose work is read later otherwise
            than through what it returns, and for values that leave torch between the blocks
    """
    with attributes_kept(module):  # what a block leaves aside, its stage's checks need once more
        return _cut(module, trunk, run, stages, costs)


def _cut(
    module: nn.Module, trunk: Trunk, run: Run, stages: int, costs: Mapping[str, float] | None
) -> StageCut:
    flow = watch(module, trunk, run)
    if not module.training:
        cut = deal(module, flow, stages, costs)
        verify(module, cut, flow, run)
        return replace(cut, trunk=replace(trunk, calls=()))
    with _evaluating(module):
        evaluated = watch(module, trunk, run)
        both = alike(flow, evaluated)  # else evaluation is refused when it calls other blocks
    cut = deal(module, merged(flow, evaluated) if both else flow, stages, costs)
    verify(module, cut, flow, run)
    if both:
        with _evaluating(module):
            verify(module, cut, evaluated, run)
    return replace(cut, trunk=replace(trunk, calls=()))


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
