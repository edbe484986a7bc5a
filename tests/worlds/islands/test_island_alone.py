"""One island alone with a plain mean outside is a run without islands, and is one in this process."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

import island_case


def test_an_island_that_streams_alone_trains_as_without_islands(tmp_path: Path) -> None:
    """Nothing that is learnt while a fragment travels is lost, and no sample is taken twice."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{free.getsockname()[1]}"
    asked = {"optimizer": "momentum", "model": "llama", "folder": str(tmp_path), "batch": 4}
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "none"}
    streams = {"method": "streaming-diloco", "period": 4, "fragments": 2, "overlap": 1}
    threads = torch.get_num_threads()
    told = island_case.train(island_case.single(), 0, 1, at, rounds=3, **streams, **plain, **asked)
    assert told["stream"]["open"] == []
    island_case.data_parallel(island_case.single(), steps=12, **asked)
    torch.set_num_threads(threads)
    ours, theirs = (torch.load(tmp_path / f"{w}.pt") for w in ("own-0", "weights-dp"))
    apart = torch.sqrt(sum(((ours[n] - theirs[n]) ** 2).sum() for n in theirs))
    assert apart <= 1e-12 * told["norm"]
