"""A run of one's own on two nodes under torchrun, of which one rank hangs, or whose link goes down.

A node is a network namespace with an agent of its own (elastic.py), a hang one of hanging.py's.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from cli_run import lines
from elastic import HERE, Nodes, children, wait_for
from hanging import LOOP
from shoal.launch.watch.blamed_rank import GONE

STEPS = 40
ENDED = ("stopped", "barrier")
"""Hangs of which a rank does not come back by itself."""


def on_two_nodes(folder: Path, asked: dict[str, Any], *, own: bool = False) -> dict[str, Any]:
    """Have a run hang; what was told of it, and by whom.

    asked   as hanging.py reads it; kind `down`: the link of the node of `rank` goes down
    own     the nodes share no disk
    Gives   by node `events`, `told`, the hangs among them, `said`, `steps` of metrics.jsonl; `node`
            by rank; `accounts`, what was written of the hang; `left` processes; `codes` of the
            agents, None of those that would have gone on
    """
    shutil.copy(HERE / "hanging.py", folder)
    (folder / "hang.json").write_text(json.dumps(asked))
    (folder / "loop.py").write_text(LOOP)
    run = folder / "run"
    with Nodes(folder, ["loop.py"], run if own else None, least=2) as nodes:
        folders = [nodes.disk(node) if own else run for node in (0, 1)]

        def said() -> str:
            return f"{nodes.said(0)[-3000:]}\n{nodes.said(1)[-3000:]}"

        def events(node: int) -> list[dict[str, Any]]:
            path = folders[node] / "events.jsonl"
            return lines(path) if path.exists() else []

        def hangs() -> list[dict[str, Any]]:
            return [one for node in (0, 1) for one in events(node) if one["event"] == "hang"]

        def node_of(rank: int) -> int:
            return next(n for n in (0, 1) if f"this is rank {rank}\n" in nodes.said(n))

        nodes.start(0)
        nodes.start(1)
        if asked["kind"] == "down":
            metrics = [one / "metrics.jsonl" for one in folders]
            wait_for(lambda: any(m.exists() and len(lines(m)) > 9 for m in metrics), 120, said)
            nodes.net.cut(node_of(asked["rank"]))
            wait_for(lambda: GONE in nodes.said(1 - node_of(asked["rank"])), 60, said)
        ends = asked["kind"] in (*ENDED, "none")
        if not ends:  # whoever is only busy is not ended
            if asked["kind"] != "down":
                wait_for(hangs, 120, said)
            time.sleep(1.0)  # the line follows
        codes = [agent.wait(150) if ends else agent.poll() for agent in nodes.agents.values()]
        where = {rank: node_of(rank) for rank in (0, 1)}
        started = [pid for agent in nodes.agents.values() for pid in children(agent.pid)]
        found = {
            "codes": codes,
            "node": where,
            "events": [events(node) for node in (0, 1)],
            "told": [[one for one in events(node) if one["event"] == "hang"] for node in (0, 1)],
            "said": [nodes.said(node) for node in (0, 1)],
            "steps": [
                sorted({row["step"] for row in lines(one / "metrics.jsonl")}) for one in folders
            ],
            "accounts": [
                path.read_text() for one in folders for path in (one / "logs").glob("hang-*.txt")
            ],
        }
    until_s = time.monotonic() + 15
    while left := [pid for pid in started if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > until_s:
            break
        time.sleep(0.1)
    return {**found, "left": left}
