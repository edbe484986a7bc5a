"""Ranks that wait for others say so, and whom they miss; they do not wait as long as in a collective."""

from __future__ import annotations

import logging
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from shoal.base.errors import ClusterError
from shoal.fabric import world as worlds
from shoal.fabric.rendezvous import rendezvous_store
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.fabric.world import start_world


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of rank 0 of three, which is alone."""
    monkeypatch.setattr(worlds, "JOIN_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(worlds, "TELL_AFTER_S", 0.2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def test_who_stays_away_is_named(place: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "shoal"),
        pytest.raises(
            ClusterError, match="^ranks 1, 2 of 3 did not come to 127.0.0.1:.* within 1 s"
        ),
    ):
        start_world(place)
    assert "shoal: rank 0 waits for ranks 1, 2" in caplog.messages


def test_a_rank_that_reaches_nobody_says_so(
    place: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "shoal"),
        pytest.raises(
            ClusterError, match="rank 1 of 3 .*: the processes did not meet at 127.0.0.1"
        ),
    ):
        start_world({**place, "RANK": "1"})
    assert any("rank 1 of 3: nobody answers at 127.0.0.1:" in said for said in caplog.messages)


@pytest.mark.parametrize("loopback", [True, False])
def test_whose_boundary_torchruns_store_has_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, loopback: bool
) -> None:
    """By rank 0, where other machines reach it."""
    monkeypatch.setattr(rendezvous_store, "is_loopback", lambda host: loopback)
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = ProcessInfo(port=agents.port, agent_store=True, started_by="torchrun")
    with caplog.at_level(logging.WARNING, "shoal"):
        rendezvous_store.open_store(place, timedelta(seconds=5), 1.0)
    said = [line for line in caplog.messages if "which asks nobody who he is" in line]
    assert len(said) == (not loopback)
