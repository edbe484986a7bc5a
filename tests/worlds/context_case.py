"""Context parallelism on real processes: what is compared, counted, measured, and planted."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import any_case
from inside_causes import explained
from limited_case import limited
from planted_divided import shared_twice, tie_not_summed
from shoal.fabric import World
from shoal.machine.states import measure_peak_bytes
from shoal.models.catalog import build
from shoal.models.loss import find_logits, token_loss
from shoal.parallel import context_parallel
from shoal.parallel.program import Program
from shoal.parallel.spmd import autograd_collectives
from shoal.parallel.spmd.check_causes import CheckFinding
from shoal.proof import Battery
from shoal.proof.battery import SGD
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run

MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2}, 61),
    "untied": ("llama", {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "tied": False}, 61),
    "gpt": ("gpt", {"dim": 16, "layers": 2, "heads": 4}, 61),
    "moe": ("moe", {"dim": 16, "layers": 2, "heads": 4, "experts": 4, "hidden": 12}, 61),
    "dropout": ("llama", {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "dropout": 0.1}, 61),
}
STEPS = 2


@functools.cache
def battery(model: str) -> Battery:
    """One battery per model and process: the twin's records serve every layout."""
    with patch.dict(any_case.OURS, MODELS):
        trial = any_case.trial_of(model)
    made = Battery(trial, steps=STEPS)
    return replace(made, optimizers={SGD: made.optimizers[SGD]})


def prove(world: World, model: str, layout: dict[str, Any], bug: str = "none") -> dict[str, Any]:
    """The report on a layout, with a planted bug or without."""
    torch.set_num_threads(1)
    unchecked = patch.object(context_parallel, "check_class", lambda module, group, *axes: None)
    with patch.dict(any_case.OURS, MODELS), BUGS[bug]():
        if bug == "none":
            return explained(battery(model), world, layout)
        with unchecked:
            return explained(battery(model), world, layout)


# ---- planted bugs


@contextmanager
def nothing() -> Iterator[None]:
    """No bug."""
    yield


@contextmanager
def restarted() -> Iterator[None]:
    """Every rank takes the first part of tables: its own tokens count from 0."""
    right = autograd_collectives.cut_tensor

    def cut(value: Any, label: Any, rank: int, degree: int) -> Any:
        return right(value, label, rank if value.requires_grad else 0, degree)

    with patch.object(autograd_collectives, "cut_tensor", cut):
        yield


@contextmanager
def restarted_lookup() -> Iterator[None]:
    """Every rank looks up the first positions: those of the first rank."""
    from shoal.parallel.context_parallel import sharded_forward

    right = sharded_forward.local_part_of

    def local_of(value: Any, deal: Any) -> Any:
        if value.dim() > 1:
            return right(value, deal)
        return value[: right(value, deal).shape[0]]

    with patch.object(sharded_forward, "local_part_of", local_of):
        yield


@contextmanager
def all_differentiate() -> Iterator[None]:
    """Every rank of a sequence differentiates the loss that all of them have."""
    with patch.object(Program, "differentiates", True):
        yield


@contextmanager
def all_speak() -> Iterator[None]:
    """Every rank of a sequence counts the targets that all of them have."""
    with patch.object(Program, "speaks", True):
        yield


@contextmanager
def own_keys() -> Iterator[None]:
    """Keys and values do not travel: a rank's tokens see each other only."""
    from shoal.parallel.context_parallel import ring

    right = ring.UnmaskedKeys.of

    def of(self: Any, source: int) -> Any:
        return right(self, source) if self.rank == source else iter(())

    with patch.object(ring.UnmaskedKeys, "of", of):
        yield


BUGS = {
    "none": nothing,
    "position restart": restarted,
    "position restart, learnt": restarted_lookup,
    "joined twice": shared_twice,
    "not joined": tie_not_summed,
    "all differentiate": all_differentiate,
    "all speak": all_speak,
    "own keys": own_keys,
}


