"""One rank of a loop of one's own, every layout after the other: losses and weights as JSON.

Run as it stands on the CPU over gloo, and on simulated devices over "NCCL": `test_own_loop.py`
compares. Whatever differs between the two is a fault of order, place or lifetime, since kernels are
the same. The last line of rank 0 is {"device": …, "rows": {name: [loss, …, sum of weights]},
"launches": of all of them, "steps": {name: {"bits": digest of its weights, "all": launches of its
steps, "begun": those that began before they returned, "waits": {operator: times}}}}.

    python own_loop.py NAME … [--seeds N] [--cpu]    as RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT say

With seeds a layout trains N steps, each under a schedule of its own: seeds 0 to N − 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import traceback
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shoal
from shoal.fabric import World, start_world
from shoal.fabric.device import allocated_bytes, is_accelerator, synchronize
from shoal.fabric.exchanges.ring_exchange import Ring
from shoal.models.catalog import build
from shoal.parallel import offload
from shoal.parallel.offload.copy_stream import CopyStream
from shoal.trainer.guards.optimizer_settings import OptimizerSettingsGuard

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
    "one-bit fsdp": (2, {"strategy": "fsdp"}, {"compress": "one-bit:0"}),
    "bf16 weights": (2, {"strategy": "zero2"}, {"precision": "bf16"}),
    "saved": (2, {"strategy": "zero1"}, {}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}, {}),
    "tp fsdp": (4, {"tp": 2, "dp_shard": 2}, {}),
    "pp fsdp": (4, {"pp": 2, "dp_shard": 2}, {}),
    **{f"plain {name}": (2, {"strategy": name}, {}) for name in ("ddp", "zero1", "zero2", "fsdp")},
    "plain hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}, {}),
}
"""Processes, layout, policies. "plain …": a model that chooses no kernel by its device."""


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

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return 8 * self.steps

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = tokens(index // 8)[index % 8]
        return row[:-1], row[1:]


def module_of(name: str) -> nn.Module:
    """A transformer; "plain …": what chooses no kernel by its device, as norms and attention do."""
    torch.manual_seed(1)
    if name.startswith("plain"):
        wide = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        return nn.Sequential(nn.Embedding(61, 16), *wide, nn.Linear(16, 61))
    if name == "ep":
        sizes = {key: size for key, size in SIZES.items() if key != "kv_heads"}
        return build("moe", {**sizes, **EXPERTS}, vocabulary=61, sequence=12)
    return build("llama", SIZES, vocabulary=61, sequence=12)


def trained(world: World, name: str, seeds: int) -> tuple[list[float], dict[str, Any]]:
    """Losses of a few steps, then the sum of all weights' magnitudes; what the steps launched."""
    _, layout, policies = LAYOUTS[name]
    policies = dict(policies)
    on_device = world.device.type != "cpu"
    if "offload" in policies and not on_device:
        policies = {}  # its twin has nothing to move
    precision = policies.pop("precision", "fp64")
    folder = tempfile.mkdtemp(prefix="own-loop-") if name == "saved" else None
    # Many steps of a large rate would blow the last digit up, in which sums of ranks may differ.
    lr = 1e-5 if seeds else 1e-2
    run = shoal.parallelize(
        module_of(name),
        lambda parameters: torch.optim.AdamW(parameters, lr, foreach=True),
        layout=layout,
        batch=8,
        micro_batch=2,
        precision=precision,
        world=world,
        sample=samples,
        **policies,
    )
    losses: list[float] = []
    steps = seeds or STEPS
    before = launched(world)
    while len(losses) < steps:
        for batch in run.loader(Tokens(steps)):
            if seeds and on_device:
                seed_schedule(len(losses))
            losses.append(float(run.step(batch).loss))
            if folder is not None:
                run.save(folder, wait=False)  # beside the next step
            if len(losses) == steps:
                break
    told = since(before, launched(world))
    digest = hashlib.sha256()
    for parameter in run.model.parameters():
        digest.update(own_part(parameter).contiguous().view(-1).view(torch.uint8).numpy().data)
    whole = sum(float(own_part(p).abs().sum()) for p in run.model.parameters())
    for part in (run.checkpoint_saver, run.guards):  # all of `run.close` but leaving the world
        part.close()
    for undo in run.program.on_close:
        undo()
    left = sum(float(own_part(p).abs().sum()) for p in run.model.parameters())
    return [*losses, whole, left], {"bits": digest.hexdigest(), **told}


def turned(world: World) -> list[float]:
    """A turn of the ring, after which what was sent is overwritten, as its contract allows."""
    sent = torch.full((4096,), 1.0 + world.rank, device=world.device)
    turn = Ring(world).pass_on([sent])
    came = turn.result()[0]
    sent.fill_(7.0)
    return [float(came.sum()), float(sent.sum())]


def synchronised(world: World) -> list[float]:
    """What was copied to pinned memory may be read by the host once the device is done."""
    there = torch.full((4096,), 3.0, device=world.device)
    here = torch.zeros(4096, pin_memory=is_accelerator(world.device))
    here.copy_(there, non_blocking=True)
    synchronize(world.device)
    return [float(here.sum())]


