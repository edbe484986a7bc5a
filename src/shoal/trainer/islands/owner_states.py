"""State of data owners that never leaves them: inner optimizer and method's control, by owner.

A group of processes that trains one owner keeps its inner optimizer in the run, as any island does.
A group that trains several in turn (`islands.concurrent`) copies it to host memory after an owner's
steps, and back before its next ones. Where the states of all owners would take more than a quarter
of the machine's memory, they are in mapped files of the temporary folder instead. The control is
that of the method (`MergeMethod.control`).

In a checkpoint, with the state of all owners of the group:

    owner.NUMBER.optimizer.NAME.KEY        sharded as the parameter NAME, if it has its shape
    owner.NUMBER.control.NAME
    owners.optimizer.NAME.KEY              small tensors of several owners, stacked: [owners, …]
    owners_of.optimizer.NAME.KEY           the numbers of these owners

A save costs by the tensor, and each round ends with one: a hundred owners of a small model would
have a thousand tensors. A group of several processes stacks none, since its ranks may keep the
states of different owners.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from shoal.base.estimates.facts import read_machine_facts
from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.format.manifest import Manifest
from shoal.islands.outer_optimizer import all_finite
from shoal.parallel.build.mmap_init import mmap_init
from shoal.parallel.program import Part
from shoal.trainer.run import Run

FILES_FROM = 0.25
"""Share of the machine's memory beyond which the states of waiting owners are in files."""
LEAST_MAPPED_BYTES = 4096
"""Smallest tensor that gets a file of its own."""
STACKED_BYTES = 1 << 18
"""Largest tensor of an owner that is stacked with those of others; a stack is a copy in memory."""
PREFIX, STACKED, NUMBERS = "owner.", "owners.", "owners_of."
OPTIMIZER, CONTROL = "optimizer.", "control."

State = dict[str, torch.Tensor]
"""Tensors of one owner, by their names in a checkpoint without PREFIX and number."""


