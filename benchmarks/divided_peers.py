"""Tensor and pipeline parallelism written by hand with torch's own tools, beside Shoal's.

    tp               parallelize_module: q, k, v, gate, up column-wise, o and down row-wise, each
                     normed activation entered once; embedding and head over the vocabulary,
                     cross-entropy under loss_parallel
    tp_sequence      the same with parts of the sequence between the products
    tp_whole_head    as tp, embedding and head whole on every rank, the chunked loss
    pp_1f1b pp_gpipe PipelineStage under torch's schedules; stages cut where they weigh the same
    pp_1f1b_halves   half of the blocks each, whatever the head weighs
    shoal_tp         the same through `shoal.parallelize`, sequence_parallel = auto (it takes it)
    shoal_tp_off     without parts of the sequence · shoal_1f1b shoal_gpipe   its pipelines
    one              one process with the whole model: what all must equal

All train Shoal's own Llama, from the same weights and samples. Peers get their best: the optimizer
is fused AdamW on plain local tensors (on DTensors each step asks for their placements again), the
true norm of the whole gradient costs one sum of one number, norms under sequence parallelism work
on local tensors and their gradients are summed in one bucket.
Source: the tutorials of torch.distributed.tensor.parallel and torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import CLIP, LR, Case, Program
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import shoal
from shoal.fabric import World
from shoal.models.llama import Llama

SHOAL: dict[str, dict[str, Any]] = {
    "shoal_tp": {"tp": 2},
    "shoal_tp_off": {"tp": 2, "sequence_parallel": "off"},
    "shoal_1f1b": {"pp": 2, "schedule": "1f1b"},
    "shoal_gpipe": {"pp": 2, "schedule": "gpipe"},
}
"""Our layouts by name."""

PEERS = ("tp", "tp_sequence", "tp_whole_head", "pp_1f1b", "pp_1f1b_halves", "pp_gpipe")
SHARED = "embedding.weight"
"""The tied parameter's first name, as `named_parameters` gives it."""


def make(name: str, case: Case, world: World, weights: dict[str, Tensor]) -> Program:
    """The program of that name on this rank; `_twin` at its end makes another instance."""
    name = name.removesuffix("_twin")
    if name in SHOAL:
        return Shoal(case, world, SHOAL[name], weights)
    model = loaded(case, weights)
    if name == "one":
        return One(case, model)
    if name.startswith("tp"):
        return Tensors(case, model, name)
    if name in PEERS:
        return Pipeline(case, model, name)
    raise ValueError(f"{name}: no such program")


def loaded(case: Case, weights: dict[str, Tensor]) -> Llama:
    """Shoal's Llama in the case's precision, with these weights."""
    model = Llama(**case.arguments).to(torch.float64 if case.precision == "fp64" else torch.float32)
    model.load_state_dict(weights)
    return model


class Shoal(Program):
    """`shoal.parallelize` with the whole step's samples on every rank."""

    def __init__(
        self, case: Case, world: World, layout: dict[str, Any], weights: dict[str, Tensor]
    ) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        rows = case.micro_batch * case.accumulate
        tokens = torch.arange(rows * case.arguments["sequence"]).view(rows, -1)
        tokens %= case.arguments["vocabulary"]
        self.run = shoal.parallelize(
            lambda: loaded(case, weights),
            lambda p: torch.optim.AdamW(p, lr=LR, fused=True),
            layout=layout,
            batch=rows,
            micro_batch=case.micro_batch,
            precision=case.precision,
            clip=CLIP,
            sample=(tokens, tokens),
            world=world,
        )
        if "pp" in layout:  # the blocks that the first rank holds
            firsts = [next(block.parameters()) for block in self.run.model.blocks]
            self.cut = sum(not p.is_meta for p in firsts)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        done = self.run.step((tokens, targets))
        self.losses.append(done.loss)
        self.norms.append(done.grad_norm)


