"""Rules found at smaller sizes split every model as those found at its own sizes do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo import any_case, model_of

from proof_rows import rows
from shoal.base.errors import PlanError
from shoal.parallel.spmd import split_block
from shoal.parallel.spmd.labelling import rules
from shoal.parallel.spmd.labelling.experiment import (
    ArgumentSlot,
    Experiment,
    OperationCall,
    OperationInput,
)
from shoal.parallel.spmd.labelling.labels import WHOLE, Split
from shoal.parallel.spmd.model_split import plan_split
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trainer.step.call_contract import call_model

OURS = [(name, 2 if name == "our moe" else 4) for name in any_case.OURS]
"""What `make test` takes; the mixture's experts are searched longest."""


@pytest.mark.parametrize(("name", "degree"), rows([any_case.models(), (2, 4)], kept=OURS))
def test_sizes_do_not_matter(name: str, degree: int, monkeypatch: Any) -> None:
    found = []
    for large in (1 << 62, 0):  # never smaller, always smaller
        monkeypatch.setattr(rules, "LARGE", large)
        monkeypatch.setattr(split_block, "RULES", rules.RuleCache())
        module, inputs, call = model_of(name)
        try:
            split = plan_split(
                ForwardRecord(module, lambda m, x=inputs, c=call: call_model(m, x, c)), degree
            )
        except PlanError as refusal:
            found.append(str(refusal))
            continue
        held = {n: (one.label, one.partial) for n, one in split.parameters.items()}
        found.append((held, split.exchanges, split.notices))
    assert found[0] == found[1]


def test_a_long_sequence_is_tried_as_a_short_one(monkeypatch: Any) -> None:
    """Rotary tables, norms and heads of a 70B block on 8192 tokens: no tensor of that size."""
    seen: list[int] = []
    right = Experiment.of

    def of(call: OperationCall) -> Experiment | None:
        seen.append(sum(value.elements for value in call.values))
        return right(call)

    monkeypatch.setattr(Experiment, "of", staticmethod(of))
    known = rules.RuleCache()
    hidden = OperationInput((3, 8192, 8192), torch.bfloat16)
    norm = OperationCall(
        torch.ops.aten.rms_norm.default, "norm", ([ArgumentSlot(0), [8192], ArgumentSlot(1), 1e-5], {}),
        (hidden, OperationInput((8192,), torch.bfloat16)),
    )  # fmt: skip
    heads = OperationCall(
        torch.ops.aten.reshape.default,
        "heads",
        ([ArgumentSlot(0), [3, 8192, 64, 128]], {}),
        (hidden,),
    )
    assert known.find(norm, (Split(1), WHOLE), 8).out == Split(1)
    found = known.find(heads, (Split(2),), 8)
    assert (found.out, found.edits) == (Split(2), (((0, 1, 2), 8),))
    assert max(seen) < 1 << 20
