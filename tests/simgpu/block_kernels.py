"""Kernels, casts and copies of a block's step: ours beside DDP and FSDP2 written by hand, eager both.

    python tests/simgpu/block_kernels.py                the table, on simulated devices, two ranks
    python tests/simgpu/block_kernels.py --out FILE     the counts by operator too
    python tests/simgpu/block_kernels.py --cpu          on the CPU, whose kernels are others
    python tests/simgpu/block_kernels.py rank NAME …    one rank, as RANK, WORLD_SIZE, … say

A model is trained with 2 and with 4 blocks: half of the difference is one block's, forward and
backward; what is left belongs to no block (embedding, head, loss, optimizer, the step itself). The
step counted is the sixth, in which no guard reads all weights. An operator that changes or makes no
tensor's data, such as a view, is no kernel. A simulated device has torch's plain attention: both
sides pay for it alike.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SIZES = {"vocabulary": 64, "dim": 64, "heads": 4, "kv_heads": 4, "hidden": 96, "sequence": 16}
BLOCKS, STEP, MICRO_BATCH, LR = (2, 4), 6, 2, 1e-3
OURS = {
    "ours ddp": ("ddp", "fp32"),
    "ours fsdp": ("fsdp", "fp32"),
    "ours ddp, bf16 residual": ("ddp", "bf16"),
    "ours fsdp, bf16 residual": ("fsdp", "bf16"),
}
BY_HAND = ("DDP by hand", "FSDP2 by hand")
HEAD = "loss of 32768 classes"
FOREIGN = ("hf: Llama", "hf: Qwen3", "hf: ViT", "our ViT")
"""Under ddp in fp32 residuals, eager: what their modules launch beside ours."""
NO_KERNEL = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view"),
    *("lift_fresh", "detach", "alias", "set_", "resize_", "record_stream", "is_pinned"),
    *("_local_scalar_dense", "is_same_size", "equal"),
}
COPIES = {
    *("clone", "copy_", "_to_copy", "_foreach_copy_", "cat", "all_gather_copy_in", "chunk_cat"),
    *("split_with_sizes_copy", "slice_backward", "select_backward"),
}
PARTS = ("kernels", "casts", "copies", "collectives")


class Kernels(TorchDispatchMode):
    """Counts operators that write data, by name; casts and copies among them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.on = device, False
        self.names: Counter[str] = Counter()
        self.parts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(one, torch.Tensor) and one.__name__ == "DTensor" for one in types):
            return NotImplemented  # what it does with its local tensors comes here
        results = func(*args, **(kwargs or {}))
        if self.on:
            self.note(func, [*tensors((args, kwargs)), *tensors(results)], tensors(results))
        return results

    def note(self, func: Any, seen: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Count a call."""
        name = func._schema.name.partition("::")[2]
        if not any(one.device.type == self.device for one in seen) or name in NO_KERNEL:
            return
        space = func._schema.name.partition("::")[0]
        if space in ("c10d", "_c10d_functional"):
            self.parts["collectives"] += 1
            return
        if not writes(func):
            return
        self.names[name] += 1
        self.parts["kernels"] += 1
        if name in COPIES:
            formats = {one.dtype for one in seen if one.is_floating_point()}
            self.parts["casts" if len(formats) > 1 else "copies"] += 1


def tensors(values: Any) -> list[torch.Tensor]:
    """All tensors inside."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return [one for one in leaves if isinstance(one, torch.Tensor)]


def writes(func: Any) -> bool:
    """Whether an operator makes or changes data: it mutates an argument, or returns no view."""
    schema = func._schema
    if schema.is_mutable:
        return True
    return any(one.alias_info is None for one in schema.returns)


class Trainer:
    """A model in training; `step` is one optimizer step on this rank's samples."""

    step: Callable[[torch.Tensor, torch.Tensor], None]


def ours(world: Any, layout: str, residual: str, model: nn.Module, loss: Any = None) -> Trainer:
    """`shoal.parallelize` in bf16."""
    import shoal

    more = {} if residual == "fp32" else {"residual": residual}
    run = shoal.parallelize(
        model,
        lambda p: torch.optim.AdamW(p, LR, foreach=True),
        loss,
        layout=layout,
        batch=MICRO_BATCH * world.size,
        micro_batch=MICRO_BATCH,
        precision="bf16",
        clip=1.0,
        world=world,
        **more,
    )
    made = Trainer()
    made.step = lambda x, y: run.step((x, y)) and None
    return made


def by_hand(world: Any, name: str, layers: int) -> Trainer:
    """The programs of benchmarks/, on this device."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from plain_llama import PlainLlama, mean_loss
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    device = world.device.type
    model = PlainLlama(**SIZES, layers=layers).to(world.device)
    around: Any = nullcontext
    if name == "FSDP2 by hand":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        whole: nn.Module = fully_shard(model, mp_policy=policy)
    else:
        whole = DistributedDataParallel(model)
        around = lambda: torch.autocast(device, torch.bfloat16)  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters(), LR, foreach=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        with around():
            loss = mean_loss(whole(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    made = Trainer()
    made.step = step
    return made


def foreign(name: str, layers: int) -> nn.Module:
    """A model of transformers, or ours that it is compared with."""
    from shoal.models.catalog import build

    if name == "our ViT":
        return build("vit", {"dim": 64, "layers": layers, "heads": 4, "patch": 4})
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 4}
    words = {"vocab_size": 64, "max_position_embeddings": 16, "use_cache": False}
    if name == "hf: ViT":
        config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1)
        return transformers.ViTForImageClassification(config)
    if name == "hf: Llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **words))
    words |= {"num_key_value_heads": 4, "head_dim": 16}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **words))


def program(world: Any, name: str, layers: int) -> Trainer:
    """The program of that name, with so many blocks."""
    from shoal.models.llama import Llama

    torch.manual_seed(0)
    if name in OURS:
        layout, residual = OURS[name]
        return ours(world, layout, residual, Llama(**SIZES, layers=layers))
    if name in FOREIGN:
        return ours(world, "ddp", "fp32", foreign(name, layers))
    return by_hand(world, name, layers)


def samples(world: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's, of a step."""
    draw = torch.Generator().manual_seed(world.rank)
    if "ViT" in name:
        x = torch.randn(MICRO_BATCH, 1, 8, 8, generator=draw)
        return x.to(world.device), torch.zeros(MICRO_BATCH, dtype=torch.long, device=world.device)
    whole = torch.randint(0, 64, (MICRO_BATCH, SIZES["sequence"] + 1), generator=draw)
    return whole[:, :-1].to(world.device), whole[:, 1:].to(world.device)


def counted_head(world: Any) -> dict[str, Any]:
    """Counts of the loss of a large vocabulary, whose weight is fp32 and whose products are bf16."""
    import shoal

    hidden = torch.randn(32, 16, device=world.device, requires_grad=True)
    weight = torch.randn(32768, 16, device=world.device, requires_grad=True)
    kernels = Kernels(world.device.type)
    with kernels, torch.autocast(world.device.type, torch.bfloat16):
        kernels.on = True
        targets = torch.zeros(32, dtype=torch.long, device=world.device)
        shoal.linear_cross_entropy(hidden, weight, targets)[0].backward()
    nothing = dict.fromkeys(PARTS, 0)
    return {"block": nothing, "outside": dict(kernels.parts), "operators": dict(kernels.names)}


def counted(world: Any, name: str) -> dict[str, Any]:
    """Counts of a step: for one block, outside of blocks, and by operator."""
    if name == HEAD:
        return counted_head(world)
    by_depth = []
    for layers in BLOCKS:
        made, (x, y) = program(world, name, layers), samples(world, name)
        kernels = Kernels(world.device.type)
        with kernels:
            for number in range(1, STEP + 1):
                kernels.on = number == STEP
                made.step(x, y)
        by_depth.append(kernels)
    few, many = by_depth
    between = BLOCKS[1] - BLOCKS[0]
    block = {part: (many.parts[part] - few.parts[part]) / between for part in PARTS}
    names = {n: (many.names[n] - few.names[n]) / between for n in many.names}
    return {
        "block": block,
        "outside": {part: few.parts[part] - BLOCKS[0] * block[part] for part in PARTS},
        "operators": {n: many_of for n, many_of in sorted(names.items()) if many_of},
    }


def rank(names: list[str]) -> None:
    """Count the named programs; rank 0 prints them as JSON."""
    from shoal.fabric import start_world
    from shoal.models import llama

    torch.set_num_threads(1)
    llama.is_recording = lambda: False  # this program's mode only counts: layers share a table
    world = start_world()
    rows = {}
    for name in names:
        with sdpa_kernel(SDPBackend.MATH):  # what the device has
            rows[name] = counted(world, name)
    if world.rank == 0:
        print(json.dumps({"device": str(world.device), "rows": rows}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # several runs were opened in this world, and none of them closes it


def table(rows: dict[str, Any]) -> str:
    """The counts of all programs.

    >>> counts = dict.fromkeys(PARTS, 1.0)
    >>> print(table({"ours": {"block": counts, "outside": counts}}))
    | a block, forward and backward | kernels | casts | copies | collectives | outside of blocks |
    |---|---|---|---|---|---|
    | ours | 1 | 1 | 1 | 1 | 1 |
    """
    lines = [
        f"| a block, forward and backward | {' | '.join(PARTS)} | outside of blocks |",
        "|---" * (len(PARTS) + 2) + "|",
    ]
    for name, row in rows.items():
        cells = [f"{row['block'][part]:g}" for part in PARTS]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['outside']['kernels']:g} |")
    return "\n".join(lines)


def names_here() -> list[str]:
    """Programs that this source can run."""
    from shoal.base.layouts.policies import POLICIES

    known = [name for name, (_, form) in OURS.items() if form == "fp32" or "residual" in POLICIES]
    return [*known, *BY_HAND, *FOREIGN, HEAD]


def main() -> None:
    """Start two ranks and print the table."""
    import argparse

    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("names", nargs="*")
    words.add_argument("--cpu", action="store_true")
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    sys.path[:0] = [str(HERE), str(ROOT / "src")]
    from ranks import on_cpu, world

    environ = on_cpu()
    if not asked.cpu:
        from simulated.build import library

        paths = (HERE / "site", environ["PYTHONPATH"])
        environ |= {"SIM_LIBRARY": str(library()), "PYTHONPATH": os.pathsep.join(map(str, paths))}
    told = world("block_kernels.py", 2, ["rank", *(asked.names or names_here())], environ)
    sys.stdout.write(f"{told['device']}\n{table(told['rows'])}\n")
    if asked.out:
        told.pop("said")
        asked.out.write_text(
            json.dumps({**told, "sizes": SIZES, "torch": torch.__version__}) + "\n"
        )


if __name__ == "__main__":
    rank(sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main()
