"""Placements of whole models, made in one process: a row per parameter, also of 70B on no device."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from zoo import LAYOUTS, any_case, model_of

from forks import Forks
from proof_rows import rows
from shoal.base.errors import PlanError
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.base.plans.tensor_shards import Shard
from shoal.parallel.placement_rows import derive_division, derive_placements
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trainer.step.call_contract import call_model

CPU = torch.device("cpu")
DEGREES = {
    **LAYOUTS,
    "zero1": {"dp_shard": 4, "zero": 1},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
}


def layout_of(name: str) -> Layout:
    given = dict(DEGREES[name])
    if given.get("dp_shard"):
        given.setdefault("zero", 3)
    return Layout(**given, schedule="1f1b" if given.get("pp") else "")


@pytest.mark.parametrize(
    "name",
    rows([any_case.models()], kept=[("our llama, 6 heads",), ("our moe",), ("our resnet",)]),
)
def test_every_layout_has_one_row_per_tensor_whose_parts_make_it_up(name: str) -> None:
    refused = []
    module, inputs, call = model_of(name)
    record = ForwardRecord(module, partial(call_model, inputs=inputs, call=call))
    for label in DEGREES:
        layout = layout_of(label)
        plan = Plan(layout, 64, 4, 64 // 4 // layout.data_degree)
        try:
            found = derive_placements(module, plan, derive_division(record, plan), CPU)
        except PlanError as refusal:
            refused.append(str(refusal))
            continue
        assert list(found) == [n for n, _ in [*module.named_parameters(), *module.named_buffers()]]
        kept = Plan.from_json(replace(plan, placements=tuple(found.values())).to_json())
        assert kept.placements == tuple(found.values())
        for row in found.values():
            check(row, layout)
    assert len(DEGREES) - len(refused) >= 4
    assert all("try: " in line for line in refused)


def check(row, layout: Layout) -> None:  # type: ignore[no-untyped-def]
    """Every element has as many holders as the row says, and each is somewhere."""
    often = torch.zeros(row.shape, dtype=torch.int64)
    for rank in range(layout.processes):
        at = layout.at(rank)
        if at["pp"] in row.stages:
            part: Shard = row.stored_shard(at, layout)
            assert row.shard(at).elements == math.prod(row.local_shape(at))
            for box in part.slices:
                often[tuple(slice(start, stop) for start, stop in box)] += 1
    if not row.elements:
        return
    data = math.prod(row.degree(axis, layout) for axis in row.data_axes)
    data //= row.degree(row.data_axes[1], layout) if row.data == "rows" else 1
    assert often.unique().tolist() == [data * row.copies_in_model(layout)], row


LARGE = """
import json, resource, sys, torch
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.models.catalog import build
from shoal.parallel.placement_rows import derive_division, derive_placements
from shoal.forecast.models.published_models import published_shape
from shoal.trace.flow.forward_record import ForwardRecord

shape = published_shape("llama-3-70b")
sizes = {"dim": shape.hidden, "layers": int(sys.argv[1]), "heads": shape.heads,
         "kv_heads": shape.kv_heads, "hidden": shape.ffn, "tied": False}
with torch.device("meta"):
    model = build("llama", sizes, vocabulary=shape.vocabulary, sequence=8192)
    tokens = torch.zeros(3, 8192, dtype=torch.long)
layout = Layout(tp=8, pp=4, dp_shard=2, zero=3, schedule="1f1b")
plan = Plan(layout, 64, 1, 32, compute="bf16")
rows = derive_placements(model, plan, derive_division(ForwardRecord(model, lambda m: m(tokens)), plan), torch.device("cuda"))
peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
held = [sum(row.stored_shard(layout.at(rank), layout).elements for row in rows.values()
            if layout.at(rank)["pp"] in row.stages) for rank in range(layout.processes)]
print(json.dumps({"peak_bytes": peak_bytes, "rows": len(rows), "held": held,
                  "elements": sum(p.numel() for p in model.parameters())}))
"""


@pytest.mark.parametrize("layers", rows([(8, 80)], kept=[(8,)]))
def test_rows_of_70b_are_made_on_meta(programs: Forks, layers: int) -> None:
    """8192 tokens a sample, as its users have; all 80 layers within 60 s and 2 GiB."""
    done = programs.run("-c", LARGE, str(layers), timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["peak_bytes"] < 2 * 2**30
    assert told["rows"] == 9 * layers + 3
    assert told["elements"] > 70e9 * layers / 80
    # Norms alone are whole on tensor-parallel ranks.
    assert told["elements"] < sum(told["held"]) < 1.001 * told["elements"]
