"""What a step calls and sends, counted: of this source, without its joined units, and of earlier commits.

    python tests/proof/step_counts.py                    every case, against the commits of `COMMITS`
    python tests/proof/step_counts.py --only fsdp        cases whose name holds a word

A case is a model that runs all its blocks in every pass, under a layout, on gloo. Each side runs it in
processes of its own: a loop over `run.loader`, in a run folder. Of rank 0's steps 4 to 7 Python calls are
counted by the interpreter (`sys.setprofile`, without those of the loader), of steps 8 and 9 the
collectives and their bytes by torch's profiler. A row is `unchanged` if both sides send the same, and
the median step makes at most 1.02 times as many Python calls: a check that is due after some seconds
adds to one step or another. "without joining" is this source with
`make_unit_visits` switched off. Rows go to proof/results/step-counts.json.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TARGET = ROOT / "proof" / "results" / "step-counts.json"
MOST = 1.02
COMMITS = {"b8c144fd^": "fsdp", "2b44eedc": ""}
"""Commits and their cases: the one before units could be joined, and the one of issue 49's last gate."""
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp blocks": (2, {"layout": "fsdp"}),
    "fsdp reversed": (2, {"layout": "fsdp"}),
    "fsdp llama": (2, {"layout": "fsdp"}),
    "fsdp llama recompute": (2, {"layout": "fsdp", "recompute": "full"}),
    "hsdp blocks": (4, {"layout": {"dp_replicate": 2, "dp_shard": 2}}),
    "single llama": (1, {"layout": "single"}),
    "ddp llama": (2, {"layout": "ddp"}),
    "zero1 llama": (2, {"layout": "zero1"}),
    "zero2 llama": (2, {"layout": "zero2"}),
    "tp llama": (2, {"layout": {"tp": 2}}),
    "pp llama": (2, {"layout": {"pp": 2}}),
    "cp llama": (2, {"layout": {"cp": 2}}),
}
DEFINITION = (
    "unchanged: the same collectives and bytes, and at most 1.02 times the Python calls; calls: of steps "
    "4 to 7 before and now (statistic = mean: their means, in rows of an earlier version of the script)"
)


def main() -> int:
    sys.path.insert(0, str(HERE))
    from golden import Worktree
    from kept_rows import parser_of, rows_before, verdicts, write_rows
    from source import source_hash

    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of cases' names")
    parser.add_argument("--against", nargs="*", help="commits, each for all cases")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    source = source_hash()
    rows = rows_before(options, options.out, source)
    commits = COMMITS if options.against is None else dict.fromkeys(options.against, "")
    for name in CASES:
        if options.only and not any(word in name for word in options.only):
            continue
        due = [one for one, kind in commits.items() if kind in name]
        due += ["without joining"] if "sdp" in name else []
        due = [one for one in due if rows.get(f"{name} · {one}", {}).get("source") != source]
        now = count(ROOT, name, joining=True) if due else {}
        for other in due:
            if other == "without joining":
                before = count(ROOT, name, joining=False)
            else:
                with Worktree(other) as tree:
                    before = count(tree(), name, joining=True)
            rows[f"{name} · {other}"] = {"source": source, **compare(before, now)}
            print(f"{name} · {other}", rows[f"{name} · {other}"], flush=True)
            write_rows(options.out, DEFINITION, rows)
    bad = [key for key, row in rows.items() if row["verdict"] != "unchanged"]
    print(verdicts(rows), *bad, sep="\n")
    return bool(bad)


