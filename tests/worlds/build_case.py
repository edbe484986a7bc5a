"""Builds models once per machine on real ranks: whose numbers they get, who built, what it held."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from shoal.checkpoint.export.export_file import export_file
from shoal.fabric import World, start_world
from shoal.models.catalog import build
from shoal.parallel.build import shared_build
from shoal.parallel.build.full_state import gather_weights
from shoal.parallel.build.mmap_init import PREFIX, mmap_init
from shoal.parallel.build.pretrained import converted_parameters, pretrained_shapes
from shoal.parallel.build.shared_build import build_once
from shoal.parallel.compare_weights import tensor_digest
from shoal.parallel.data_parallel import fsdp
from shoal.trainer import parallelize as starting
from shoal.trainer.parallelize import build_module, parallelize
from shoal.trainer.state.run_state import collect_model_shards

SEED = 3
MAPPED_BYTES = 4096
"""Smaller tensors are told in one file; of these models some are, and some are not."""


class Own(nn.Module):
    """What zoos do not have: a tie, two parameters in one memory, frozen ones, marks, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        flat = torch.randn(2 * 64 * 64)
        self.left = nn.Parameter(flat[: 64 * 64].view(64, 64))
        self.right = nn.Parameter(flat[64 * 64 :].view(64, 64).t())
        self.still = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.gate.marked = "no decay"  # type: ignore[attr-defined]
        self.also = [self.first.weight, self.left]
        self.register_buffer("table", torch.arange(64.0).cumsum(0), persistent=False)
        self.norm = nn.BatchNorm1d(64)
        self.image = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)


def _transformers() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, tie_word_embeddings=True,
    )  # fmt: skip
    made: nn.Module = transformers.LlamaForCausalLM(config)
    return made


def _pretrained() -> nn.Module:
    import transformers

    made: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(FOLDER[0])
    return made


FOLDER = [""]
"""Of a checkpoint that transformers has written."""


class Reads(nn.Module):
    """Asks a tensor for its values, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.layer = nn.Linear(64, 64)


class Keeps(nn.Module):
    """Keeps a tensor that nobody else can know of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        table = torch.randn(64)
        self.scale: Callable[[torch.Tensor], torch.Tensor] = lambda x: x * table


class Talks(nn.Module):
    """Waits for the other ranks, as `if rank == 0: download()` does."""

    def __init__(self) -> None:
        super().__init__()
        dist.barrier()
        self.layer = nn.Linear(64, 64)


class Odd(nn.Module):
    """Keeps a buffer that is more than numbers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("links", torch.eye(4).to_sparse())


def _normed() -> nn.Module:
    """Weights that are computed from parameters, a recurrent net's aside."""
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)),
        nn.TransformerEncoderLayer(64, 4, 64, batch_first=True),
    )


class Breaks(nn.Module):
    """Cannot be built at all."""

    def __init__(self) -> None:
        super().__init__()
        raise ValueError("no such width")


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    "gpt": lambda: build("gpt", {"dim": 64, "layers": 2}),
    "moe": lambda: build("moe", {"dim": 64, "layers": 2}),
    "resnet": lambda: build("resnet", {"channels": 32}),
    "transformers": _transformers,
    "pretrained": _pretrained,
    "reads": Reads,
    "keeps": Keeps,
    "talks": Talks,
    "odd": Odd,
    "normed": _normed,
    "recurrent": lambda: nn.LSTM(64, 64),
    "breaks": Breaks,
}