class ByHand(Program):
    """A training step on this rank's parameters; the layout fills in the gradients.

    parameters   plain tensors that this rank steps, by the model's names
    counts       how much of each one's squared norm this rank adds to the sum over ranks
    """

    def __init__(
        self, case: Case, parameters: dict[str, nn.Parameter], counts: dict[str, float]
    ) -> None:
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.case = case
        self.parameters = parameters
        self.counts = torch.tensor([counts.get(name, 1.0) for name in parameters])
        self.optimizer = torch.optim.AdamW(parameters.values(), lr=LR, fused=True)

    def gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Fill `.grad` with this rank's part of the mean gradient; gives the mean loss."""
        raise NotImplementedError

    def whole_gradients(self) -> dict[str, Tensor]:
        """The gradients that `gradients` left, as one process has them; all ranks must call it."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        loss = self.gradients(tokens, targets)
        held = [p.grad for p in self.parameters.values()]
        squares = torch.stack(torch._foreach_norm(held)).square()
        total = (squares * self.counts).sum()
        self.add_up(total)
        norm = total.sqrt()
        torch._foreach_mul_(held, (CLIP / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        self.clear()
        self.losses.append(loss)
        self.norms.append(norm)

    def add_up(self, total: Tensor) -> None:
        """Sum a number over the ranks, in place."""
        dist.all_reduce(total)

    def clear(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()


class One(ByHand):
    """The whole model in this process."""

    def __init__(self, case: Case, model: Llama) -> None:
        self.model = model
        super().__init__(case, dict(model.named_parameters()), {})

    def gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens).logits()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.detach()

    def add_up(self, total: Tensor) -> None:
        """Nobody else has a part."""


def tensor_plan(name: str) -> dict[str, Any]:
    """What `parallelize_module` does to every block."""
    outside = Shard(1) if name == "tp_sequence" else Replicate()
    # One DTensor for all products that read it: its gradient is summed once, not once per product.
    entered = PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),))
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=outside)
    return {
        "attention": entered,
        **{f"attention.{part}": column for part in "qkv"},
        "attention.o": row,
        "mlp": entered,
        "mlp.gate": column,
        "mlp.up": column,
        "mlp.down": row,
    }


class Tensors(ByHand):
    """Tensor parallelism: DTensor weights inside of products, plain tensors everywhere else."""

    def __init__(self, case: Case, model: Llama, name: str) -> None:
        self.model = model
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.sequence, self.split_head = name == "tp_sequence", name != "tp_whole_head"
        for block in model.blocks:
            parallelize_module(block, self.mesh, tensor_plan(name))
        if self.split_head:
            outside = Shard(1) if self.sequence else Replicate()
            rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
            columns = ColwiseParallel(input_layouts=outside, use_local_output=False)
            parallelize_module(model, self.mesh, {"embedding": rows, "head": columns})
            model.head.weight = model.embedding.weight  # one of the two was made anew
        self.own = dict(model.named_parameters())
        # Everything that happens once a step happens on plain tensors that share their memory.
        local = {
            key: nn.Parameter(p.detach().to_local()) if isinstance(p, DTensor) else p
            for key, p in self.own.items()
        }
        self.whole = [key for key, p in self.own.items() if not isinstance(p, DTensor)]
        counts = {key: 1.0 / self.mesh.size() for key in self.whole}
        super().__init__(case, local, counts)

    def gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        parts = list(
            zip(
                tokens.split(self.case.micro_batch),
                targets.split(self.case.micro_batch),
                strict=True,
            )
        )
        kept = []
        for x, y in parts:
            with loss_parallel() if self.split_head else nullcontext():
                loss = self.mean_loss(x, y) / len(parts)
                loss.backward()
            kept.append(loss.to_local() if isinstance(loss, DTensor) else loss)
        for key, p in self.own.items():
            if isinstance(p, DTensor):
                self.parameters[key].grad = p.grad.to_local()
        if self.sequence:
            self.sum_partial()
        return torch.stack(kept).sum().detach()

    def mean_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of one micro-batch."""
        model = self.model
        h = model.embedding(tokens)
        for block in model.blocks:
            h = block(h)
        h = model.norm(h)
        if self.split_head:
            return F.cross_entropy(model.head(h).flatten(0, 1), targets.flatten())
        total, count = shoal.linear_cross_entropy(h, model.head.weight, targets)
        return total / count

    def sum_partial(self) -> None:
        """Norms saw this rank's part of the sequence: their gradients are summed in one bucket."""
        held = [self.parameters[key].grad for key in self.whole]
        flat = torch.cat([g.reshape(-1) for g in held])
        dist.all_reduce(flat)
        for g, part in zip(held, flat.split([g.numel() for g in held]), strict=True):
            g.copy_(part.view_as(g))

    def whole_gradients(self) -> dict[str, Tensor]:
        found = {}
        for key, p in self.own.items():
            grad = self.parameters[key].grad
            if isinstance(p, DTensor):
                grad = DTensor.from_local(grad, self.mesh, p.placements).full_tensor()
            found[key] = grad
        return found

    def clear(self) -> None:
        super().clear()
        for p in self.own.values():
            p.grad = None


