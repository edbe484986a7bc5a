"""A world of threads in one process: what split layers need of `fabric.World`, and a simulation."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree

from shoal.parallel.spmd.labelling.labels import WHOLE, Split, cut_tensor, join_parts


@dataclass
class Meeting:
    """Where the ranks leave what they tell each other; one works at a time, with its own draws."""

    size: int
    left: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)
        self.turn = threading.Lock()
        self.start = torch.get_rng_state()


class Pending:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def result(self) -> torch.Tensor:
        return self.value


class ThreadAxis:
    """One rank's end of a meeting; counts its collectives and their payload bytes."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self.meeting = rank, meeting.size, meeting
        self.counts: Counter = Counter()
        self.payload_bytes: Counter = Counter()

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        drawn = torch.get_rng_state()
        self.meeting.left[self.rank] = tensor
        self.meeting.turn.release()
        try:
            self.meeting.barrier.wait()
            values = [self.meeting.left[r].clone() for r in range(self.size)]
            self.meeting.barrier.wait()
        finally:
            self.meeting.turn.acquire()
        torch.set_rng_state(drawn)
        return values

    def _count(self, kind: str, elements: int, tensor: torch.Tensor) -> None:
        self.counts[kind] += 1
        self.payload_bytes[kind] += elements * tensor.element_size()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._count("all_reduce", tensor.numel(), tensor)
        tensor.copy_(torch.stack(self._all(tensor)).sum(0))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count("all_gather", tensor.numel() * self.size, tensor)
        return torch.stack(self._all(tensor))

    def reduce_scatter(self, flat: torch.Tensor, cuts: list[int]) -> Pending:
        self._count("reduce_scatter", flat.numel(), flat)
        total = torch.stack(self._all(flat)).sum(0)
        return Pending(total[cuts[self.rank] : cuts[self.rank + 1]].clone())


