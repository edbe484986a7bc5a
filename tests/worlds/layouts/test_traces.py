"""train.trace on ranks: one merged file with every part of a step, sound by the checker."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from shoal.view.traces.merged_trace import merge_traces
from shoal.view.traces.rank_traces import read_rank_traces
from shoal.view.traces.trace_checks import find_trace_faults
from shoal.view.traces.trace_summary import summarize_traces

LAYOUT = {"pp": 2, "dp_replicate": 2}


def test_the_merged_trace_of_four_ranks_is_sound_and_names_all_parts(
    worlds, tmp_path: Path
) -> None:
    restored = worlds(4).call("traces_case:trace", folder=str(tmp_path), layout=LAYOUT)
    assert restored == [True] * 4, "the next step is not traced"
    traces = read_rank_traces(tmp_path)
    document = json.loads(json.dumps(merge_traces(traces)))
    assert find_trace_faults(document, traces) == []
    names = Counter((one.get("cat"), one["name"]) for one in document["traceEvents"])
    assert names["step", "step 2"] == names["step", "step 3"] == 4
    kinds = {part for kind, part in names if kind == "part"}
    assert kinds == {"forward and backward", "backward", "sum over ranks", "optimizer", "hooks"}
    # One replica of the model has it: on its two stages, forward and backward, in two steps.
    assert names["micro-batch", "micro-batch 3"] == 8
    assert names["action", "F1@1"] == names["action", "B0@0"] == 4
    collectives = {text for kind, text in names if kind == "collective"}
    for word in ("all_reduce bucket 0", "send ", "receive "):
        assert any(text.startswith(word) for text in collectives), collectives
    for one in summarize_traces(traces):
        assert abs(one.compute_s + one.alone_s + one.idle_s - one.wall_s) < 1e-9
        assert 0 < one.compute_s < one.wall_s
        assert 0 <= one.hidden_s <= one.compute_s