def built(
    world: World,
    name: str,
    least_bytes: int = 0,
    checkpoint: str = "",
    kind: str = "",
    late_s: float = 0.0,
    busy: bool = False,
) -> dict[str, Any]:
    """What this rank has after building: differences from a plain build, who built, the lines.

    checkpoint   a folder; rank 0 writes one of transformers' `kind` there, in bf16
    late_s       the last rank begins to build so late
    busy         a thread of each rank opens files meanwhile
    """
    asked: list[str] = []
    if checkpoint:
        FOLDER[0] = checkpoint
        if world.is_first:
            _written(kind, checkpoint)
        world.barrier()

    def make() -> nn.Module:
        if world.rank == world.size - 1:
            time.sleep(late_s)
        asked.append(torch.get_default_device().type)
        with pretrained_shapes() if asked[-1] == "meta" else nullcontext():
            return build_module(MODELS[name], SEED)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(list(Path("/proc/self/fd").iterdir())) + 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))  # fewer than models have tensors
    in_files = partial(mmap_init, least_bytes=MAPPED_BYTES)
    unopened: list[str] = []
    try:
        with mock.patch.object(shared_build, "mmap_init", in_files), opens_files(busy, unopened):
            module, lines = build_once(world, make, least_bytes)
    except Exception as failure:
        return {"failed": f"{type(failure).__name__}: {failure}", "asked": asked}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    plain = build_module(MODELS[name], SEED)
    return {
        "asked": asked,
        "lines": lines,
        "apart": _apart(module, plain),
        "ties": _ties(module) == _ties(plain),
        "kept": _kept(module),
        "made": converted_parameters(module, Path(checkpoint)) if checkpoint else [],
        "files": len(list(Path(checkpoint).glob("*.safetensors"))) if checkpoint else 0,
        "alone": _alone(world, module),
        "unopened": unopened,
    }


@contextmanager
def opens_files(busy: bool, unopened: list[str]) -> Iterator[None]:
    """Inside, a thread opens and closes four files again and again, and notes what it could not."""
    over = threading.Event()

    def open_files() -> None:
        try:
            while not over.wait(0.002):
                with ExitStack() as held:
                    for _ in range(4):
                        held.enter_context(Path("/proc/self/stat").open())
                    time.sleep(0.002)
        except OSError as failure:
            unopened.append(str(failure))

    thread = threading.Thread(target=open_files, daemon=True)
    if busy:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if busy:
            thread.join(10)


def _written(kind: str, folder: str) -> None:
    """Write a small model of a kind that transformers knows."""
    import transformers

    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    own: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96},
        "mixtral": {**small, "intermediate_size": 96, "num_local_experts": 4},
        "olmoe": {**small, "intermediate_size": 96, "num_experts": 4},
        "qwen2": {**small, "intermediate_size": 96, "tie_word_embeddings": True},
        "opt": {**small, "ffn_dim": 96, "word_embed_proj_dim": 64},
        "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96},
    }
    config = transformers.AutoConfig.for_model(
        kind, **own.get(kind, {**small, "intermediate_size": 96})
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="64KB")


def _apart(module: nn.Module, plain: nn.Module) -> list[str]:
    """Tensors that are not those of a plain build, in any respect."""
    ours, theirs = (
        {**dict(m.named_parameters()), **{n: b.to_dense() for n, b in m.named_buffers()}}
        for m in (module, plain)
    )
    assert list(ours) == list(theirs)
    return [
        name
        for name, tensor in theirs.items()
        if tensor_digest(tensor) != tensor_digest(ours[name])
        or (tensor.stride(), tensor.dtype, tensor.requires_grad, type(tensor))
        != (ours[name].stride(), ours[name].dtype, ours[name].requires_grad, type(ours[name]))
        or {k for k in vars(tensor) if not k.startswith("_")} - set(vars(ours[name]))
    ]


