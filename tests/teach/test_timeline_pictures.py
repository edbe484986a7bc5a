"""SVG pictures and Chrome traces: whole files, texts inside their boxes, times in microseconds."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from shoal.base.plans.timeline import MemorySample, Timeline, TimelineSpan
from shoal.teach.drawings.timeline_rows import mix_with_white
from shoal.teach.drawings.timeline_svg import STYLE, text_width, timeline_svg
from shoal.teach.drawings.timeline_trace import trace_object, trace_text
from shoal.teach.drawings.walk_svg import walk_svg
from shoal.teach.puzzles import puzzle_timeline
from shoal.teach.walks import collectives_walk, zero_walk
from shoal.teach.walks.fsdp_walk import fsdp
from shoal.teach.walks.pipelines_walk import PipelineCase, pipeline

NS = "{http://www.w3.org/2000/svg}"
FSDP = fsdp(4).timeline
PICTURES = {
    "1f1b": lambda: timeline_svg([pipeline("1f1b", PipelineCase(4, 8))]),
    "gpipe wide": lambda: timeline_svg([pipeline("gpipe", PipelineCase(8, 64))]),
    "dualpipe": lambda: timeline_svg([pipeline("dualpipe", PipelineCase(8, 20))]),
    "puzzle 6": lambda: timeline_svg([puzzle_timeline(6, "reference"), puzzle_timeline(6)]),
    "puzzle 7": lambda: timeline_svg([puzzle_timeline(7, "reference")]),
    "ring": lambda: walk_svg(collectives_walk.ring(4)),
    "ring of 16": lambda: walk_svg(collectives_walk.ring(16)),
    "tree": lambda: walk_svg(collectives_walk.tree(5)),
    "fsdp": lambda: walk_svg(fsdp(4)),
    "zero": lambda: walk_svg(zero_walk.zero(8)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_whole_and_nothing_leaves_it(name: str) -> None:
    svg = PICTURES[name]()
    root = ET.fromstring(svg)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert width <= 1400
    assert "prefers-color-scheme: dark" in svg
    assert not any(word in svg for word in ("href", "url(", "@import", "<script"))
    for shape in root.iter(f"{NS}rect"):
        x, y = float(shape.get("x", 0)), float(shape.get("y", 0))
        assert min(x, y) >= 0
        assert x + float(shape.get("width", 0)) <= width + 0.2
        assert y + float(shape.get("height", 0)) <= height + 0.2
    for text in root.iter(f"{NS}text"):
        size = float(text.get("font-size", 0))
        assert size >= 10, "too small to read"
        wide = text_width(text.text or "", size) * (0.54 / 0.6)
        x, anchor = float(text.get("x", 0)), text.get("text-anchor", "start")
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        assert 0 <= left < left + wide <= width, text.text
        assert 0 < float(text.get("y", 0)) < height


def test_empty_boxes_show_on_light_and_on_dark_ground() -> None:
    """They are all stroke: in the colour of the ground a legend's "not held" would have no sign."""
    light, dark = STYLE.split("@media")
    for rules, stroke in (
        (light, r"\.box\{stroke:(#\w+)"),
        (dark, r'fill="none"\]\{stroke:(#\w+)'),
    ):
        ground, line = (re.search(one, rules) for one in (r"\.ground\{fill:(#\w+)", stroke))
        assert ground is not None
        assert line is not None
        levels = [int(found[1][1:3], 16) for found in (ground, line)]
        assert abs(levels[0] - levels[1]) > 100


@pytest.mark.parametrize("name", PICTURES)
def test_no_two_texts_lie_over_each_other(name: str) -> None:
    texts = []
    for text in ET.fromstring(PICTURES[name]()).iter(f"{NS}text"):
        size = float(text.get("font-size", 0))
        wide = text_width(text.text or "", size) * 0.85
        x, anchor = float(text.get("x", 0)), text.get("text-anchor", "start")
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        base = float(text.get("y", 0))
        texts.append((left, base - size * 0.75, left + wide, base, text.text))
    for place, a in enumerate(texts):
        for b in texts[place + 1 :]:
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, (a, b)


def boxes(svg: str) -> list[ET.Element]:
    return [r for r in ET.fromstring(svg).iter(f"{NS}rect") if r.find(f"{NS}title") is not None]