# ---- runs


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What runs tell inside."""
    told: list[str] = []

    def hear(recorder: MetricsRecorder, text: str) -> None:
        told.append(text)

    with patch.object(MetricsRecorder, "notice", hear):
        yield told


def _run(
    world: World, module: nn.Module, tokens: torch.Tensor, layout: dict[str, Any], **more: Any
) -> Run:
    return parallelize(
        module,
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        layout=layout,
        batch=len(tokens),
        micro_batch=len(tokens),
        sample=(tokens, tokens),
        world=world,
        **more,
    )


def _llama(sequence: int, **arguments: Any) -> nn.Module:
    settings = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "tied": False, **arguments}
    torch.manual_seed(0)
    return build("llama", settings, vocabulary=61, sequence=sequence)


def travels(world: World, context: str) -> dict[str, Any]:
    """What a rank sends in a step, by kind, and what is told of it at the start."""
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))
    batch = (tokens, tokens.roll(-1, 1))
    with _heard() as told:
        run = _run(world, _llama(16), tokens, {"cp": world.size, "context": context})
        run.step(batch)
    calls: list[tuple[str, int]] = []
    count = world.traffic.count

    def counting(kind: str, payload_bytes: int, degree: int, *axis: str) -> None:
        if degree > 1:
            calls.append((kind, payload_bytes))
        count(kind, payload_bytes, degree, *axis)

    world.traffic.count = counting
    run.step(batch)
    del world.traffic.count
    _close(run)
    return {"calls": calls, "notices": told}


def divides(world: World, layout: dict[str, Any]) -> dict[str, Any]:
    """What a rank has of 8 tokens, 4 heads and 2 key heads: between layers and in attention."""
    from shoal.parallel import context_parallel

    tokens = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(1))
    seen: dict[str, Any] = {"tokens": set(), "heads": set()}
    right = context_parallel.select_attention("auto")
    assert right is not None

    def attention(q: Any, axis: Any, k: Any, v: Any, **options: Any) -> torch.Tensor:
        seen["heads"].add((q.shape[2], q.shape[1], k.shape[1]))
        return right(q, axis, k, v, **options)

    with (
        _heard() as told,
        patch.object(context_parallel, "select_attention", lambda context: attention),
    ):
        run = _run(world, _llama(8), tokens, layout)
    block = run.model.get_submodule("blocks.1")
    hook = block.register_forward_pre_hook(
        lambda module, args: seen["tokens"].add(args[0].local.local.shape[1])
    )
    run.step((tokens, tokens.roll(-1, 1)))
    hook.remove()
    _close(run)
    return {"notices": told, **{name: sorted(several) for name, several in seen.items()}}


def keys_held(world: World, samples: int) -> list[float]:
    """Keys and values in this rank's memory at each step of attention, in shares of one rank.

    By looking: numbers of any rank's keys and values in any tensor, with a window and padding.
    """
    from shoal.fabric.exchanges.ring_exchange import Ring
    from shoal.parallel.context_parallel import ring

    gc.collect()
    gc.freeze()  # only what is made from here on needs a look
    size, tokens = world.size, 8
    draw = torch.Generator().manual_seed(5)
    shape = (samples, size * tokens, 4, 8)
    place, wide = world.device, torch.float64
    every = [torch.randn(shape, generator=draw, dtype=wide).to(place) for _ in range(2)]
    known = torch.cat([one.reshape(-1) for one in every]).sort().values
    mine = [one.chunk(size, 1)[world.rank].clone() for one in every]
    share = sum(one.numel() for one in mine)
    del every
    k, v = (one.transpose(1, 2).requires_grad_() for one in mine)
    q = torch.randn(samples, 4, tokens, 8, dtype=wide, device=place, requires_grad=True)
    near = torch.arange(size * tokens)[:, None] - torch.arange(size * tokens)
    padded = torch.arange(size * tokens) < size * tokens - 3
    mask = ((near >= -1) & (near < 2 * tokens) & padded).chunk(size)[world.rank].to(place)
    counts: list[float] = []

    def count() -> None:
        seen, held = set(), 0
        for one in gc.get_objects():
            if type(one) not in (torch.Tensor, nn.Parameter) or one.device != place:
                continue
            if one.dtype != wide:
                continue
            storage = one.untyped_storage()
            if one is known or storage.data_ptr() in seen or not storage.nbytes():
                continue
            seen.add(storage.data_ptr())
            values = torch.empty(0, dtype=wide, device=place).set_(storage)
            found = int(torch.isin(values, known).sum())
            held += found if 2 * found > values.numel() else 0  # a row of one key's weight is out
        counts.append(held / share)

    def counted(right: Any) -> Any:
        def kernel(*tensors: Any, **options: Any) -> Any:
            count()
            return right(*tensors, **options)

        return kernel

    passing = Ring.pass_on

    def arrived(self: Ring, tensors: Any) -> Any:
        """What comes is here before anything is counted."""
        came = passing(self, tensors).result()
        return SimpleNamespace(result=lambda: came)

    with (
        patch.object(Ring, "pass_on", arrived),
        patch.object(ring, "attend", counted(ring.attend)),
        patch.object(ring, "attend_backward", counted(ring.attend_backward)),
    ):
        ring.ring_attention(q, Ring(world), k, v, mask).sum().backward()
    return counts


def own_loss(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A user's loss, which knows nothing of parts."""
    logits = find_logits(outputs).double()
    picked = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1))
    weight = torch.linspace(1.0, 2.0, targets.shape[1], dtype=torch.float64, device=targets.device)
    return -(picked.squeeze(-1) * weight).sum(), torch.tensor(targets.numel())


