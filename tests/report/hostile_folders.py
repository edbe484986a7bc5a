"""Run folders in which every place that can hold a text holds a hostile one."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from shoal.base.runlog.rank_records import RankStep, encode_header

PAYLOAD = "document.documentElement.dataset.hit=1"
PIECES = (
    f"<script>{PAYLOAD}</script>", "</script>", "</style>", "</title>", "</textarea>", "<!--", "-->",
    f"<img src=x onerror={PAYLOAD}>", f"<svg onload={PAYLOAD}>", f'" onmouseover="{PAYLOAD}" x="',
    f"' onfocus='{PAYLOAD}' autofocus x='", f"javascript:{PAYLOAD}", "<a href=javascript:alert(1)>x</a>",
    "&lt;script&gt;", "&#60;b&#62;", "&quot;", "<style>*{display:none}</style>", "}*{display:none}",
    "url(http://127.0.0.1:9/x)", "@import 'http://127.0.0.1:9/x.css';", "<link rel=stylesheet href=//x>",
    "<iframe src=http://127.0.0.1:9/></iframe>", "<base href=//x>", "<meta http-equiv=refresh content=0>",
    "]]>", "<![CDATA[", "\x00", "\x1b[2J", "\x1b]0;title\x07", "\u202e", "\u2066", "\u200f", "\ufeff",
    "\u2028", "\ud800", "\x7f", "\x85", "${1+1}", "{{7*7}}", "\\u003cscript\\u003e", "`", "\n", "\r", "\t",
    "é漢🙂", "<table><tr><td>", "</td></tr></table>", "</section></main></body></html>", "<plaintext>",
)  # fmt: skip


def hostile_strings(count: int = 200, seed: int = 44) -> list[str]:
    """Strings of one to four pieces, each with a number, so that no two are equal."""
    rng = random.Random(seed)
    found = [f"{piece}{number}" for number, piece in enumerate(PIECES)]
    while len(found) < count:
        found.append("".join(rng.choices(PIECES, k=rng.randint(2, 4))) + str(len(found)))
    return found[:count]


def plain_strings(count: int = 200) -> list[str]:
    return [f"plain{number}" for number in range(count)]


def write_hostile_folder(folder: Path, strings: list[str]) -> Path:
    """A run folder with `strings`, each at least once, wherever a text can stand."""
    folder.mkdir(parents=True)
    text: Iterator[str] = itertools.cycle(strings)

    def write(name: str, record: object) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))

    def lines(name: str, records: list[dict[str, object]]) -> None:
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in records))

    placement = {
        "shape": [8, 4], "trains": True, "stages": [0], "data": "rows", "is_buffer": False, "calls": 1,
    }  # fmt: skip
    write(
        "plan.json",
        {
            "layout": {"dp_shard": 2, "zero": 3}, "batch": 8, "micro_batch": 2, "accumulate": 2,
            "why": next(text), "model": next(text), "unit": "tokens", "device": next(text),
            "strategy": next(text), "steps": 40, "parameters": 64,
            "placements": [
                {
                    "name": next(text), "dtype": next(text), "compute": next(text), "unit": next(text),
                    "cut": {"axis": "tp", "dim": 0, "segments": [[0, 4, 8]], "part": [0]},
                    "sum_over": [next(text)], **placement,
                }
                for _ in range(12)
            ],
            "predicted": {
                "step_s": 0.1, "machine": next(text), "peak_memory_bytes": 1e6, "sent_bytes": 10,
                "time": {next(text): 0.1, next(text): 0.2}, "memory": {next(text): 10},
            },
        },
    )  # fmt: skip
    own, sources = [next(text) for _ in range(4)], [next(text) for _ in range(6)]
    rows: list[dict[str, object]] = []
    for step in range(1, 41):
        rows.append(
            {
                "step": step, "loss": 4.0 - step / 40, "grad_norm": 1.0, "lr": 0.1, "tokens": 8,
                "step_s": 0.1, "tokens_per_s": 80.0, "samples": [next(text), next(text)],
                "metrics": dict.fromkeys(own, 1.0), "timed_by": next(text), "comm_bytes": 24,
                "comm_bytes_by_axis": {next(text): {next(text): 8}, "tp": {next(text): 16}},
            }
        )  # fmt: skip
    lines("metrics.jsonl", rows)
    names = [
        "run_started", "compute_started", "worker_started", "notice", "hang", "slow_rank", "restarting",
        "worker_died", "checkpoint_saved", "checkpoint_failed", "checkpoint_damaged", "resumed", "drift",
        "step_skipped", "spike", "rewound", "sample_left_out", "stop_requested", "validated", "staleness",
        "islands_met", "round_committed", "round_discarded", "island_refused", "run_finished",
        "collectives_differ", "loss_scale_lowered",
    ]  # fmt: skip
    events: list[dict[str, object]] = []
    for number, name in enumerate([*names, *strings]):
        event: dict[str, object] = {
            key: next(text)
            for key in (
                "text", "reason", "how", "layout", "host", "phase", "why", "collective", "stacks", "folder",
                "signal", "traceback", "body", "error", "file", "tensor", "kept_as", "baseline", "compute",
            )
        }  # fmt: skip
        event |= {"time_s": 1.8e9 + number, "event": name, "rank": 1, "step": 1 + number % 40}
        event |= {"differs": [next(text)], "culprits": [{"rank": 1, "samples": [next(text)]}]}
        event |= {"loss": 3.5, "extra_s": 0.1, "share": 0.2, "waited_s": 3.0, "seconds": 0.1}
        event["by_source"] = {source: {"loss": 3.0, "targets": 4} for source in sources}
        events.append(event)
    lines("events.jsonl", events)
    ranks = [
        {"rank": n, **{k: next(text) for k in ("host", "device", "device_name")}} for n in (0, 1)
    ]
    write("ranks.json", {"ranks": ranks})
    lines(
        "devices.jsonl",
        [
            {
                "host": next(text),
                "devices": [{"index": next(text), "name": next(text), "power_w": 3}],
            }
            for _ in range(8)
        ],
    )
    lines("experts.jsonl", [{"step": 1, "layers": {one: [3, 1] for one in strings[:100]}}])
    norms = {"gradient_norm": dict.fromkeys(strings[:100], 1.0)}
    lines("statistics.jsonl", [{"step": 1, **norms}, {"step": 2, **norms}])
    (folder / "rank_steps").mkdir()
    times = [
        RankStep(
            step, rank, 1, 1.8e9 + step, 0, (0.0, 0.01, 0.05, 0.01, 0.01, 0.0, 0.02, 0.03 * rank)
        )
        for step in range(1, 41)
        for rank in (0, 1)
    ]
    content = b"".join(one.encode() for one in times)
    (folder / "rank_steps" / "node-0.bin").write_bytes(encode_header(0) + content)
    (folder / "run.toml").write_text("\n".join(strings), encoding="utf-8", errors="surrogatepass")
    record = {"versions": {next(text): next(text) for _ in range(3)}}
    write(
        "checkpoints/step-40/manifest.json",
        {"record": {**record, "code": {next(text): [next(text), next(text)] for _ in range(9)}}},
    )
    write("owner.json", {"host": next(text), "pid": 1, "name": next(text)})
    write("phase.json", {"time_s": 1.8e9, "phases": [{"name": next(text), "of": 2, "done": 1}]})
    return folder
