"""A model built in the page cache has the bits of a plain build and costs no private memory."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from forks import Forks
from shoal.base.errors import ConfigError
from shoal.machine import free_memory
from shoal.models.catalog import build
from shoal.parallel.build.mmap_init import OpenFiles, copy_to_memory, is_mapped, mmap_init

LEAST_BYTES = 4096


def transformers_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100,
    )  # fmt: skip
    built: nn.Module = transformers.LlamaForCausalLM(config)
    return built


class Careless(nn.Module):
    """Weights as people make them: by arithmetic, from numpy, by QR, with noise on top."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(64, 64) * 0.02)
        self.whole = nn.Parameter(torch.full((64, 64), 0.5) + torch.rand(64, 64))
        self.square = nn.Linear(64, 64)
        nn.init.orthogonal_(self.square.weight)
        nn.init.trunc_normal_(self.square.bias)
        self.recurrent = nn.LSTM(32, 64)
        self.copy = nn.Parameter(self.square.weight.detach().clone().to(torch.float64))
        self.register_buffer("mask", torch.ones(64, 64).triu(1).bool())
        self.image = nn.Conv2d(16, 64, 3).to(memory_format=torch.channels_last)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: build("llama", {"dim": 64, "layers": 2}),
    "gpt": lambda: build("gpt", {"dim": 64, "layers": 2, "tied": False}),
    "moe": lambda: build("moe", {"dim": 64, "layers": 2}),
    "resnet": lambda: build("resnet", {"channels": 32}),
    "transformers": transformers_model,
    "careless": Careless,
}


@pytest.mark.parametrize("name", list(MODELS))
def test_same_bits_as_a_plain_build(name: str) -> None:
    torch.manual_seed(3)
    plain = MODELS[name]()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with mmap_init(LEAST_BYTES):
        light = MODELS[name]()
    assert torch.equal(torch.get_rng_state(), after)
    one, other = plain.state_dict(), light.state_dict()
    assert list(one) == list(other)
    large = 0
    for key, tensor in other.items():
        assert torch.equal(one[key], tensor), key
        assert (one[key].stride(), one[key].dtype) == (tensor.stride(), tensor.dtype), key
        if tensor.numel() * tensor.element_size() >= LEAST_BYTES:
            large += 1
            assert is_mapped(tensor), key
    assert large > 2
    assert all(type(p) is nn.Parameter and p.is_leaf for p in light.parameters())


def test_conversion_and_training_work_on_it() -> None:
    """fp64 stays in files, a shard's copy does not, and what is trained is as it would be."""
    losses = []
    for context in (mmap_init(LEAST_BYTES), torch.enable_grad()):
        torch.manual_seed(3)
        with context:
            model = MODELS["gpt"]().double()
        if not losses:
            assert is_mapped(model.embedding.weight)
            assert not is_mapped(model.embedding.weight.detach()[:32].clone())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.arange(20).view(2, 10)).logits().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == losses[1]


def test_settled_models_share_what_they_shared_and_lie_in_memory() -> None:
    with mmap_init(LEAST_BYTES):
        model = MODELS["llama"]()
        model.register_buffer("corner", model.embedding.weight.detach()[3:5, :7])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    objects = [id(p) for p in model.parameters()]
    copy_to_memory([*model.parameters(), *model.buffers()])
    assert [id(p) for p in model.parameters()] == objects
    assert not any(is_mapped(t) for t in model.state_dict().values())
    assert all(t.untyped_storage().filename is None for t in model.state_dict().values())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    with torch.no_grad():
        model.embedding.weight.fill_(7)
    assert (model.corner == 7).all()
    assert (model.head.weight == 7).all()


