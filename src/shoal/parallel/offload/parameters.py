"""Train a model that does not fit on one device: weights, gradients and state wait on the host.

    weights     a block's come before its forward and its backward pass, while its neighbour
                computes, and leave after it: three blocks' at most. Other weights stay
    gradients   are summed in the plan's buckets, one after the other, and leave; a later
                micro-batch brings the partial sum back, and adds to it
    step        a piece's masters, gradients and state come, are stepped, and leave; the copies that
                forward passes read are renewed on the way (optimizer_state.py)

Bits    those of the run without offload: the same kernels on the same numbers, gradients added up
in
        the same order, norms of the same buckets, taken where they were added up
Weights keep their tensors: tensors that autograd saved point to memory that is freed after a
block's forward pass and filled again before its backward pass, as FSDP2 does it. Source: Ren et al.
2021 (ZeRO-Offload); torch's FSDPParam (resized storages)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shoal.parallel._torch import pytree
from shoal.parallel.offload.copy_stream import CopyStream
from shoal.parallel.program import HookedReducer, LocalParameter, Program, view_like


def apply(program: Program) -> Program:
    """Move a program's trainable parameters to the host, and give it the matching reducer.

    Frozen parameters and buffers go to the device and stay there.
    """
    lane = CopyStream(program.world.device)
    weights = HostWeights(program, lane)
    reducer = StreamedGradients(program, weights, lane)
    masters = {name: one.master for name, one in weights.by_name.items()}
    return replace(
        program,
        reducer=reducer,
        local={
            name: LocalParameter(master, program.shard_of(name)) for name, master in masters.items()
        },
        parts={name: (m.detach(), program.shard_of(name)) for name, m in masters.items()},
        on_close=(*program.on_close, reducer.close, weights.close),
    )


@dataclass(eq=False)
class HostWeight:
    """A parameter with its device memory, its master and its copy on the host.

    Attributes:
        parameter: the module's parameter; its device memory is filled and freed.
        here: the same memory as another tensor: filling it does not count as a write of the weight.
        master: on the host, stepped by the optimizer.
        copy: on the host, read by forward passes.
    """

    parameter: nn.Parameter
    here: torch.Tensor
    master: nn.Parameter
    copy: torch.Tensor
    resident: bool


@dataclass(eq=False)
class BlockWeights:
    """Weights of a block: whether their memory is on the device, and the copies that fill it."""

    weights: list[HostWeight]
    present: bool = False
    arriving: list[Any] = field(default_factory=list)


class HostWeights:
    """Weights in host memory that are copied to the device unit by unit, in block order."""

    def __init__(self, program: Program, lane: CopyStream) -> None:
        self.lane, self.module = lane, program.module
        formats = {n: b.compute for b in program.plan.buckets if b.compute for n in b.names}
        blocks = [program.module.get_submodule(name) for name in program.blocks]
        holders: dict[int, int] = {}
        for block in blocks:
            for parameter in block.parameters():
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
        for tensor in (*program.frozen.values(), *program.module.buffers()):
            tensor.data = tensor.data.to(lane.device)
        self.by_name = {
            # A parameter that several blocks share belongs to none of them.
            name: self._move_to_host(
                parameter, formats.get(name, ""), holders.get(id(parameter)) != 1
            )
            for name, parameter in program.parameters.items()
        }
        of = {id(one.parameter): one for one in self.by_name.values() if not one.resident}
        self.units = [
            BlockWeights([of[id(p)] for p in b.parameters() if id(p) in of]) for b in blocks
        ]
        self.by_master = {id(one.master): one for one in self.by_name.values()}
        self.homes: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.stepped = False
        self.hooks: list[Any] = []
        for place, block in enumerate(blocks):
            self.hooks += [
                block.register_forward_pre_hook(self._make_pre_hook(place)),
                block.register_forward_hook(self._make_forward_hook(place)),
            ]

    def wait_for_unit(self, place: int, then: int) -> None:
        """Wait until a unit's weights are on the device, and prefetch its neighbour's.

        Args:
            place: index of the unit, in block order.
            then: offset of the unit to prefetch: 1 in forward passes, −1 in backward passes.
        """
        self._prefetch_unit(place)
        unit = self.units[place]
        for event in unit.arriving:
            self.lane.wait(event)
        unit.arriving = []
        if 0 <= place + then < len(self.units):
            self._prefetch_unit(place + then)

    def release(self, place: int) -> None:
        """Free a unit's device memory; kernels launched before may still read it."""
        unit = self.units[place]
        for event in unit.arriving:  # it was prefetched but not used
            self.lane.wait(event)
        unit.arriving = []
        for one in unit.weights if unit.present else ():
            one.here.untyped_storage().resize_(0)
        unit.present = False

    def release_all_units(self) -> None:
        """Free the device memory of all units."""
        for place in range(len(self.units)):
            self.release(place)

    def first(self) -> None:
        """Prefetch the first unit before a forward pass."""
        if self.units:
            self._prefetch_unit(0)

    # ---- masters during the optimizer's step (`optimizer_state.Travelling`)

    def copy_to_device(self, master: nn.Parameter) -> list[Any]:
        """Start the copies of a master and its gradient to the device; return their events."""
        home, gradient = master.data, master.grad
        self.homes[id(master)] = (home, gradient)
        master.grad = None
        master.data, arrived = self.lane.copy_to_device(home)
        events = [arrived]
        if gradient is not None:
            master.grad, arrived = self.lane.copy_to_device(gradient)
            events.append(arrived)
        return events

    def copy_to_host(self, master: nn.Parameter) -> list[tuple[torch.Tensor, Any]]:
        """Start the copies of a stepped master, and of its cast for forward passes, to the host.

        Returns:
            (tensor on the device, event of its copy) of each.
        """
        one, stepped = self.by_master[id(master)], master.data
        self.stepped = True
        home, gradient = self.homes.pop(id(master))
        master.grad = None
        master.data, master.grad = home, gradient
        sent = [(stepped, self.lane.copy_to_host(stepped, home)[1])]
        if one.copy is not home:
            narrow = stepped.to(one.copy.dtype)
            sent.append((narrow, self.lane.copy_to_host(narrow, one.copy)[1]))
        if one.resident:
            one.here.copy_(stepped)
        return sent

    def publish(self) -> None:
        """Copy the host's masters to the weights that passes read, after other code wrote them."""
        for one in self.by_name.values():
            if one.copy.data_ptr() != one.master.data_ptr():
                one.copy.copy_(one.master.detach())
            if one.resident:
                one.here.copy_(one.master.detach())

    def close(self) -> None:
        """Make the masters, on the host, the module's parameters."""
        for hook in self.hooks:
            hook.remove()
        for one in self.by_name.values():
            one.parameter.data = one.master.data

    def _move_to_host(self, parameter: nn.Parameter, compute: str, resident: bool) -> HostWeight:
        home = self.lane.empty_on_host(parameter.detach()).copy_(parameter.detach())
        copy = home
        if compute:
            narrow = home.to(getattr(torch, compute))
            copy = self.lane.empty_on_host(narrow).copy_(narrow)
        here = torch.empty_like(copy, device=self.lane.device)
        if resident:
            here.copy_(copy)
        parameter.data = here
        here = here.detach()
        if not resident:
            here.untyped_storage().resize_(0)
        return HostWeight(parameter, here, nn.Parameter(home), copy, resident)

    def _prefetch_unit(self, place: int) -> None:
        unit = self.units[place]
        if unit.present:
            return
        unit.present = True
        for one in unit.weights:
            span_bytes = one.copy.untyped_storage().nbytes()
            one.here.untyped_storage().resize_(span_bytes)
            unit.arriving.append(self.lane.copy_to_device(one.copy, into=one.here)[1])

    def _make_pre_hook(self, place: int) -> Callable[[nn.Module, Any], None]:
        def need(block: nn.Module, inputs: Any) -> None:
            self.wait_for_unit(place, 1)

        return need

    def _make_forward_hook(self, place: int) -> Callable[[nn.Module, Any, Any], None]:
        def again(gradient: torch.Tensor) -> None:
            # All gradients that the next unit sends back have arrived: its backward pass is over.
            if place + 1 < len(self.units):
                self.release(place + 1)
            self.wait_for_unit(place, -1)

        def release(block: nn.Module, inputs: Any, outputs: Any) -> None:
            self.release(place)
            for leaf in pytree.tree_leaves(outputs):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(again)

        return release


