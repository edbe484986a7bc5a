"""One rank of some layouts, one after another: bits of the weights, and what their steps launched.

Run as it stands on the CPU, and on simulated devices; `test_launches.py` reads rank 0's last line,
{name: {"bits": digest of its weights, "all": launches, "begun": …, "waits": {operator: times}}}.

    python counted_case.py NAME …      as RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT say
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.fabric import World, start_world
from shoal.models.catalog import build

STEPS, ROWS = 3, 8
SIZES = {"dim": 32, "layers": 2, "heads": 4, "dropout": 0.0}
LAYOUTS: dict[str, Any] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "cp": {"cp": 2},
    "ep": {"dp_replicate": 2, "ep": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "pp fsdp": {"pp": 2, "dp_shard": 2},
}


def module_of(name: str) -> nn.Module:
    """A transformer; "plain …": what chooses no kernel by its device, as norms and attention do."""
    torch.manual_seed(1)
    if name.startswith("plain"):
        wide = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        return nn.Sequential(nn.Embedding(61, 16), *wide, nn.Linear(16, 61))
    more = {"experts": 4, "hidden": 24} if name == "ep" else {"kv_heads": 2}
    kind = "moe" if name == "ep" else "llama"
    return build(kind, {**SIZES, **more}, vocabulary=61, sequence=12)


def batch_of(step: int, world: World, replicas: int) -> tuple[Tensor, Tensor]:
    """This rank's samples of a step; ranks that share a model, along an outer axis, see the same."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 61, (ROWS, 13), generator=draw)
    own = tokens[world.rank % replicas :: replicas]
    return own[:, :-1], own[:, 1:]


def launched(world: World) -> tuple[int, int, dict[str, int]]:
    """Launches of this process so far, those begun before they returned, operators that waited."""
    if world.device.type == "cpu":
        return 0, 0, {}
    import simulated_cuda

    return *simulated_cuda.launches(), simulated_cuda.counts()


def trained(world: World, name: str) -> dict[str, Any]:
    """A few steps."""
    layout = LAYOUTS[name.removeprefix("plain ")]
    run = shoal.parallelize(
        module_of(name),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
        layout=layout,
        batch=ROWS,
        micro_batch=2,
        precision="fp64",
        world=world,
        sample=batch_of(99, world, 1),
    )
    replicas = run.plan.layout.data_degree
    every, begun, counts = launched(world)
    for step in range(STEPS):
        run.step(batch_of(step, world, replicas))
    every_now, begun_now, counts_now = launched(world)
    waits = {k: n - counts.get(k, 0) for k, n in counts_now.items() if k.endswith(" (waits)")}
    digest = hashlib.sha256()
    for parameter in run.model.parameters():
        local = getattr(parameter, "to_local", lambda p=parameter: p)().detach()
        digest.update(b"" if local.is_meta else local.cpu().contiguous().numpy().tobytes())
    for undo in run.program.on_close:
        undo()
    return {
        "bits": digest.hexdigest(),
        "all": every_now - every,
        "begun": begun_now - begun,
        "waits": {k.removesuffix(" (waits)"): n for k, n in waits.items() if n},
    }


def main() -> None:
    """All the named layouts, in one world."""
    torch.set_num_threads(1)
    world = start_world()
    told = {name: trained(world, name) for name in sys.argv[1:]}
    if world.is_first:
        print(json.dumps({"device": str(world.device), **told}), flush=True)
    world.close()


if __name__ == "__main__":
    main()
