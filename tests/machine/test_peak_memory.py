"""The peak of a process, and that it can be measured from a moment on."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from shoal.machine import process_memory
from shoal.machine.process_memory import peak_memory_bytes, reset_peak_memory, trim_grown_heap

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="resident peaks can be reset on Linux only")
def test_what_is_over_is_forgotten() -> None:
    before = peak_memory_bytes(CPU)
    torch.ones(64 * MIB, dtype=torch.uint8).sum()  # touched, then freed
    high = peak_memory_bytes(CPU)
    assert high >= before
    reset_peak_memory(CPU)
    held = torch.ones(256 * MIB, dtype=torch.uint8)
    assert int(held[0]) == 1
    assert peak_memory_bytes(CPU) >= 256 * MIB
    del held
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) < high + 128 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="resident peaks can be reset on Linux only")
def test_a_reading_may_serve_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "FRESH_S", 60.0)
    reset_peak_memory(CPU)
    before = peak_memory_bytes(CPU, fresh=False)
    held = torch.ones(256 * MIB, dtype=torch.uint8)
    assert peak_memory_bytes(CPU, fresh=False) == before
    assert peak_memory_bytes(CPU) >= before + 128 * MIB
    del held
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU, fresh=False) < before + 128 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="resident peaks can be reset on Linux only")
def test_what_the_heap_keeps_of_an_earlier_phase_is_not_held() -> None:
    """Blocks below the threshold of mmap, freed under one that stays: glibc keeps their memory."""
    blocks = [torch.ones(2**16, dtype=torch.uint8) for _ in range(4096)]
    full = peak_memory_bytes(CPU)
    del blocks[:-1]
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) < full - 128 * MIB


def test_a_heap_that_grows_is_trimmed_and_what_stays_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []
    monkeypatch.setattr(process_memory, "PROCESS", tmp_path)
    monkeypatch.setattr(process_memory, "trim_heap", lambda: trims.append(1))
    monkeypatch.setattr(process_memory, "_heap_limit", 0)
    monkeypatch.setattr(process_memory, "_was_trimmed", False)

    def call(mib: int) -> int:
        (tmp_path / "statm").write_text(f"9 {mib * MIB // mmap.PAGESIZE} 9 9 0 9 0")
        trim_grown_heap()
        return len(trims)

    grown = [call(mib) for mib in (1000, 1180, 1189, 1190, 1100, 1400)]
    assert grown == [0, 0, 0, 1, 1, 2], "limit 1000 + 125 + 64 MiB; 1100: the trim gave holes back"
    assert [call(mib) for mib in (1400, 1630, 1640)] == [2, 2, 3], "1400 is its own: limit 1639"
    (tmp_path / "statm").unlink()
    trim_grown_heap()  # a system without /proc
    assert len(trims) == 3
