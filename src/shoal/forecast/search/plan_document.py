"""JSON document of a plan: the output of `shoal plan --json` and the source of its tables.

Schema, version 1 (bytes, seconds, counts; never formatted text but in `text`, `why`, `notes`):

    version, model {name, parameters, sequence, blocks, forward_flops, source},
    machine {name, device, kind, devices, own_devices, nodes, per_node, memory_bytes,
             node_memory_bytes (0: not known), inside, across, source, calibration, groups,
             islands},
    batch, compute, notes [text], searched, fitting, guide text, advice {mixed|islands: text},
    starting text ("" where the best layout starts),
    fixes [{set, step_s, peak_bytes}], next text,
    layouts [{rank, text, strategy, degrees {axis: n}, zero, schedule, chunks, micro_batch,
              accumulate, recompute, offload, reshard, verdict fits|tight|no, starts, after
              fits|tight|no (the steps alone), instant, place (another that is worse than
              they are), told, instants [{name, device_bytes, host_bytes, files_bytes}],
              host_bytes, disk_bytes (of a rank's states that wait there), margin_bytes (of the
              steps),
              step_s, step_low_s, step_high_s, samples_per_s, tokens_per_s, mfu, time {part: s},
              hidden {part: s}, sent {link: bytes},
              peak_bytes, peak_low_bytes, peak_high_bytes, allocated_bytes, memory {part: bytes},
              when, stage, why, explain_peak}]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from shoal.base.estimates.cluster import Cluster
from shoal.base.estimates.estimate import ModelFacts
from shoal.forecast.search.cluster_advice import advise_on_cluster
from shoal.forecast.search.layout_reasons import (
    compare_with_guide,
    explain_order,
    explain_peak,
    explain_start,
    shape_text,
)
from shoal.forecast.search.layout_search import LayoutCandidate, least_memory_bytes
from shoal.forecast.search.memory_suggestions import suggest_settings
from shoal.forecast.search.search_space import SearchSpace

VERSION = 1


def plan_record(
    candidates: Sequence[LayoutCandidate],
    space: SearchSpace,
    *,
    top: int,
    notes: Sequence[str],
    narrow: Callable[[], ModelFacts | None] = lambda: None,
) -> dict[str, Any]:
    """Make the JSON document of a search: the best candidate of each of the `top` best layouts.

    Also predicts the field's guide, and `suggest_settings` if no layout's steps surely fit. Schema:
    head of this module.

    Args:
        candidates: not empty, best first.
        notes: lines to copy into the document.
        space: the searched space; a layout that the user fixed is not compared with the guide.
        narrow: returns the model's facts with a bf16 residual stream; called only if no layout's
            steps surely fit, since it may trace the model.
    """
    best = candidates[0]
    case = best.case
    shown = _best_by_layout(candidates, top)
    given = space.layout is not None or space.degrees or space.zero is not None
    record: dict[str, Any] = {
        "version": VERSION,
        "model": model_record(case.model),
        "machine": machine_record(case.cluster),
        "batch": case.batch,
        "compute": case.plan.compute,
        **({"residual": "bf16"} if case.plan.residual == "bf16" else {}),
        "notes": list(notes),
        "searched": len(candidates),
        "fitting": sum(candidate.fits for candidate in candidates),
        "guide": "" if given or not best.runs else compare_with_guide(best, space)[0],
        "starting": explain_start(best),
        "advice": dict(advise_on_cluster(best)),
        "fixes": [],
        "layouts": [],
    }
    if not best.runs or best.verdict.after == "tight":
        found = suggest_settings(case, narrow())
        record["fixes"] = [
            {"set": text, "step_s": made.time.step_s, "peak_bytes": made.memory.peak_bytes}
            for text, made in found
            if not best.runs or made.verdict.after == "fits"
        ][:3]
    for place, candidate in enumerate(shown):
        row = candidate_record(candidate)
        row["rank"] = place + 1
        following = shown[place + 1] if place + 1 < len(shown) else None
        row["why"] = explain_order(candidate, following) if following else ""
        record["layouts"].append(row)
    return record


def _best_by_layout(candidates: Sequence[LayoutCandidate], top: int) -> list[LayoutCandidate]:
    """Return the best candidate of each layout, not several micro-batches of one layout."""
    seen: set[Any] = set()
    chosen: list[LayoutCandidate] = []
    for candidate in candidates:
        if candidate.case.layout.without_schedule in seen:
            continue
        seen.add(candidate.case.layout.without_schedule)
        chosen.append(candidate)
        if len(chosen) == top:
            break
    return chosen


def model_record(model: ModelFacts) -> dict[str, Any]:
    """Return the model's part of the document."""
    return {
        "name": model.name,
        "parameters": model.trainable,
        "frozen_parameters": model.frozen,
        "sequence": model.sequence,
        "blocks": model.blocks,
        "forward_flops": model.forward_flops,
        "source": model.source,
    }


def machine_record(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster's part of the document."""
    return {
        "name": cluster.name or f"{cluster.nodes}x{cluster.per_node}x{cluster.device.name}",
        "device": cluster.device.name,
        "kind": cluster.device.kind,
        "devices": cluster.devices,
        "own_devices": cluster.nodes * cluster.per_node,
        "nodes": cluster.nodes,
        "per_node": cluster.per_node,
        "memory_bytes": least_memory_bytes(cluster),
        "node_memory_bytes": cluster.node_memory_bytes,
        "inside": cluster.inside.name,
        "across": cluster.across.name,
        "source": cluster.device.source,
        "calibration": cluster.calibration.source,
        "groups": [machine_record(group) for group in cluster.groups],
        "islands": cluster.islands,
    }


def candidate_record(candidate: LayoutCandidate) -> dict[str, Any]:
    """Return the part of the document for one layout and its predictions."""
    case, memory, time = candidate.case, candidate.memory, candidate.time
    return {
        "text": shape_text(case),
        "strategy": case.layout.strategy,
        "degrees": {**case.layout.degrees, "ep": case.layout.ep},
        "zero": case.layout.zero,
        "schedule": case.schedule if case.layout.pp > 1 else "",
        "chunks": case.chunks,
        "micro_batch": case.micro_batch,
        "accumulate": case.accumulate,
        "recompute": case.plan.recompute,
        "offload": case.plan.offload,
        "reshard": case.plan.reshard,
        "verdict": candidate.verdict.word,
        "starts": candidate.verdict.starts,
        "after": candidate.verdict.after,
        "instant": candidate.verdict.instant,
        "place": candidate.verdict.place,
        "told": candidate.verdict.text,
        "instants": [asdict(one) for one in memory.instants],
        "host_bytes": memory.host_bytes,
        "disk_bytes": memory.disk_bytes,
        "margin_bytes": candidate.verdict.margin_bytes,
        "step_s": time.step_s,
        "step_low_s": time.low_s,
        "step_high_s": time.high_s,
        "samples_per_s": candidate.samples_per_s,
        "tokens_per_s": candidate.samples_per_s * case.model.sequence,
        "mfu": candidate.mfu,
        "time": time.parts,
        "hidden": time.hidden,
        "sent": time.bytes,
        "peak_bytes": memory.peak_bytes,
        "peak_low_bytes": memory.low_bytes,
        "peak_high_bytes": memory.high_bytes,
        "allocated_bytes": memory.allocated_bytes,
        "memory": memory.parts,
        "when": memory.when,
        "stage": memory.stage,
        "dies_first": explain_peak(candidate),
    }
