"""What the tests of tensor parallelism run on every member of a world, all of it one tp axis."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from shoal.base.errors import PlanError
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.fabric import World
from shoal.fabric.collectives.traffic_counts import wire_bytes
from shoal.models.llama import Llama
from shoal.models.loss import token_loss
from shoal.models.mlp import MLP
from shoal.parallel import recompute
from shoal.parallel.dropout_rng import derive_seed
from shoal.parallel.program import Program
from shoal.parallel.spmd import block_trial
from shoal.parallel.spmd.block_check import check_blocks, check_class
from shoal.parallel.spmd.labelling.labels import Split
from shoal.parallel.spmd.model_split import plan_split
from shoal.parallel.spmd.split_block import BlockSplit, ModelSplit
from shoal.parallel.tensor_parallel.cut_weights import apply_split, parameter_cut
from shoal.trace.flow.forward_record import ForwardRecord
from shoal.trainer.parallelize import parallelize

BATCH, SEQ, VOCABULARY = 2, 12, 67


def llama(**settings: Any) -> nn.Module:
    """A small Llama; 67 tokens divide by nothing."""
    sizes = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48}
    return Llama(vocabulary=VOCABULARY, sequence=SEQ, **{**sizes, **settings})


class Plain(nn.Module):
    """A user's own stack, with a tied head that they multiply by themselves."""

    def __init__(self, tied_by_hand: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16, padding_idx=3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
            for _ in range(3)
        )
        self.out = nn.Linear(16, VOCABULARY)
        self.tied_by_hand = tied_by_hand

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, seq] to logits [batch, seq, vocabulary]."""
        h = self.tokens(ids)
        for layer in self.layers:
            h = h + layer(h)
        logits: Tensor = F.linear(h, self.tokens.weight) if self.tied_by_hand else self.out(h)
        return logits


class FusedBlock(nn.Module):
    """Attention with one weight for q, k and v, biases everywhere, then a feed-forward part."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        batch, seq, dim = h.shape
        q, k, v = (
            t.view(batch, seq, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.before(h)).split(dim, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        moved: Tensor = h + self.down(F.gelu(self.up(self.after(h))))
        return moved


class Fused(nn.Module):
    """A user's GPT: positions, fused blocks, an untied head."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(SEQ, 32)
        self.blocks = nn.ModuleList(FusedBlock(32, heads) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, seq] to logits [batch, seq, vocabulary]."""
        h = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def sequential() -> nn.Module:
    """Layers one after another, no block that repeats."""
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 6)
    )


def gated(**settings: Any) -> nn.Module:
    """Layers that are no graph: split by their parts only."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "parallel")]
    from user_modules import Gated

    return Gated(12, **settings)


def flat() -> nn.Module:
    """`Plain` with layers inside of which samples and places are one dim."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "parallel")]
    from user_modules import FlatLayer

    module = Plain()
    module.layers = nn.ModuleList(FlatLayer(16) for _ in range(2))
    return module


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "plain": Plain,
    "fused": Fused,
    "flat": flat,
    "mlp": lambda: MLP(inputs=12, hidden=32, layers=3, classes=6),
    "sequential": sequential,
    "gated": gated,
}