class First(nn.Module):
    """Embedding and the blocks before the cut."""

    def __init__(self, model: Llama, cut: int) -> None:
        super().__init__()
        self.embedding = model.embedding
        self.blocks = model.blocks[:cut]

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, seq] to [batch, seq, dim]."""
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
        return h


class Last(nn.Module):
    """The blocks after the cut, and the norm; the loss multiplies with the head."""

    def __init__(self, model: Llama, cut: int) -> None:
        super().__init__()
        self.blocks = model.blocks[cut:]
        self.norm = model.norm
        self.head = model.head

    def forward(self, h: Tensor) -> Tensor:
        """[batch, seq, dim] to the same."""
        for block in self.blocks:
            h = block(h)
        return self.norm(h)


def even_cut(model: Llama) -> int:
    """Blocks of the first stage, so that both multiply with about the same number of weights."""
    weights = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    head = model.head.weight.numel()
    return min(
        range(1, len(weights)), key=lambda cut: abs(sum(weights[:cut]) - sum(weights[cut:]) - head)
    )


class Pipeline(ByHand):
    """Two stages; the tied weight lives on both, its gradients are summed."""

    def __init__(self, case: Case, model: Llama, name: str) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if size != 2:
            raise ValueError(f"the pipeline by hand has 2 stages, got {size} processes")
        halves = name.endswith("_halves")
        self.cut = len(model.blocks) // 2 if halves else even_cut(model)
        self.first = rank == 0
        module = First(model, self.cut) if self.first else Last(model, self.cut)
        names = {id(p): key for key, p in model.named_parameters()}
        parameters = {names[id(p)]: p for p in module.parameters()}
        self.shared = parameters[SHARED]
        kind: Callable[..., Any] = ScheduleGPipe if name == "pp_gpipe" else Schedule1F1B
        stage = PipelineStage(module, rank, size, torch.device("cpu"))
        # Its own scaling of gradients would be one more pass over all of them.
        self.schedule = kind(stage, case.accumulate, loss_fn=self.part_of_loss, scale_grads=False)
        self.head = model.head.weight
        super().__init__(case, parameters, {} if self.first else {SHARED: 0.0})

    def part_of_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """One micro-batch's share of the mean loss."""
        total, count = shoal.linear_cross_entropy(hidden, self.head, targets)
        return total / (count * self.case.accumulate)

    def gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if self.first:
            self.schedule.step(tokens, return_outputs=False)
        else:
            self.schedule.step(target=targets, losses=losses, return_outputs=False)
        dist.all_reduce(self.shared.grad)
        # Only the last stage has a loss.
        return torch.zeros(()) if self.first else torch.stack(losses).sum().detach()