def _ties(module: nn.Module) -> list[list[str]]:
    """Names in groups that share memory."""
    places: dict[int, list[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        places.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return list(places.values())


def _kept(module: nn.Module) -> bool:
    """Whether a plain list of the module still holds its parameters."""
    if not isinstance(module, Own):
        return True
    return module.also[0] is module.first.weight and module.also[1] is module.left


def _alone(world: World, module: nn.Module) -> bool:
    """Whether a rank's writing stays its own."""
    first = next(module.parameters())
    before = tensor_digest(first)
    world.barrier()
    if world.rank == world.size - 1:
        with torch.no_grad():
            first.mul_(2)
    world.barrier()
    return (tensor_digest(first) == before) == (world.rank != world.size - 1)


@contextmanager
def moves(found: list[int]) -> Iterator[None]:
    """Inside, what a run's model holds whenever all of it is moved, once it is built: in bytes."""
    roots: list[nn.Module] = []
    build_it, apply = starting._build_model, nn.Module._apply

    def noted(*given: Any) -> Any:
        module, lines = build_it(*given)
        roots.append(module)
        return module, lines

    def applied(module: nn.Module, *given: Any, **named: Any) -> nn.Module:
        if any(module is root for root in roots):
            here = [p for p in module.parameters() if not p.is_meta]
            found.append(sum(p.numel() * p.element_size() for p in here))
        return apply(module, *given, **named)

    with (
        mock.patch.object(starting, "_build_model", noted),
        mock.patch.object(nn.Module, "_apply", applied),
    ):
        yield


def in_files(world: World, layout: Any) -> list[int]:
    """Bytes of weights' files that a start has mapped still: as built, and after each unit's cut."""
    found: list[int] = []
    gc.collect()  # models of earlier cases may lie in cycles

    def note() -> None:
        rows = [row.split() for row in Path("/proc/self/maps").read_text().splitlines()]
        ends = [row[0].split("-") for row in rows if PREFIX in " ".join(row[5:])]
        found.append(sum(int(stop, 16) - int(start, 16) for start, stop in ends))

    bring = fsdp.load_own_rows

    def brought(*given: Any) -> None:
        found or note()
        bring(*given)

    with (
        mock.patch.object(fsdp, "load_own_rows", brought),
        mock.patch.object(fsdp, "trim_heap", note),
    ):
        started(world, layout, 0, layers=12)
    return found


def started(
    world: World, layout: Any, least_bytes: int, folder: str = "", layers: int = 4
) -> dict[str, Any]:
    """A run whose model was built so: digests of its weights as gathered, and its losses.

    folder   to go on from, to save to, and to export the weights to
    """
    tokens = torch.arange(8 * 16).view(8, 16) % 32
    name = "moe" if "ep" in layout else "llama"
    kept, shared_build.LEAST_BYTES = shared_build.LEAST_BYTES, least_bytes
    moved: list[int] = []
    try:
        with moves(moved):
            run = parallelize(
                lambda: build(name, {"dim": 32, "layers": layers}, vocabulary=32, sequence=16),
                lambda p: torch.optim.AdamW(p, lr=1e-2),
                layout=layout,
                batch=8,
                micro_batch=2,
                precision="fp64",
                sample=(tokens, tokens),
                folder=folder or None,
                world=start_world() if folder else world,
            )
    finally:
        shared_build.LEAST_BYTES = kept
    with torch._C.DisableTorchFunctionSubclass():  # user code is told the whole's
        held_bytes = 8 * sum(p.numel() for p in run.program.parameters.values())
    built = {name: tensor_digest(t) for name, t in gather_weights(run.program).items()}
    found = bool(folder) and run.restore()
    start = built
    if found:
        start = {name: tensor_digest(t) for name, t in gather_weights(run.program).items()}
    data = [((row + k) % 32, (row + k) % 32) for k in range(2) for row in tokens]
    losses = [run.step(batch).loss for batch in run.loader(data)]
    for undo in run.program.on_close:
        undo()
    if not folder:
        return {"start": start, "losses": losses, "moved": moved, "held": held_bytes}
    end = {name: t.cpu() for name, t in gather_weights(run.program).items()}
    saved = run.save()
    run.close()
    if world.is_first:
        export_file(saved, Path(folder, "exported.safetensors"))
    world.barrier()
    exported = load_file(Path(folder, "exported.safetensors"))
    return {
        "found": found,
        "built": built,
        "start": start,
        "moved": moved,
        "held": held_bytes,
        "end": {name: tensor_digest(t) for name, t in end.items()},
        "exported": {name: tensor_digest(t) for name, t in exported.items()},
        "losses": losses,
    }


@contextmanager
def watched(peak: dict[str, int]) -> Iterator[None]:
    """Inside, the largest private memory of this process is kept: `anonymous`, in bytes."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            peak["anonymous"] = max(peak.get("anonymous", 0), anonymous_bytes())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(10)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs, as the kernel counts it: smaps would walk pages."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status: no RssAnon")


def held(world: World, layout: Any) -> dict[str, Any]:
    """What a start of 294 MiB of weights held at most, and holds then, beyond what was before."""
    shape = {"dim": 768, "layers": 10, "heads": 8, "kv_heads": 8, "tied": False}
    vocabulary = 4096
    tokens = torch.arange(2 * 32).view(2, 32)
    peak: dict[str, int] = {}

    def start() -> Any:
        return parallelize(
            lambda: build("llama", shape, vocabulary=vocabulary, sequence=32),
            lambda p: torch.optim.SGD(p, lr=1e-2),
            layout=layout,
            batch=4,
            micro_batch=1,
            precision="fp32",
            sample=(tokens, tokens) if "pp" in layout else None,
            world=world,
        )

    before = anonymous_bytes()
    with watched(peak):
        run = start()
    after = anonymous_bytes()
    module = run.program.twin
    unit = max(sum(p.numel() * 4 for p in block.parameters()) for block in module.blocks)
    for undo in run.program.on_close:
        undo()
    return {
        "weights": 4 * run.plan.parameters,
        "unit": unit,
        "peak": peak["anonymous"] - before,
        "after": after - before,
    }


class Large(nn.Module):
    """A model of transformers' from a folder, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.inner = AutoModelForCausalLM.from_pretrained(FOLDER[0], dtype=torch.float32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return logits


PARTS = {"tiny": 2, "large": 8}
LARGE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 512, "intermediate_size": 2048, "num_key_value_heads": 2},
    "mixtral": {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 4},
}