def sample(name: str, seed: int = 1) -> tuple[Tensor, Tensor]:
    """(inputs, targets), some of them not counted."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("mlp", "sequential", "gated"):
        inputs = torch.randn(8, 12, generator=generator, dtype=torch.float64)
        return inputs, torch.randint(0, 6, (8,), generator=generator)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQ), generator=generator)
    targets = torch.randint(0, VOCABULARY, (BATCH, SEQ), generator=generator)
    return ids, targets.masked_fill(torch.rand(BATCH, SEQ, generator=generator) < 0.2, -100)


def built(name: str, **settings: Any) -> nn.Module:
    """The model in float64, every parameter perturbed: zero biases and unit norms hide mistakes."""
    torch.manual_seed(0)
    module = BUILDERS[name](**settings).double()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return module


def losses(outputs: Any, targets: Tensor, kind: str) -> Tensor:
    """A scalar: the default loss, or one that looks at the logits itself."""
    if kind == "default":
        return token_loss(outputs, targets)[0] / 10
    logits = outputs.logits() if hasattr(outputs, "hidden") else outputs
    wide = logits.reshape(-1, logits.shape[-1])
    chosen = wide.gather(1, targets.reshape(-1, 1).clamp(min=0))
    return wide.square().mean() + chosen.sigmoid().sum()


def trained(module: nn.Module, name: str, loss: str, seed: int = 1, odd: bool = False) -> Tensor:
    """One forward and backward pass with dropout keyed as a run keys it; gives the loss.

    odd   without the last token: a sequence that two ranks cannot share
    """
    inputs, targets = sample(name, seed)
    if odd:
        inputs, targets = inputs[:, :-1], targets[:, :-1]
    torch.manual_seed(derive_seed(0, 1, seed, ""))
    total = losses(module(inputs), targets, loss)
    total.backward()
    return total.detach()


def equality(
    world: World,
    name: str,
    settings: dict[str, Any] | None = None,
    *,
    sequence: bool = False,
    loss: str = "default",
    overrides: dict[str, str] | None = None,
    seeds: tuple[int, ...] = (1,),
    odd: bool = False,
    again: str = "none",
    evaluate: bool = True,
) -> dict[str, Any]:
    """Loss and every gradient against one process; what was split, told and sent.

    again   how the blocks recompute in the backward pass
    """
    module = built(name, **(settings or {}))
    reference = copy.deepcopy(module)
    inputs, _ = sample(name)
    split = plan_split(
        ForwardRecord(module, lambda m: m(inputs)),
        world.size,
        sequence=sequence,
        overrides=overrides or {},
    )
    undo_split = apply_split(module, split, world)
    undo = recompute.apply(program_of(module, world).but(recompute=again)).on_close
    world.traffic.pop_counts()
    worst_loss, expected = 0.0, torch.zeros(())
    for seed in seeds:
        got = trained(module, name, loss, seed, odd)
        expected = trained(reference, name, loss, seed, odd)
        worst_loss = max(worst_loss, float((got - expected).abs() / expected.abs()))
    sent, _ = world.traffic.pop_counts()
    told = {
        "loss": worst_loss,
        **gradients(world, module, reference, split),
        "sent": sent,
        "planned": planned(split, world.size),
        "notices": list(split.notices),
        "exchanges": {k: [[e.kind, e.when] for e in es] for k, es in split.exchanges.items()},
        "elements": sum(p.numel() for p in module.parameters()),
        "of": sum(p.numel() for p in reference.parameters()),
    }
    for take_away in undo:
        take_away()
    if evaluate:
        told["evaluated"] = evaluated(module, reference, name, undo_split)
    return told


def program_of(module: nn.Module, world: World) -> Program:
    """As much of a program as recomputing needs."""
    plan = Plan(Layout(tp=world.size), 8, 2)
    return Program(module, world, plan, {}, {}, world, world, world, world)


def gradients(
    world: World, module: nn.Module, reference: nn.Module, split: ModelSplit
) -> dict[str, Any]:
    """The largest error of a gradient, of the whole gradient's norm, and whose it is."""
    wholes = dict(reference.named_parameters())
    norm = torch.stack([p.grad.norm() for p in wholes.values() if p.grad is not None]).norm()
    errors = {}
    for name, p in module.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        if split.parameters[name].partial:
            world.all_reduce(grad)
        whole = wholes[name].grad
        whole = torch.zeros_like(wholes[name]) if whole is None else whole
        if cut := parameter_cut(name, tuple(whole.shape), split):
            boxes = cut.boxes(tuple(whole.shape), world.rank)
            parts = [whole[tuple(slice(a, b) for a, b in box)].reshape(-1) for box in boxes]
            whole = torch.cat(parts).view_as(grad)
        errors[name] = float((grad - whole).norm() / norm)
    worst = max(errors, key=lambda name: errors[name])
    partial = [name for name, one in split.parameters.items() if one.partial]
    return {"gradient": errors[worst], "worst": worst, "partial": sorted(partial)}