def on_ranks(size: int, work) -> list:
    """`work(axis)` on every rank, in threads; the results by rank."""
    meeting = Meeting(size)
    results: list = [None] * size
    errors: list = []

    def one(rank: int) -> None:
        try:
            with meeting.turn:
                torch.set_rng_state(meeting.start)
                results[rank] = work(ThreadAxis(rank, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results


@dataclass
class Pass:
    """One forward and backward pass: whole outputs, gradients, buffers afterwards."""

    outputs: list
    inputs: list
    parameters: dict
    buffers: list
    axis: ThreadAxis | None = None


def loss_of(outputs: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    """A scalar in which every element of every output has a weight of its own."""
    return sum((o * w.to(o.dtype)).sum() for o, w in zip(outputs, weights, strict=True))


def perturb(block: torch.nn.Module, seed: int = 1) -> None:
    """No parameter keeps a value (1, 0) that hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))


def whole_pass(split, block, args, kwargs, seed: int = 3) -> tuple[Pass, list]:
    """The layer itself, in one process; and the weights of the loss."""
    params = {
        n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in block.named_parameters()
    }
    buffers = {n: b.clone() for n, b in block.named_buffers()}
    flat = split.flatten(args, kwargs)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in flat]
    its_args, its_kwargs = replaced(args, kwargs, leaves)
    torch.manual_seed(seed)
    result = torch.func.functional_call(block, {**params, **buffers}, its_args, its_kwargs)
    outputs = [o for o in split.flatten((result,), {}) if o.is_floating_point()]
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
    loss_of(outputs, weights).backward()
    grads = {n: p.grad for n, p in params.items()}
    inputs = [x.grad if x.is_leaf else None for x in leaves]  # one that was overwritten is none
    told = Pass([o.detach() for o in outputs], inputs, grads, [*buffers.values()])
    return told, weights


def replaced(args, kwargs, leaves):
    """The call with its tensors exchanged."""
    old, structure = pytree.tree_flatten((args, dict(kwargs)))
    new = iter(leaves)
    filled = [next(new) if isinstance(x, torch.Tensor) else x for x in old]
    return pytree.tree_unflatten(filled, structure)


def simulate(split, block, args, kwargs, seed: int = 3) -> list[Pass]:
    """Every rank's pass, put together to whole tensors, as every rank would tell them."""
    _, weights = whole_pass(split, block, args, kwargs, seed)
    params = dict(block.named_parameters())
    flat = split.flatten(args, kwargs)

    def work(axis: ThreadAxis):
        def own(tensor: torch.Tensor, label) -> torch.Tensor:
            part = cut_tensor(tensor.detach(), label, axis.rank, axis.size).clone()
            return part.requires_grad_(tensor.requires_grad)

        local = {n: own(p, split.parameters.get(n, WHOLE)) for n, p in params.items()}
        buffers = [b.clone() for b in block.buffers()]
        leaves = [own(x, label) for x, label in zip(flat, split.inputs, strict=True)]
        results = split.run(axis, *local.values(), *buffers, *leaves)
        both = zip(results, split.outputs, strict=True)
        outputs, labels = zip(
            *[(o, label) for o, label in both if o.is_floating_point()], strict=True
        )
        mine = [
            cut_tensor(w, label, axis.rank, axis.size)
            for w, label in zip(weights, labels, strict=True)
        ]
        loss_of(outputs, mine).backward()
        return axis, [o.detach() for o in outputs], labels, leaves, local, buffers

    torch.manual_seed(seed)
    ranks = on_ranks(split.degree, work)
    return [_told(split, ranks, me) for me in range(len(ranks))]


def _told(split, ranks, me: int) -> Pass:
    axis, own_outputs, labels, leaves, local, buffers = ranks[me]
    outputs = [
        join_parts([r[1][k] for r in ranks], label) if isinstance(label, Split) else own_outputs[k]
        for k, label in enumerate(labels)
    ]
    inputs = [
        _whole_gradient([r[3][k].grad if r[3][k].is_leaf else None for r in ranks], label, me)
        for k, label in enumerate(split.inputs)
    ]
    grads = {}
    for name in local:
        parts = [r[4][name].grad for r in ranks]
        if name in split.partial:
            grads[name] = sum(p for p in parts if p is not None)
        else:
            grads[name] = _whole_gradient(parts, split.parameters.get(name, WHOLE), me)
    return Pass(outputs, inputs, grads, buffers, axis)


def _whole_gradient(parts, label, me):
    if any(p is None for p in parts):
        assert all(p is None for p in parts)
        return None
    return join_parts(parts, label) if isinstance(label, Split) else parts[me]


def worst(expected: Pass, passes: list[Pass]) -> float:
    """Largest difference on any rank, relative to the norm of outputs or of the whole gradient."""
    scale = sum(float(g.norm()) ** 2 for g in expected.parameters.values() if g is not None) ** 0.5
    scale = scale or 1.0
    found = 0.0
    for one in passes:
        for a, b in zip(
            expected.outputs + expected.buffers, one.outputs + one.buffers, strict=True
        ):
            found = max(
                found, float((a - b).double().norm() / max(1e-30, float(a.double().norm())))
            )
        pairs = list(zip(expected.inputs, one.inputs, strict=True))
        pairs += [(expected.parameters[n], one.parameters[n]) for n in expected.parameters]
        for a, b in pairs:
            if a is None or b is None:
                both = a if b is None else b
                assert both is None or float(both.norm()) == 0, "a gradient is missing"
            else:
                found = max(found, float((a - b).norm()) / scale)
    return found


def difference(split, block, args, kwargs=None, seed: int = 3) -> float:
    """How far the split layer is from the whole one: outputs, buffers and all gradients."""
    expected, _ = whole_pass(split, block, args, kwargs or {}, seed)
    return worst(expected, simulate(split, block, args, kwargs or {}, seed))


def counts(split) -> dict[str, int]:
    """Collectives by kind and pass, such as {"all_reduce forward": 2}."""
    return dict(Counter(f"{one.kind} {one.when}" for one in split.exchanges))