def same_as_one(world: World, case: str, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    """The largest difference to one process after a step, of its loss and this rank's weights."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 61, (3, 16), generator=draw)
    targets = torch.randint(0, 61, (3, 16), generator=draw)
    other = tokens[:, :13] if case == "other length" else tokens
    its_targets = targets[:, :13] if case == "other length" else targets
    if case == "ignored":
        its_targets = targets.masked_fill(torch.arange(16) < 8, -100)
    loss = own_loss if case == "own loss" else token_loss
    more = {"recompute": "full"} if case == "recomputed" else {}
    dropout = 0.2 if case == "recomputed" else 0.0
    told: list[Any] = []
    for asked in (layout or {"cp": world.size}, {}):
        if not (asked or world.is_first):
            break
        alone = World(_place(), world.device, None)
        module = _llama(16, tied=case != "ignored", dropout=dropout).double()
        if case == "frozen":
            for name in ("embedding", "blocks.0.attention", "norm"):
                module.get_submodule(name).requires_grad_(False)
        with _heard() as notices:
            run = _run(
                world if asked else alone,
                module,
                tokens,
                asked,
                loss=loss,
                precision="fp64",
                **more,
            )
            result = run.step((other, its_targets))
            validated = run.evaluate([(other, its_targets)])["loss"]
        program = run.program
        held = {
            name: (p.detach(), program.shard_of(name)) for name, p in program.parameters.items()
        }
        told.append((result.loss, validated, held, notices))
        _close(run)
    loss_here, seen, held, notices = told[0]
    right, right_seen, wholes = world.broadcast_json(
        [*told[1][:2], {name: p.tolist() for name, (p, _) in told[1][2].items()}]
        if world.is_first
        else None
    )
    differences = []
    for name, (part, shard) in held.items():
        boxes = [tuple(slice(*span) for span in box) for box in shard.slices]
        right_whole = torch.tensor(wholes[name], dtype=torch.float64, device=part.device)
        whole = torch.cat([right_whole[box].reshape(-1) for box in boxes])
        differences.append(float((part.reshape(-1) - whole).abs().max()))
    return {
        "loss": abs(loss_here - right) / right,
        "validated": abs(seen - right_seen) / right_seen,
        "weights": max(differences),
        "notices": notices,
    }


def norm_whole(world: World) -> dict[str, Any]:
    """As `same_as_one`, where a layer with a backward of its own runs whole on every rank."""
    right = context_parallel.check_class

    def check(module: nn.Module, group: Any, *axes: Any) -> CheckFinding | None:
        if group.names[0] == "norm":
            return CheckFinding("norm", 1.0, (), "planted")
        return right(module, group, *axes)

    with patch.object(context_parallel, "check_class", check):
        return same_as_one(world, "plain")


def _place() -> Any:
    from shoal.fabric.rendezvous.process_info import ProcessInfo

    return ProcessInfo()


def _close(run: Run) -> None:
    for undo in run.program.on_close:
        undo()


class Decides(nn.Module):
    """Looks at numbers to decide what to do, so that it is no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, 8]."""
        return self.inner(x) if float(x.detach().sum()) > 0 else x - self.inner(x)


def refused(world: World, layout: dict[str, Any], kind: str = "llama") -> str:
    """The line with which a layout is refused."""
    from shoal.base.errors import ShoalError

    tokens = torch.zeros(2, 15 if kind == "odd" else 16, dtype=torch.long)
    module = _llama(16)
    if kind == "mlp":
        module = nn.Sequential(nn.Embedding(61, 8), nn.Flatten(), nn.Linear(128, 61))
    if kind == "strict":
        module = nn.Sequential(nn.Embedding(61, 8), Decides(), Decides(), nn.Linear(8, 61))
    try:
        _run(world, module, tokens, layout)
    except ShoalError as refusal:
        return str(refusal)
    return ""


def in_bf16(world: World) -> list[float]:
    """A step's loss on the ranks, and in one process."""
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for layout in ({"cp": world.size}, {}):
        home = world if layout else World(_place(), world.device, None)
        run = _run(home, _llama(16), tokens, layout, precision="bf16")
        losses.append(run.step((tokens, tokens)).loss)
        _close(run)
    return losses