def lent(world: World) -> list[float]:
    """Host memory that was on its way to the device may change once a lane has finished."""
    if not is_accelerator(world.device):
        return [12288.0]
    lane = CopyStream(world.device)
    here = lane.empty_on_host(torch.empty(4096, device=world.device)).fill_(3.0)
    there, arrived = lane.copy_to_device(here)
    lane.finish()
    here.fill_(7.0)
    lane.wait(arrived)
    return [float(there.sum())]


def parked(world: World) -> list[float]:
    """What autograd saved and no backward pass asks for is let go only when its copy is over."""
    if not is_accelerator(world.device):
        return [1.0]
    park, before = (
        offload.ActivationOffload(torch.nn.Identity(), (), world.device),
        allocated_bytes(world.device),
    )
    with park.micro_batch(0, 0):
        saved = torch.full((4096,), 3.0, device=world.device, requires_grad=True) * 2
        unused = saved.exp()  # its backward pass, which does not come, reads it
        del saved, unused
    left = allocated_bytes(world.device) - before
    again = [torch.zeros(4096, device=world.device) for _ in range(8)]  # its block among them
    return [1.0 + left + sum(float(one.sum()) for one in again)]


def uneven(world: World) -> list[float]:
    """A sum whose parts are of different lengths, then gathered."""
    flat = torch.arange(10.0, device=world.device) + world.rank
    cuts = [0, *(3 + rank for rank in range(world.size - 1)), 10]
    part = world.reduce_scatter(flat.clone(), cuts).result()
    flat[cuts[world.rank] : cuts[world.rank + 1]] = part
    work = world.all_gather_parts(flat, cuts)
    if work is not None:
        work.wait()
    return flat.tolist()


def refused(world: World) -> list[float]:
    """Replicas need their parameters whole, so no device can do without them."""
    layout, model = {"dp_replicate": world.size}, torch.nn.Linear(4, 4)
    try:
        shoal.parallelize(
            model, lambda p: torch.optim.SGD(p, lr=0.1), layout=layout, batch=8,
            world=world, offload="parameters",
        )  # fmt: skip
    except shoal.ShoalError as failure:
        asked = "ddp needs whole parameters on every device; try: layout.strategy=fsdp"
        return [float(asked in str(failure))]
    return [float(not is_accelerator(world.device))]


def rate(world: World) -> list[float]:
    """A rate on the device is read again once it was written, and not before."""
    optimizer = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = there = torch.tensor(0.5, device=world.device)
    check = OptimizerSettingsGuard(optimizer, world)
    first, again = (check.invariants(1)[0].value for _ in range(2))
    there.fill_(0.25)
    return [float(first == again), float(first == check.invariants(1)[0].value)]


PARTS = {
    "uneven": uneven,
    "rate": rate,
    "refused": refused,
    "ring": turned,
    "synchronised": synchronised,
    "lane": lent,
    "parked": parked,
}
"""Rows of one room of `fabric`, where no layout asks for all that it promises."""


def seed_schedule(seed: int) -> None:
    """Let the simulated device draw its order anew."""
    import simulated_cuda

    simulated_cuda.seed_schedule(seed)


Launched = tuple[int, int, dict[str, int]]


def launched(world: World) -> Launched:
    """Kernels, copies and collectives of this rank so far, those that began before their launch
    returned, and calls by operator."""
    if not is_accelerator(world.device):
        return 0, 0, {}
    import simulated_cuda

    return *simulated_cuda.launches(), simulated_cuda.counts()


def since(before: Launched, now: Launched) -> dict[str, Any]:
    """What was launched between two moments, and operators for which the host waited."""
    waits = {
        name.removesuffix(" (waits)"): times - before[2].get(name, 0)
        for name, times in now[2].items()
        if name.endswith(" (waits)")
    }
    return {
        "all": now[0] - before[0],
        "begun": now[1] - before[1],
        "waits": {name: times for name, times in waits.items() if times},
    }


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's part on this rank."""
    local = getattr(parameter, "to_local", None)
    part = (local() if local else parameter).detach()
    return torch.zeros(()) if part.is_meta else part.cpu()  # meta: another stage's


def main() -> None:
    """All the named layouts, in one world."""
    words = argparse.ArgumentParser()
    words.add_argument("names", nargs="+")
    words.add_argument("--seeds", type=int, default=0)
    words.add_argument("--cpu", action="store_true", help="as if there were no device")
    asked = words.parse_args()
    torch.set_num_threads(1)
    offload.ActivationOffload.__init__.__defaults__ = (1,)  # tensors here are small
    if asked.cpu:
        torch.accelerator.current_accelerator = lambda check_available=False: None
    world = start_world()
    rows: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for name in asked.names:
        try:
            with sdpa_kernel(SDPBackend.MATH):  # what the device has
                if name in PARTS:
                    rows[name] = PARTS[name](world)
                else:
                    rows[name], steps[name] = trained(world, name, asked.seeds)
        except Exception as failure:
            rows[name] = f"{type(failure).__name__}: {failure}"
            traceback.print_exc()  # on every rank: the others may wait for the one that failed
    told = {"device": str(world.device), "rows": rows, "steps": steps}
    told["launches"] = launched(world)[0]
    if world.rank == 0:
        print(json.dumps(told), flush=True)
    world.close()


if __name__ == "__main__":
    main()
