"""The programs that a GPU's speed is read from: the speed mode of Shoal, and two by hand in PyTorch.

    shoal, again   compile = blocks, bf16 (its residual stream too, where this source has the key),
                   fused AdamW, the loss in chunks; twice, for the noise
    fsdp2          benchmarks/sharded_peers.py: fully_shard by blocks, bf16 parameters, compiled blocks
    pytorch        fp32 weights under autocast, no process group; blocks compiled, and head and loss as
                   one function

All have the same initial weights and samples, fused AdamW, clipping at 1, one pass a step.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from device import DEVICE, ON_GPU, SMALL, pick
from shoal.base.layouts.policies import POLICIES
from shoal.fabric import World, start_world

GPT2_SIZE = {"vocabulary": 50304, "dim": 768, "layers": 12, "heads": 12, "kv_heads": 12}
ARGUMENTS: dict[str, Any] = pick(
    {**GPT2_SIZE, "hidden": 2048, "sequence": 1024},
    {"vocabulary": 128, "dim": 32, "layers": 2, "heads": 2, "kv_heads": 2, "hidden": 48}
    | {"sequence": 16},
)
BILLION: dict[str, Any] = pick(
    {"vocabulary": 32000, "dim": 2048, "layers": 18, "heads": 16, "kv_heads": 16}
    | {"hidden": 5632, "sequence": 2048},
    {**ARGUMENTS, "layers": 3},
)
LARGE_GPU_BYTES = 60e9
NAMES = ("shoal", "again", "fsdp2", "pytorch")


def residual_formats() -> tuple[str, ...]:
    """Formats of the residual stream that this source can train in, the widest first."""
    return ("fp32", "bf16") if "residual" in POLICIES else ("fp32",)


def compile_policy() -> str:
    """blocks, or none on a GPU without Triton: a simulated one."""
    usable = not ON_GPU or importlib.util.find_spec("triton") is not None
    return "blocks" if usable else "none"


def micro_batch(large: int = 32, small: int = 8) -> int:
    """Samples of a pass: as many as fill the device's memory."""
    if SMALL:
        return 2
    held_bytes = torch.cuda.get_device_properties(0).total_memory
    return large if held_bytes > LARGE_GPU_BYTES else small


@dataclass(frozen=True)
class Setting:
    """How all programs of a comparison train."""

    arguments: dict[str, Any]
    micro_batch: int
    accumulate: int = 1
    residual: str = residual_formats()[-1]
    compile: str = compile_policy()

    @property
    def case(self) -> Any:
        """The same for benchmarks/peers.py."""
        from peers import Case

        return Case("", self.arguments, "bf16", self.micro_batch, self.accumulate)

    @property
    def block_passes(self) -> int:
        """Blocks × micro-batches of a step."""
        return int(self.arguments["layers"]) * self.accumulate

    @property
    def rows(self) -> int:
        """Samples of a step on one rank."""
        return self.micro_batch * self.accumulate

    def as_json(self) -> dict[str, Any]:
        """For a row."""
        return {
            "micro_batch": self.micro_batch,
            "accumulate": self.accumulate,
            "residual": self.residual,
            "compile": self.compile,
            "device": torch.cuda.get_device_name(0) if ON_GPU else "cpu",
        }


def alone() -> World:
    """The world of one process, with the group of one rank that FSDP2 wants."""
    world = start_world({})
    world.device = DEVICE
    one_rank_group(world)
    return world


def one_rank_group(world: World) -> None:
    """FSDP2 wants a process group also where there is one rank."""
    if world.size == 1 and not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        backend = "nccl" if ON_GPU else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


class PyTorch:
    """A loop by hand on one device: autocast over fp32 weights; blocks, head and loss compiled."""

    def __init__(self, setting: Setting, model: Any) -> None:
        from peers import LR

        self.losses: list[Any] = []
        self.setting, self.model = setting, model
        self.loss: Any = head_loss
        if setting.compile != "none":
            self.loss = torch.compile(head_loss)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """One optimizer step."""
        from peers import CLIP
        from sharded_peers import parts_of

        parts, kept = parts_of(self.setting.case, tokens, targets), []
        for x, y in parts:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                hidden = self.model.hidden_states(x)
                loss = self.loss(hidden, self.model.head.weight, y) / len(parts)
            loss.backward()
            kept.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(sum(kept))


def head_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of hidden states [batch, seq, dim] through the head."""
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).float(), targets.flatten())


def make(
    name: str, setting: Setting, world: World, weights: dict[str, torch.Tensor], layout: str
) -> Any:
    """The program of that name, on the device."""
    import sharded_peers
    from peers import Shoal

    from shoal.models.llama import Llama

    if name in ("shoal", "again"):
        own = Llama(**setting.arguments)
        own.load_state_dict(weights)
        return Shoal(setting.case, world, own, layout, setting.compile, setting.residual)
    from plain_llama import PlainLlama

    model = PlainLlama(**setting.arguments)
    model.load_state_dict(weights)
    model.to(DEVICE)
    if setting.compile != "none":
        for block in model.blocks:
            block.compile()
    if name == "fsdp2":
        return sharded_peers.Fsdp2(setting.case, model, tuned=True)
    return PyTorch(setting, model)


def initial_weights(setting: Setting) -> tuple[dict[str, torch.Tensor], float]:
    """The weights that all programs start from, and the FLOPs of one sample's training."""
    from shoal.models.llama import Llama

    torch.manual_seed(0)
    source = Llama(**setting.arguments)
    weights = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    return weights, flops_of_one(source, setting.arguments["sequence"])


def flops_of_one(model: torch.nn.Module, sequence: int) -> float:
    """Of one sample, forward and backward, by the planner's count of products (no recompute)."""
    from shoal.models.loss import token_loss
    from shoal.trace.costs.flops import count_training_flops

    tokens = torch.zeros(1, sequence, dtype=torch.long)
    found = count_training_flops(model, (tokens, tokens), lambda m, b: token_loss(m(b[0]), b[1])[0])
    assert found, "the FLOPs of a step could not be counted"
    return float(found)


def text_rows(setting: Setting, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's samples: bytes of the standard library's sources, no two steps the same."""
    sequence, rows = setting.arguments["sequence"], setting.rows
    size = rows * (sequence + 1)
    whole = library_text((step + 1) * size)
    part = torch.frombuffer(bytearray(whole[step * size : (step + 1) * size]), dtype=torch.uint8)
    tokens = part.long().view(rows, sequence + 1) % setting.arguments["vocabulary"]
    return tokens[:, :-1].contiguous().to(DEVICE), tokens[:, 1:].contiguous().to(DEVICE)


_TEXT = bytearray()
_FILES: list[Any] = []


def library_text(least_bytes: int) -> bytearray:
    """At least so many bytes of the standard library's sources, in the order of their names."""
    import sysconfig
    from pathlib import Path

    if not _FILES and not _TEXT:
        _FILES.extend(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), reverse=True))
        _FILES[:0] = sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"), reverse=True)
    while len(_TEXT) < least_bytes:
        # Where it has been read whole, it begins again.
        _TEXT.extend(_FILES.pop().read_bytes() if _FILES else bytes(_TEXT))
    return _TEXT


def timed(work: Any) -> float:
    """Seconds until the device has done it."""
    from device import synchronize

    synchronize()
    began_s = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began_s
