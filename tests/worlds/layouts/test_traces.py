"""train.trace on ranks: one merged file with every part of a step, sound by the checker."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from shoal.view.traces.merged_trace import merge_traces
from shoal.view.traces.rank_traces import read_rank_traces
from shoal.view.traces.trace_checks import find_trace_faults
from shoal.view.traces.trace_summary import summarize_traces

LAYOUTS = {"ddp": "ddp", "pp": {"pp": 2}}


def test_the_merged_trace_of_ranks_is_sound_and_names_all_parts(worlds, tmp_path: Path) -> None:
    found = worlds(2).call("traces_case:trace_all", folder=str(tmp_path), layouts=LAYOUTS)
    for name in LAYOUTS:
        assert all(rank[name]["restored"] for rank in found), "the next step is not traced"
        traces = read_rank_traces(tmp_path / name)
        document = json.loads(json.dumps(merge_traces(traces)))
        assert find_trace_faults(document, traces) == []
        names = Counter((one.get("cat"), one["name"]) for one in document["traceEvents"])
        assert names["step", "step 2"] == names["step", "step 3"] == 2
        kinds = {part for kind, part in names if kind == "part"}
        assert kinds == {"forward and backward", "backward", "sum over ranks", "optimizer", "hooks"}
        assert names["micro-batch", "micro-batch 3"] == (8 if name == "pp" else 2)
        collectives = [text for kind, text in names if kind == "collective"]
        assert any("bucket 0" in text for text in collectives) == (name == "ddp")
        if name == "pp":
            assert names["action", "F3@1"] == names["action", "B0@0"] == 2
            assert any(text.startswith("send") for text in collectives)
            assert any(text.startswith("receive") for text in collectives)
        for one in summarize_traces(traces):
            parts = one.compute_s + one.alone_s + one.idle_s
            assert abs(parts - one.wall_s) < 1e-9
            assert 0 < one.compute_s < one.wall_s
            assert 0 <= one.hidden_s <= one.compute_s