# ---- memory

LONG = {"dim": 64, "layers": 1, "heads": 2, "kv_heads": 2}


def memory(world: World, sequence: int) -> dict[str, int]:
    """Bytes kept for the backward pass, and the most that a step holds; of this rank and alone."""
    torch.set_num_threads(1)
    tokens = torch.randint(0, 61, (1, sequence), generator=torch.Generator().manual_seed(1))
    found = {}
    for name, layout in (("rank", {"cp": world.size}), ("alone", {})):
        if not layout and not world.is_first:
            continue
        home = world if layout else World(_place(), world.device, None)
        run = _run(home, _llama(sequence, **LONG), tokens[:, :64], layout)
        run.step((tokens, tokens))
        found[f"{name} kept"] = _kept(run, tokens)
        found[f"{name} peak"] = measure_peak_bytes(
            lambda run=run: run.step((tokens, tokens)), world.device, 2
        )
        _close(run)
    return found


def _kept(run: Run, tokens: torch.Tensor) -> int:
    """Bytes of all storages that a forward pass keeps, the parameters' left out."""
    seen = {p.untyped_storage()._cdata: 0 for p in run.model.parameters()}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held.append(storage)
        seen.setdefault(storage._cdata, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_loss(run.model(tokens.to(run.world.device)), tokens.to(run.world.device))
    return sum(seen.values())


def beyond(world: World, sequence: int, room_mib: int) -> dict[str, Any]:
    """One step under a limit on this process's memory: by this process alone, and by all ranks.

    room_mib   how far the process may grow above what it has with model and optimizer
    """
    torch.set_num_threads(1)
    tokens = torch.randint(0, 61, (1, sequence), generator=torch.Generator().manual_seed(1))
    few = tokens[:, :64]
    run = _run(world, _llama(sequence, **LONG), few, {"cp": world.size})
    alone = _run(World(_place(), world.device, None), _llama(sequence, **LONG), few, {})
    for one in (run, alone):
        one.step((few, few))
    start = [p.detach().clone() for p in alone.model.parameters()]
    found: dict[str, Any] = {}
    with limited(room_mib * 2**20):
        found["alone"] = _outcome(alone, tokens)
        found["together"] = _outcome(run, tokens)
    found["kept"] = _kept(run, tokens)
    _close(run)
    if world.is_first:
        for p, right in zip(alone.model.parameters(), start, strict=True):
            p.data.copy_(right)
        found["kept alone"] = _kept(alone, tokens)
        found["right"] = alone.evaluate([(tokens, tokens)])["loss"]
    return found


def _outcome(run: Run, tokens: torch.Tensor) -> Any:
    """The loss of a step, or the line with which it failed."""
    try:
        return run.step((tokens, tokens)).loss
    except (RuntimeError, MemoryError) as failure:
        return next(line for line in str(failure).splitlines() if line)