def test_boxes_stand_where_their_times_are() -> None:
    line = pipeline("1f1b", PipelineCase(4, 8))
    drawn = boxes(timeline_svg([line]))
    assert len(drawn) == 4 * 8 * 2
    by_row: dict[str, list[tuple[float, float]]] = {}
    for box in drawn:
        x, wide = float(box.get("x", 0)), float(box.get("width", 0))
        by_row.setdefault(box.get("y", ""), []).append((x, x + wide))
    assert len(by_row) == 4
    for edges in by_row.values():
        ordered = sorted(edges)
        assert all(a[1] <= b[0] + 0.2 for a, b in zip(ordered, ordered[1:], strict=False))
    left, right = min(min(e) for e in by_row.values()), max(max(e) for e in by_row.values())
    per_s = (right[1] - left[0]) / line.end_s
    first = [float(b.get("width", 0)) for b in drawn if "forward" in "".join(b.itertext())]
    assert first == pytest.approx([per_s] * len(first), abs=0.15)


def test_a_box_says_what_it_is() -> None:
    box = boxes(timeline_svg([pipeline("zbv", PipelineCase(2, 4))]))[0]
    assert "".join(box.itertext()) == "rank 0: forward 0 of stage 0, from 0 to 0.5 s"
    paler = {b.get("fill") for b in boxes(timeline_svg([pipeline("zbv", PipelineCase(2, 4))]))}
    assert len(paler) == 6, "three kinds, and a paler one of each for the second piece"


def test_curves_reach_as_high_as_the_peak() -> None:
    low = Timeline("a", 1, (TimelineSpan(0, 0.0, 1.0, "forward"),), (MemorySample(0, 0.0, 1.0),))
    high = Timeline("b", 1, (TimelineSpan(0, 0.0, 1.0, "forward"),), (MemorySample(0, 0.0, 4.0),))
    paths = [p.get("d", "") for p in ET.fromstring(timeline_svg([low, high])).iter(f"{NS}path")]
    rises = [
        max(ys) - min(ys)
        for ys in ([float(p.split(",")[1].rstrip("Z")) for p in d[1:].split("L")] for d in paths)
    ]
    assert rises[1] == pytest.approx(4 * rises[0], abs=0.5)


def test_words_of_others_are_escaped() -> None:
    line = Timeline("a < b & c", 1, (TimelineSpan(0, 0.0, 1.0, "forward", "<x>", note='"&"'),))
    assert ET.fromstring(timeline_svg([line])).get("aria-label") == "a < b & c"


def test_mixing_goes_to_white() -> None:
    assert mix_with_white("#102030", 0.0) == "#102030"
    assert mix_with_white("#102030", 1.0) == "#ffffff"


def test_a_trace_is_what_perfetto_reads() -> None:
    assert FSDP is not None
    made = json.loads(trace_text([FSDP]))
    events = made["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(rank, f"rank {rank}") for rank in range(4)}
    threads = {(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert threads == {(0, "compute"), (1, "link")}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(FSDP.spans)
    total_us = sum(e["dur"] for e in spans)
    assert total_us == pytest.approx(sum(s.end_s - s.start_s for s in FSDP.spans) * 1e6)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(FSDP.end_s * 1e6)
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 2]
    peak = max(sum(e["args"].values()) for e in counters)
    assert peak == pytest.approx(FSDP.peak_bytes(2))
    for pid, tid in {(e["pid"], e["tid"]) for e in spans}:
        lane = sorted((e["ts"], e["dur"]) for e in spans if (e["pid"], e["tid"]) == (pid, tid))
        assert all(a[0] + a[1] <= b[0] + 1e-3 for a, b in zip(lane, lane[1:], strict=False))


def test_two_timelines_are_different_processes_of_a_trace() -> None:
    made = trace_object([puzzle_timeline(0, "reference"), puzzle_timeline(2)])
    spans = [e for e in made["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1, 2, 3, 4}
    assert made["otherData"]["units"] == ["1 ms = 1 of steps"] * 2
    first = [e for e in spans if e["pid"] == 0]
    assert max(e["ts"] + e["dur"] for e in first) == pytest.approx(17_000)


def test_a_pipeline_trace_names_stage_and_micro_batch() -> None:
    made = trace_object([pipeline("interleaved", PipelineCase(2, 2))])
    args = [e["args"] for e in made["traceEvents"] if e["ph"] == "X"]
    assert {(a["stage"], a["micro-batch"]) for a in args} == {
        (str(stage), str(mb)) for stage in range(4) for mb in range(2)
    }
