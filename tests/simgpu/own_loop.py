"""One rank of a loop of one's own, every layout after the other: losses and weights as JSON.

Run as it stands on the CPU over gloo, and on simulated devices over "NCCL": `test_own_loop.py`
compares. Whatever differs between the two is a fault of order, place or lifetime, since kernels are
the same. The last line of rank 0 is {"device": …, "rows": {name: [loss, …, sum of weights]}}.

    python own_loop.py NAME …      as RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT say
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import shoal
from shoal.fabric import start_world
from shoal.models.catalog import build
from shoal.parallel import offload

STEPS = 3
SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "dropout": 0.0}
EXPERTS = {"experts": 4, "hidden": 24}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}, {}),
    "zero1": (2, {"strategy": "zero1"}, {}),
    "zero2": (2, {"strategy": "zero2"}, {}),
    "fsdp": (2, {"strategy": "fsdp"}, {}),
    "tp": (2, {"tp": 2}, {}),
    "pp": (2, {"pp": 2}, {}),
    "cp": (2, {"cp": 2}, {}),
    "ep": (2, {"dp_replicate": 2, "ep": 2}, {}),
    "recompute": (2, {"strategy": "fsdp"}, {"recompute": "full"}),
    "compress": (2, {"strategy": "ddp"}, {"compress": "int8"}),
    "offload activations": (2, {"strategy": "ddp"}, {"offload": "activations"}),
    "offload optimizer": (2, {"strategy": "ddp"}, {"offload": "optimizer"}),
    "powersgd": (2, {"strategy": "ddp"}, {"compress": "powersgd:2"}),
    "topk": (2, {"strategy": "ddp"}, {"compress": "topk:0.25"}),
    "int8 zero": (2, {"strategy": "zero2"}, {"compress": "int8"}),
    "bf16 weights": (2, {"strategy": "zero2"}, {"precision": "bf16"}),
    "saved": (2, {"strategy": "zero1"}, {}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}, {}),
    "tp fsdp": (4, {"tp": 2, "dp_shard": 2}, {}),
    "pp fsdp": (4, {"pp": 2, "dp_shard": 2}, {}),
}


def tokens(step: int) -> torch.Tensor:
    """The step's samples, (8, 13); the same everywhere."""
    return torch.randint(0, 61, (8, 13), generator=torch.Generator().manual_seed(step))


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """A few, for layouts that look at what the model does with them."""
    whole = tokens(99)[:2]
    return whole[:, :-1], whole[:, 1:]


class Tokens:
    """The samples of all steps, in order of their number."""

    draws_nothing = True

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = tokens(index // 8)[index % 8]
        return row[:-1], row[1:]


def trained(world: Any, name: str) -> list[float]:
    """Losses of a few steps, then the sum of all weights' magnitudes."""
    _, layout, policies = LAYOUTS[name]
    policies = dict(policies)
    on_device = world.device.type != "cpu"
    if "offload" in policies and not on_device:
        policies = {}  # its twin has nothing to move
    kind = "moe" if name == "ep" else "llama"
    torch.manual_seed(1)
    sizes = {**SIZES, **EXPERTS} if kind == "moe" else SIZES
    if kind == "moe":
        del sizes["kv_heads"]
    module = build(kind, sizes, vocabulary=61, sequence=12)
    precision = policies.pop("precision", "fp64")
    folder = tempfile.mkdtemp(prefix="own-loop-") if name == "saved" else None
    run = shoal.parallelize(
        module,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
        layout=layout,
        batch=8,
        micro_batch=2,
        precision=precision,
        world=world,
        sample=samples,
        **policies,
    )
    losses = []
    while len(losses) < STEPS:
        for batch in run.loader(Tokens()):
            losses.append(float(run.step(batch).loss))
            if folder is not None:
                run.save(folder, wait=False)  # beside the next step
            if len(losses) == STEPS:
                break
    whole = sum(float(own_part(p).abs().sum()) for p in run.model.parameters())
    for part in (run.saving, run.touched, run.guard):  # all of `run.close` but leaving the world
        part.close()
    for undo in run.program.on_close:
        undo()
    return [*losses, whole]


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's part on this rank."""
    local = getattr(parameter, "to_local", None)
    part = (local() if local else parameter).detach()
    return torch.zeros(()) if part.is_meta else part.cpu()  # meta: another stage's


def main() -> None:
    """All the named layouts, in one world."""
    torch.set_num_threads(1)
    offload.Activations.__init__.__defaults__ = (1,)  # tensors here are small
    world = start_world()
    rows = {}
    for name in sys.argv[1:]:
        try:
            with sdpa_kernel(SDPBackend.MATH):  # what the device has
                rows[name] = trained(world, name)
        except Exception as failure:
            rows[name] = f"{type(failure).__name__}: {failure}"
            if world.rank == 0:
                import traceback

                traceback.print_exc()
    if world.device.type == "cuda":
        import simulated_cuda

        counted = simulated_cuda.counts()
        waiting = {k: n for k, n in counted.items() if k.endswith("(waits)")}
        launches = {"all": sum(counted.values()), "waiting": waiting}
    else:
        launches = {}
    if world.rank == 0:
        print(
            json.dumps({"device": str(world.device), "rows": rows, "launches": launches}),
            flush=True,
        )
    world.close()


if __name__ == "__main__":
    main()