def _large(folder: str, dtype: torch.dtype, kind: str, layers: int) -> None:
    """Write a model of 16 MB per layer, in files of 20 MB."""
    import transformers

    own = {**LARGE[kind], "num_hidden_layers": layers, "num_attention_heads": 8}
    config = transformers.AutoConfig.for_model(kind, vocab_size=2048, **own)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder, max_shard_size="20MB")


def read(
    world: World,
    layout: Any,
    folder: str,
    dtype: str = "float32",
    kind: str = "llama",
    parts: Mapping[str, int] = PARTS,
) -> dict[str, Any]:
    """What a rank has read from the disk when it holds its part of a model from a folder.

    parts   layers of the models, by folder: the first reads what a start imports, the last counts

    read    bytes that it made the system read, of files that nobody had in memory
    looked  bytes of one block and of what is in no block: a look at the model reads them
    narrow  bytes of other ranks' parts in rows of which this rank keeps a few pages or less
    apart   from plain weights · lines  for the user
    """
    lines: list[str] = []
    built = starting._build_model

    def told(*given: Any) -> Any:
        module, found = built(*given)
        lines.extend(found)
        return module, found

    def start() -> Any:
        tokens = torch.arange(2 * 8).view(2, 8)
        with mock.patch.object(starting, "_build_model", told):
            return parallelize(
                Large,
                lambda p: torch.optim.SGD(p, lr=1e-2),
                layout=layout,
                batch=4,
                micro_batch=1,
                precision="fp32",
                sample=None if layout == "fsdp" else (tokens, tokens),
                world=world,
            )

    for part, layers in parts.items():
        FOLDER[0] = str(Path(folder, part))
        if world.is_first:
            _large(FOLDER[0], getattr(torch, dtype), kind, layers)
            _forget(FOLDER[0])
        world.barrier()
        lines.clear()
        before = _read_bytes()
        run = start()
        read_bytes = _read_bytes() - before
        world.barrier()
        for undo in run.program.on_close:
            undo()
    weights, plain = gather_weights(run.program), Large()
    held = dict(plain.named_parameters())
    blocks = [p for name, p in held.items() if ".layers." in name]
    cuts = {name: run.program.rows[name].cut for name in held}
    inside = [held[name].nbytes for name, cut in cuts.items() if cut is not None and cut.dim]
    return {
        "read": read_bytes,
        "files": len(list(Path(FOLDER[0]).glob("*.safetensors"))),
        "weights": 4 * run.plan.parameters,
        "share": 4 * sum(part.numel() for part, _ in collect_model_shards(run).values()),
        "block": sum(p.nbytes for p in blocks) // layers,
        "beside": sum(p.nbytes for p in held.values()) - sum(p.nbytes for p in blocks),
        "narrow": sum(inside) // 2,
        "apart": [n for n, p in held.items() if not torch.equal(p, weights[n])],
        "lines": lines,
    }


def _forget(folder: str) -> None:
    """Let the system drop the files of a folder from its memory: whoever wants them reads them."""
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_bytes() -> int:
    """What this process made the system read from a disk."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise OSError("/proc/self/io: no read_bytes")