class OwnerStates:
    """States of the data owners that one group trains, as one rank holds them; checkpointed.

    Args:
        owners: numbers of the owners that this group trains.
        shards: of the parameters that merges update, by name.
        groups: groups of processes on this machine.

    Attributes:
        kept: tensors of each owner, on the CPU.
    """

    def __init__(
        self, run: Run, owners: Sequence[int], shards: Mapping[str, Shard], groups: int = 1
    ) -> None:
        self.run, self.shards, self.groups = run, shards, groups
        self._memory_bytes = read_machine_facts().memory_bytes
        self.kept: dict[int, State] = {owner: {} for owner in owners}
        self._shapes: dict[str, tuple[int, ...]] = {}

    @property
    def takes_turns(self) -> bool:
        """Return whether the group trains several data owners, one after another."""
        return len(self.kept) > 1

    def control(self, owner: int) -> State:
        """Return the method's control of an owner, by parameter name; {} before its first round."""
        kept = self.kept[owner]
        return {n.removeprefix(CONTROL): t for n, t in kept.items() if n.startswith(CONTROL)}

    def keep_control(self, owner: int, control: Mapping[str, torch.Tensor]) -> None:
        """Replace the control of an owner."""
        self.kept[owner] |= {CONTROL + name: tensor for name, tensor in control.items()}

    @torch.no_grad()
    def install(self, owner: int) -> None:
        """Install the inner optimizer of an owner in the run, if owners take turns."""
        if not self.takes_turns:
            return
        state = self.run.optimizer.state
        state.clear()
        for name, one in self.run.program.local.items():
            head = f"{OPTIMIZER}{name}."
            for full, tensor in self.kept[owner].items():
                if full.startswith(head):
                    device = one.parameter.device if tensor.dim() else tensor.device
                    state[one.parameter][full.removeprefix(head)] = tensor.to(device, copy=True)

    @torch.no_grad()
    def store(self, owner: int) -> None:
        """Keep the inner optimizer of an owner; state that is not finite begins anew."""
        if not self.takes_turns:
            return
        state = {
            f"{OPTIMIZER}{name}.{key}": value.detach()
            for name, one in self.run.program.local.items()
            for key, value in self.run.optimizer.state.get(one.parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        self.kept[owner] = {CONTROL + name: tensor for name, tensor in self.control(owner).items()}
        with self._choose_memory(sum(tensor.nbytes for tensor in state.values())):
            found = {name: torch.empty_like(one, device="cpu") for name, one in state.items()}
        for name, tensor in found.items():
            tensor.copy_(state[name])
        if all(all_finite(tensor) for tensor in found.values()):
            self.kept[owner] |= found

    def _choose_memory(self, size_bytes: int) -> AbstractContextManager[None]:
        """Return a context in which new tensors lie in files if all owners' would fill memory.

        Args:
            size_bytes: of one owner's state on this rank.
        """
        of_machine = size_bytes * len(self.kept) * self.groups * self.run.world.size
        if of_machine <= FILES_FROM * self._memory_bytes:
            return nullcontext()
        return mmap_init(LEAST_MAPPED_BYTES)

    def parts(self) -> dict[str, Part]:
        """Return this rank's shards of all data owners' states, by their names in a checkpoint."""
        stacks = self._choose_stacks() if self.run.world.size == 1 else {}
        found: dict[str, Part] = {}
        for name, owners in stacks.items():
            stack = torch.stack([self.kept[owner][name] for owner in owners])
            for full, tensor in ((STACKED + name, stack), (NUMBERS + name, torch.tensor(owners))):
                dtype = str(tensor.dtype).removeprefix("torch.")
                found[full] = (tensor, Shard.whole(full, tuple(tensor.shape), dtype))
        for owner, state in self.kept.items():
            for name, tensor in state.items():
                if name in stacks:
                    continue
                full, dtype = f"{PREFIX}{owner}.{name}", str(tensor.dtype).removeprefix("torch.")
                shard = self._shard_of(name)
                if shard is not None and tensor.numel() == shard.elements and tensor.dim():
                    found[full] = (tensor, replace(shard, name=full, dtype=dtype))
                else:
                    found[full] = (tensor, Shard.whole(full, tuple(tensor.shape), dtype))
        return found

    def _choose_stacks(self) -> dict[str, list[int]]:
        """Return the small tensors that several data owners have, by name, with these owners."""
        holders: dict[str, list[int]] = {}
        for owner, state in self.kept.items():
            for name in state:
                holders.setdefault(name, []).append(owner)
        return {
            name: owners
            for name, owners in holders.items()
            if len(owners) > 1
            and self.kept[owners[0]][name].nbytes <= STACKED_BYTES
            and len({(t.shape, t.dtype) for t in (self.kept[one][name] for one in owners)}) == 1
        }

    def list_wanted_shards(self, manifest: Manifest) -> list[Shard]:
        """Return this rank's shards of the owners' tensors in a checkpoint."""
        found = []
        for full, stored in manifest.tensors.items():
            if full.startswith((STACKED, NUMBERS)):
                found += self._list_stack_shards(full, tuple(stored.shape), stored.dtype)
                continue
            owner, name = _split_name(full)
            shard = self._shard_of(name) if owner in self.kept else None
            if shard is None:
                continue  # another group's owner, or on another stage of a pipeline
            if tuple(stored.shape) == shard.global_shape:
                found.append(replace(shard, name=full, dtype=stored.dtype))
            else:
                found.append(Shard.whole(full, tuple(stored.shape), stored.dtype))
                self._shapes[full] = tuple(stored.shape)
        return [shard for shard in found if shard.slices]

    def _list_stack_shards(self, full: str, shape: tuple[int, ...], dtype: str) -> list[Shard]:
        """Return this rank's shard of a stack, or all of its owners' numbers."""
        shard = self._shard_of(full.removeprefix(STACKED).removeprefix(NUMBERS))
        if shard is None:
            return []
        if full.startswith(STACKED) and shape[1:] == shard.global_shape:
            boxes = tuple(((0, shape[0]), *box) for box in shard.slices)
            return [Shard(full, shape, dtype, boxes)]
        self._shapes[full] = shape[1:]
        return [Shard.whole(full, shape, dtype)]

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the result of `parts`."""
        self.kept = {owner: {} for owner in self.kept}
        for full, tensor in tensors.items():
            if full.startswith(STACKED):
                name = full.removeprefix(STACKED)
                for owner, row in self._iter_stack(full, tensor, tensors[NUMBERS + name].tolist()):
                    if owner in self.kept:
                        self.kept[owner][name] = row
            owner, name = _split_name(full)
            if owner in self.kept:
                shape = self._shapes.get(full, self._local_shape(name))
                self.kept[owner][name] = tensor.to("cpu", copy=True).reshape(shape)

    def _iter_stack(
        self, full: str, tensor: torch.Tensor, owners: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each owner's part of a stack, of which this rank may hold several boxes."""
        name, flat, count = full.removeprefix(STACKED), tensor.reshape(-1), len(owners)
        shape, shard = self._shapes.get(full), self._shard_of(name)
        sizes = [flat.numel() // count]
        if shape is None and shard is not None:
            shape = self._local_shape(name)
            sizes = [math.prod(stop - start for start, stop in box) for box in shard.slices]
        boxes = flat.split([count * size for size in sizes])
        rows = torch.cat([box.view(count, -1) for box in boxes], dim=1)
        for place, owner in enumerate(owners):
            yield owner, rows[place].to("cpu", copy=True).reshape(shape or ())

    def _shard_of(self, name: str) -> Shard | None:
        """Return the shard of the parameter to which a tensor belongs, None if it is not here."""
        parameter = self._parameter_of(name)
        if name.startswith(OPTIMIZER):
            local = self.run.program.local.get(parameter)
            return None if local is None else local.shard
        return self.shards.get(parameter)

    def _local_shape(self, name: str) -> tuple[int, ...]:
        return self.run.program.local[self._parameter_of(name)].parameter.shape

    def _parameter_of(self, name: str) -> str:
        if name.startswith(CONTROL):
            return name.removeprefix(CONTROL)
        return name.removeprefix(OPTIMIZER).rpartition(".")[0]


def _split_name(full: str) -> tuple[int, str]:
    """Return (owner, name without it) of a tensor in a checkpoint; (−1, "") for other tensors."""
    number, _, name = full.removeprefix(PREFIX).partition(".")
    return (int(number), name) if full.startswith(PREFIX) and number.isdecimal() else (-1, "")