def compare(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return a row: ratio of Python calls, and what both sides send."""
    if failed := [side for side in (before, now) if "failed" in side]:
        return {"verdict": "failed", **failed[0]}
    ratio = statistics.median_low(now["calls"]) / statistics.median_low(before["calls"])
    same = before["sent"] == now["sent"]
    row: dict[str, Any] = {
        "verdict": "unchanged" if same and ratio <= MOST else "changed",
        "calls_ratio": round(ratio, 4),
        "calls": [before["calls"], now["calls"]],
        "statistic": "low median",
        "sent": now["sent"],
    }
    return row if same else {**row, "sent_before": before["sent"]}


def count(tree: Path, name: str, *, joining: bool) -> dict[str, Any]:
    """Return Python calls of each counted step, and what the steps sent: kind and bytes → number."""
    size = CASES[name][0]
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        environ = {
            **os.environ, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
            "SHOAL_PROVE": "off", "SHOAL_CACHE": f"{folder}/cache", "PYTHONPATH": str(tree / "src"),
        }  # fmt: skip
        words = [sys.executable, __file__, "--inside", name, *([] if joining else ["apart"])]
        ranks = [
            subprocess.Popen(
                words, cwd=folder, env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        texts = [rank.communicate(timeout=300)[0] for rank in ranks]
        path = Path(folder) / "counts.json"
        if any(rank.returncode for rank in ranks) or not path.exists():
            return {"failed": texts[0][-800:]}
        return dict(json.loads(path.read_text()))


def run_inside(name: str, *, joining: bool) -> None:
    """Train nine steps; on rank 0 write what was counted into the working folder."""
    import gc

    import torch

    import shoal

    if not joining:
        from shoal.parallel.data_parallel import fsdp

        vars(fsdp)["make_unit_visits"] = lambda *_: None
    torch.manual_seed(0)
    settings = CASES[name][1]
    model, data, loss = make_llama() if "llama" in name else make_chain("reversed" in name)
    run = shoal.parallelize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss, batch=8, micro_batch=1,
        folder="run", sample=tuple(torch.stack(one) for one in zip(*data[:2], strict=True)),
        **settings,
    )  # fmt: skip
    calls: list[int] = []
    steps = iter(run.loader(data))
    for _ in range(3):
        run.step(next(steps))
    gc.disable()
    for _ in range(4):
        batch, seen = next(steps), [0]

        def note(_frame: Any, event: str, _argument: Any, seen: list[int] = seen) -> None:
            seen[0] += event == "call"

        sys.setprofile(note)
        try:
            run.step(batch)
        finally:
            sys.setprofile(None)
        calls.append(seen[0])
    with torch.profiler.profile(record_shapes=True) as profiled:
        for _ in range(2):
            run.step(next(steps))
    if run.world.is_first:
        profiled.export_chrome_trace("trace.json")
        record = {"calls": calls, "sent": sent("trace.json")}
        Path("counts.json").write_text(json.dumps(record))
    run.close()


def sent(path: str) -> dict[str, int]:
    """Return the collectives of a trace: kind, tensors' sizes and types → how often."""
    found: dict[str, int] = {}
    for event in json.loads(Path(path).read_text())["traceEvents"]:
        if event.get("name", "").startswith("c10d::"):
            shown = event.get("args", {})
            words = f"{event['name'][6:]} {shown.get('Input Dims')} {shown.get('Input type')}"
            found[words] = found.get(words, 0) + 1
    return dict(sorted(found.items()))


def make_chain(reverse: bool) -> tuple[Any, list[Any], Any]:
    """Return six equal blocks and a head, which may be registered from the last to the first."""
    import torch
    from torch import nn

    import shoal

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x).relu())

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(6))
            self.head = nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in reversed(self.blocks) if reverse else self.blocks:
                x = block(x)
            return self.head(x)

    x = torch.randn(128, 32)
    loss = shoal.mean_of_samples(nn.MSELoss())
    return Chain(), list(zip(x, x[:, :4].sin(), strict=True)), loss


def make_llama() -> tuple[Any, list[Any], Any]:
    """Return a small Llama, samples of 16 tokens, and no loss but its own."""
    import torch

    from shoal.models.llama import Llama

    model = Llama(vocabulary=64, sequence=16, dim=32, layers=4, heads=4, kv_heads=2, hidden=64)
    tokens = torch.randint(0, 64, (128, 17))
    return model, [(one[:-1], one[1:]) for one in tokens], None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        run_inside(sys.argv[2], joining=len(sys.argv) < 4)
    else:
        sys.exit(main())
