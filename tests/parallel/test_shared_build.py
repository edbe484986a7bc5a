"""What one process of a machine does so that others can map the model that it built."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from shoal.machine.process_memory import peak_memory_bytes, reset_peak_memory
from shoal.parallel.build.mmap_init import OpenFiles, is_mapped
from shoal.parallel.build.pretrained import checkpoint_folder
from shoal.parallel.build.weight_tables import make_weight_table
from shoal.trainer.run_folder.hub_files import is_pretrained

MIB = 2**20


def private_bytes() -> int:
    """What this process has in memory of its own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only: /proc")
def test_small_tensors_leave_memory_while_they_move_into_their_file() -> None:
    model = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(512))
    model.append(nn.Linear(128, 128, bias=False))
    model[512].weight = model[0].weight
    before = [one.weight.detach().sum().item() for one in model]
    reset_peak_memory(torch.device("cpu"))
    held, peak = private_bytes(), peak_memory_bytes(torch.device("cpu"))
    files = OpenFiles()
    assert make_weight_table(model, files)["tensors"]
    assert private_bytes() < held - 28 * MIB, "32 MiB of weights"
    assert peak_memory_bytes(torch.device("cpu")) < peak + 4 * MIB
    assert all(is_mapped(one.weight) for one in model)
    assert model[512].weight is model[0].weight
    assert [one.weight.detach().sum().item() for one in model] == before
    while files:
        os.close(files.popitem()[1])


def test_a_program_with_a_tokenizer_alone_does_not_import_the_models(monkeypatch) -> None:
    """transformers imports what is asked for, and its models take two CPU seconds on every rank."""
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    assert checkpoint_folder(nn.Linear(2, 2)) is None
    assert not is_pretrained(nn.Linear(2, 2))
    assert "transformers.modeling_utils" not in sys.modules