class StreamedGradients(HookedReducer):
    """The reducer of one device whose gradients wait on the host; see `program.Reducer`.

    Attributes:
        hosts: a flat sum per bucket, on the host.
        staged: the sums that are on the device now.
    """

    def __init__(self, program: Program, weights: HostWeights, lane: CopyStream) -> None:
        self.parameters, self.plan = program.parameters, program.plan.buckets
        self.weights, self.lane = weights, lane
        self.bucket_of = {name: n for n, bucket in enumerate(self.plan) for name in bucket.names}
        self.narrow = any(bucket.compute for bucket in self.plan)
        self.hosts: list[torch.Tensor] = []
        for bucket in self.plan:
            like = torch.empty(bucket.elements, dtype=getattr(torch, bucket.dtype), device="meta")
            self.hosts.append(lane.empty_on_host(like))
        self.gradients = {
            name: view for number in range(len(self.plan)) for name, view in self._views(number)
        }
        self.staged: dict[int, BucketSum] = {}
        self.leaving: deque[tuple[torch.Tensor, Any]] = deque()
        self.missing: dict[int, int] = {}
        self.norms: dict[str, torch.Tensor] = {}
        self.seen: set[str] = set()
        self.begun: set[int] = set()
        self.measured: set[str] = set()
        self.active = self.last = False
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in self.parameters.items()
        ]

    def start_step(self, rounds: int) -> None:
        """Reset the sums of all gradients at the start of a step."""
        for one in self.weights.by_name.values():
            one.parameter.grad = one.master.grad = None
        self.active = True
        self.seen, self.begun, self.measured, self.norms = set(), set(), set(), {}

    def prepare_backward(self, last: bool, once: bool = True) -> None:
        """Start a pass; prefetch its first weights."""
        self.last = last
        self.missing = {number: len(bucket.names) for number, bucket in enumerate(self.plan)}
        self.weights.first()

    def end_backward(self, counted: bool) -> None:
        """Send the buckets that the pass left incomplete."""
        for number, bucket in enumerate(self.plan):
            measured = not self.last or bucket.names[0] in self.measured
            if number in self.staged or not measured:
                self._wait_for_views(number)  # unused gradients count as zero
                self._send_bucket(number, then=False)
        self.weights.release_all_units()

    def finish(self) -> None:
        """Start all sums on their way to the host, which reads them after the step's one wait."""
        while self.leaving:
            self._wait_for_oldest()
        self.active = False
        for name, one in self.weights.by_name.items():
            one.master.grad = self.gradients[name]

    def publish(self) -> None:
        """Copy masters that other code loaded to the weights that passes read."""
        if not self.weights.stepped:
            self.weights.publish()
        self.weights.stepped = False

    def close(self) -> None:
        """Remove the hooks and the gradient views of buffers."""
        for hook in self.hooks:
            hook.remove()
        for one in self.weights.by_name.values():
            one.parameter.grad = one.master.grad = None

    def local_norms(self) -> list[torch.Tensor]:
        """Return the norms of this rank's gradient sums: by bucket, or by parameter if uncast."""
        order = self.summed_names() if self.narrow else self.parameters
        return [self.norms[name] for name in order if name in self.norms]

    def sums(self) -> list[torch.Tensor]:
        """Return the buckets' gradient sums, in host memory."""
        return self.hosts

    def _views(
        self, number: int, flat: torch.Tensor | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a bucket's gradients as views of its flat sum."""
        flat, start = self.hosts[number] if flat is None else flat, 0
        for name in self.plan[number].names:
            parameter = self.parameters[name]
            stop = start + parameter.numel()
            yield name, view_like(parameter, flat[start:stop])
            start = stop

    def _start_bucket(self, number: int) -> BucketSum:
        """Start a bucket's sum on the device: zeros, or the sum of earlier micro-batches."""
        if number not in self.staged:
            if number in self.begun:
                while self.leaving:  # its last copy out may still be under way
                    self._wait_for_oldest()
                flat, arrived = self.lane.copy_to_device(self.hosts[number])
            else:
                flat, arrived = torch.zeros_like(self.hosts[number], device=self.lane.device), None
            self.begun.add(number)
            self.staged[number] = BucketSum(flat, dict(self._views(number, flat)), arrived)
        return self.staged[number]

    def _wait_for_views(self, number: int) -> dict[str, torch.Tensor]:
        """Return the views of a bucket's sum, once it is on the device."""
        found = self._start_bucket(number)
        if found.arrived is not None:
            self.lane.wait(found.arrived)
            found.arrived = None
        return found.views

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        number = self.bucket_of[name]

        def ready(parameter: torch.Tensor) -> None:
            if not self.active or parameter.grad is None:
                return
            self.seen.add(name)
            self._wait_for_views(number)[name].add_(parameter.grad)
            parameter.grad = None
            self.missing[number] -= 1
            if not self.missing[number]:
                self._send_bucket(number, then=True)

        return ready

    def _send_bucket(self, number: int, *, then: bool) -> None:
        """Start to copy a bucket's sum to the host; if `then`, prefetch the next bucket's sum."""
        one = self.staged.pop(number)
        if self.last:
            names = self.plan[number].names
            parts = {names[0]: one.flat} if self.narrow else one.views
            parts = {n: part for n, part in parts.items() if self.narrow or n in self.seen}
            self.norms.update(zip(parts, torch._foreach_norm(list(parts.values())), strict=True))
            self.measured.add(names[0])
        if then and number + 1 in self.begun and number + 1 not in self.staged:
            self._start_bucket(number + 1)
        self.leaving.append((one.flat, self.lane.copy_to_host(one.flat, self.hosts[number])[1]))
        while len(self.leaving) > AHEAD:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, gone = self.leaving.popleft()
        self.lane.wait(gone)


AHEAD = 1
"""Buckets on their way to the host while the next is filled."""


@dataclass(eq=False)
class BucketSum:
    """Gradients of a bucket on the device, flat and as views; event of their arrival or None."""

    flat: torch.Tensor
    views: dict[str, torch.Tensor]
    arrived: Any