def test_what_is_none_of_its_business_stays_as_it_is() -> None:
    source = torch.zeros(64, 64)
    with mmap_init(LEAST_BYTES):
        assert not is_mapped(torch.zeros(4))
        assert torch.empty(64, 64, device="meta").is_meta
        assert source.view(32, 128).data_ptr() == source.data_ptr()
        assert source.add_(1) is source
        assert not is_mapped(source)
        assert torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).shape == (64, 64)
    again = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    with mmap_init(LEAST_BYTES):
        here = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    assert is_mapped(here)
    assert torch.equal(here, again)


def test_files_are_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with mmap_init(LEAST_BYTES):
        weight = torch.ones(64, 64)
    assert is_mapped(weight)
    assert list(tmp_path.iterdir()) == []
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path) in maps.read_text()
        del weight
        assert str(tmp_path) not in maps.read_text()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only: memfd_create")
@pytest.mark.parametrize(("free", "in_memory"), [(2, 0), (3, 1), (4, 1), (5, 2), (7, 3)])
def test_what_goes_soon_lies_on_no_disk_while_there_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, in_memory: int
) -> None:
    """ext4 keeps 104 bytes of the kernel's memory beside each page of a file: 2.5 % of a model."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(free_memory, "free_bytes", lambda: free * 2**14)
    torch.manual_seed(3)
    plain = [torch.randn(64, 64) for _ in range(3)]
    torch.manual_seed(3)
    opened = OpenFiles()
    with mmap_init(LEAST_BYTES, opened):
        weights = [torch.randn(64, 64) for _ in range(3)]
        torch.zeros(4)
    assert list(opened) == [weight.untyped_storage().filename for weight in weights]
    assert opened.in_memory_bytes == in_memory * weights[0].nbytes
    for number, (weight, wanted) in enumerate(zip(weights, plain, strict=True)):
        descriptor = opened[str(weight.untyped_storage().filename)]
        where = "/memfd:" if number < in_memory else str(tmp_path)
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith(where)
        os.close(descriptor)
        assert is_mapped(weight)
        assert torch.equal(weight, wanted)
    assert list(tmp_path.iterdir()) == []
    copy_to_memory(weights)
    assert not any(is_mapped(weight) for weight in weights)


def test_without_a_place_in_memory_it_is_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems forbid such files (vm.memfd_noexec); in a full cgroup there is no room."""

    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "memfd_create", refused, raising=False)
    opened = OpenFiles()
    with mmap_init(LEAST_BYTES, opened):
        weight = torch.ones(64, 64)
    (name,) = opened
    os.close(opened[name])
    assert is_mapped(weight)
    assert not name.startswith("/proc")
    assert (weight == 1).all()


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError) as caught, mmap_init():
        torch.empty(2**20)
    assert str(caught.value) == (
        f"{tmp_path}: no room for 4.0 MiB of initial weights (No space left on device); try: "
        f"TMPDIR=… names a folder on a larger disk"
    )
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import resource
import torch
from shoal.models.catalog import build
from shoal.parallel.build.mmap_init import mmap_init

with mmap_init(0):
    build("llama", {"dim": 8, "layers": 1, "heads": 1, "vocabulary": 8})  # what is imported late
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
baseline = int(status["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (baseline + 150 * 2**20,) * 2)
sizes = {"dim": 1024, "layers": 8, "heads": 8, "vocabulary": 4096}
try:
    build("llama", sizes)
except RuntimeError as failure:
    print("plain:", "memory" in str(failure))
with mmap_init():
    model = build("llama", sizes)
size = sum(p.numel() * p.element_size() for p in model.parameters())
part = [p.detach()[: len(p) // 4].clone() for p in model.parameters()]
del model
print(size // 2**20, sum(p.numel() * p.element_size() for p in part) // 2**20)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits as on Linux")
def test_a_model_larger_than_the_limit_on_private_memory(programs: Forks) -> None:
    done = programs.run("-c", LIMITED, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    plain, sizes = done.stdout.splitlines()
    whole_mib, part_mib = map(int, sizes.split())
    assert plain == "plain: True"
    assert whole_mib >= 360
    assert part_mib < 110