def evaluated(module: nn.Module, reference: nn.Module, name: str, undo_split: list[Any]) -> float:
    """Another batch size, no gradients, eval mode: another graph, the same numbers."""
    inputs, _ = sample(name, 5)
    with torch.no_grad():
        got, expected = (m.eval()(inputs[:1]) for m in (module, reference))
        if hasattr(got, "hidden"):
            got, expected = got.logits(), expected.logits()
        error = float((got - expected).norm() / expected.norm())
    for undo in undo_split:
        undo()
    if any("forward" in part.__dict__ for part in module.modules()):
        raise AssertionError("a stand-in was left behind")
    return error


def planned(split: ModelSplit, degree: int) -> dict[str, int]:
    """Bytes that a rank is planned to send, by kind."""
    total: dict[str, int] = {}
    for exchanges in split.exchanges.values():
        for one in exchanges:
            sent = round(wire_bytes(one.kind, one.payload_bytes, degree))
            total[one.kind] = total.get(one.kind, 0) + sent
    return total


def planned_with(world: World, bug: str) -> tuple[nn.Module, ModelSplit]:
    """A model and its split, whose labels are wrong if that is the bug."""
    name, settings = {
        "kv gradient": ("llama", {"kv_heads": 1}),
        "kv part": ("llama", {"kv_heads": world.size // 2, "heads": world.size}),
        "missing backward sum": ("llama", {}),
    }.get(bug, ("fused", {}))
    module = built(name, **settings)
    inputs, _ = sample(name)
    split = plan_split(ForwardRecord(module, lambda m: m(inputs)), world.size)
    (group,) = split.classes
    wrong = group.split
    if bug == "qkv cut":
        wrong = replace(wrong, parameters={n: Split(s.dim) for n, s in wrong.parameters.items()})
    if bug == "kv gradient":
        wrong = replace(wrong, partial=frozenset())
    return module, replace(split, classes=(replace(group, split=wrong),))


@contextmanager
def graphs_with(bug: str) -> Iterator[None]:
    """The check's graphs have the mistake, or are right though the labels are not."""
    real = block_trial.split_for_inputs

    def planted(split: BlockSplit, *call: Any) -> BlockSplit:
        if bug == "qkv cut":
            segments = {n: 3 for n in ("qkv.weight", "qkv.bias")}
            cuts = {n: Split(s.dim, segments.get(n, 1)) for n, s in split.parameters.items()}
            split = replace(split, parameters=cuts)
        if bug == "kv gradient":
            shared = frozenset({"attention.k.weight", "attention.v.weight"})
            split = replace(split, partial=shared)
        made = real(split, *call)
        if bug in GRAPH_BUGS:
            GRAPH_BUGS[bug](made.run)
            made.run.recompile()
        return made

    computes_in = block_trial._runs_in_dtype
    block_trial.split_for_inputs, block_trial._runs_in_dtype = planted, lambda *_: False
    try:
        yield
    finally:
        block_trial.split_for_inputs, block_trial._runs_in_dtype = real, computes_in


def finding(world: World, bug: str) -> str:
    """What the check says of a split with a mistake planted in it; empty: nothing."""
    module, split = planned_with(world, bug)
    with graphs_with(bug):
        found = check_class(module, split.classes[0], world)
    return found.text() if found else ""


def after_the_check(world: World) -> dict[str, Any]:
    """A model whose blocks failed still trains as one process does, with what is left split."""
    module, split = planned_with(world, "row bias")
    reference = copy.deepcopy(module)
    strict = ""
    with graphs_with("row bias"):
        split = check_blocks(module, split, world)
        try:
            check_blocks(module, planned_with(world, "row bias")[1], world, strict=True)
        except PlanError as refusal:
            strict = str(refusal)
    apply_split(module, split, world)
    trained(module, "fused", "default")
    trained(reference, "fused", "default")
    told = gradients(world, module, reference, split)
    shapes = {name: tuple(p.shape) for name, p in reference.named_parameters()}
    cut = [name for name, shape in shapes.items() if parameter_cut(name, shape, split)]
    return {**told, "notice": split.notices[-1], "split": cut, "strict": strict}


def called(run: fx.GraphModule, name: str) -> list[fx.Node]:
    """Nodes that call an exchange."""
    return [n for n in run.graph.nodes if getattr(n.target, "__name__", "") == name]


def left_out(name: str, count: int | None = None) -> Callable[[fx.GraphModule], None]:
    """Take (the last `count` of) some exchanges out of a graph."""

    def plant(run: fx.GraphModule) -> None:
        for node in called(run, name)[-count if count else None :]:
            node.replace_all_uses_with(node.args[0])
            run.graph.erase_node(node)

    return plant


def wrong_part(run: fx.GraphModule) -> None:
    """Every rank works with its neighbour's key/value heads."""
    for node in called(run, "slice_own_part"):
        right = node.target

        def neighbours(value: Tensor, axis: Any, right: Any = right) -> Tensor:
            shifted = SimpleNamespace(rank=(axis.rank + 2) % axis.size, size=axis.size)
            shifted.all_reduce, shifted.all_gather = axis.all_reduce, axis.all_gather
            return right(value, shifted)

        neighbours.__module__ = "exchange"
        node.target = neighbours


GRAPH_BUGS: dict[str, Callable[[fx.GraphModule], None]] = {
    "missing backward sum": left_out("enter", 1),
    "no backward sums": left_out("enter"),
    "row bias": left_out("keep_on_first_rank"),
    "missing forward sum": left_out("reduce", 1),
    "kv part": wrong_part,
}


def starts(world: World, dropouts: list[float]) -> list[str]:
    """What becomes of starts of a model of gated layers, one after another."""
    told = []
    inputs, targets = sample("gated")
    for dropout in dropouts:
        try:
            run = parallelize(
                lambda dropout=dropout: gated(dropout=dropout),
                lambda p: torch.optim.SGD(p, lr=0.1),
                layout={"tp": world.size},
                batch=len(inputs),
                micro_batch=4,
                precision="fp64",
                sample=(inputs, targets),
                world=world,
            )
        except PlanError as refusal:
            told.append(str(refusal))
            continue
        told.append("runs" if run.step((inputs, targets)).loss else "no loss")
        for undo in run.program.on_close:  # as `run.close`, but the world stays for others
            undo()
    return told


def example(world: World, name: str, *, sequence: bool = False) -> dict[str, Any]:
    """A user's or transformers' module against one process: the loss looks at every output."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "parallel")]
    from hf_modules import HF_EXAMPLES
    from user_modules import EXAMPLES, made

    one = {**EXAMPLES, **HF_EXAMPLES}[name]
    module = made(one.build)
    reference = copy.deepcopy(module)
    inputs = one.inputs(3)
    split = plan_split(
        ForwardRecord(module, lambda m: one.call(m, inputs)), world.size, sequence=sequence
    )
    kept = check_blocks(module, split, world)
    apply_split(module, kept, world)
    totals = []
    world.traffic.pop_counts()
    for m in (module, reference):
        torch.manual_seed(5)
        outputs = one.call(m, inputs)
        leaves = pytree.tree_leaves(vars(outputs) if is_dataclass(outputs) else outputs)
        moving = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        total = sum((t.flatten() * torch.arange(1, t.numel() + 1)).cos().sum() for t in moving)
        total.backward()
        totals.append(total.detach())
    return {
        "loss": float((totals[0] - totals[1]).abs() / totals[1].abs()),
        **gradients(world, module, reference, kept),
        "classes": [len(group.names) for group in kept.classes],
        "failed": len(split.classes) - len(kept.classes),
        "notices": list(kept.notices),
        "elements": sum(p.numel() for p in module.parameters()),
        "of": sum(p.numel() for p in reference.parameters()),
    }
