"""Compare the optimizer's settings over ranks, before every update.

    lr, betas, weight_decay, momentum, eps, flags, …     all keys of all groups but the parameters

Each rank steps its part of the weights, or its copy, by the numbers in its own `param_groups`. If
one rank alone changes a number (a scheduler stepped where `rank == 0`), the model trains by no
setting that anybody chose, and nothing fails. So a checksum of all settings travels in the step's
vector, as one zero sum (`step_vector.py`). Ranks gather the values only where it differs.

The checksum covers what the last update used, too: settings that change between the step's
all-reduce and its update, or inside of the optimizer's step, show one step later. Keys that torch's
optimizers have (`SETTINGS`) are compared on all ranks, other keys of a group on ranks that step
some of it: an optimizer that counts its steps in its groups does not count elsewhere.

Limits: a tensor on a device is read when torch's counter of writes says that it changed
"""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shoal.fabric import World
from shoal.optim.state import inner_optimizers
from shoal.parallel._torch import writes
from shoal.trainer.step_vector import StepNumbers, zero_sum_term

ENTRY = "optimizer_settings"
PARAMETERS = ("params", "param_names")
"""Keys of a group that hold this rank's own."""
SETTINGS = frozenset(
    [
        *("lr", "initial_lr", "lr_decay", "weight_decay", "decoupled_weight_decay"),
        *("betas", "eps", "alpha", "rho", "momentum", "dampening", "nesterov", "amsgrad"),
        *("maximize", "centered", "foreach", "fused", "capturable", "differentiable"),
    ]
)
"""Keys that no step of an optimizer changes."""

Settings = list[list[tuple[str, Any]]]
"""For each group its keys and values, in the group's order."""


class _Seen:
    """Values that were read of a group, a code of each key and value, and their sums."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.values: list[Any] = [_NOTHING] * len(keys)
        self.codes = [0] * len(keys)
        self.sums = [0, 0]


_NOTHING = object()


class OptimizerSettingsCheck:
    """Compares one run's optimizer with those of the other ranks; see `step_guards.StepGuard`.

    Every rank makes it, with equal numbers of groups: they tell each other which they step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World) -> None:
        self.optimizer, self.world = optimizer, world
        self._inner = list(inner_optimizers(optimizer))
        self._tensors: dict[int, tuple[torch.Tensor, int, list[float]]] = {}
        self._seen: dict[int, _Seen] = {}
        self._used: dict[int, tuple[int, int]] = {}
        self._used_values: Settings = []
        self._members: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.stepped: list[tuple[int, ...]] = []
        if world.size > 1:
            held = world.gather_json([bool(group["params"]) for group in self._groups()])
            self.stepped = [
                tuple(rank for rank, steps in enumerate(column) if steps)
                for column in zip(*held, strict=True)
            ]
        self._everyone = tuple(range(world.size))
        for number, ranks in enumerate(self.stepped):
            if world.rank in ranks and len(ranks) > 1:
                self._members[ranks].append(number)
        self._shared = self._members.pop(self._everyone, [])

    def by_rank(self, step: int) -> Mapping[str, Sequence[float]]:
        """Return nothing: one sum over all ranks is enough."""
        return {}

    def sums(self, step: int) -> Mapping[str, Sequence[float]]:
        """Return this rank's term of the sum over all groups."""
        if self.world.size == 1:
            return {}
        now, used = self._checksums(), self._used
        terms = self.world.size * (1 + len(self.stepped))

        def term(ranks: tuple[int, ...], numbers: Sequence[int], codes: list[int]) -> int:
            codes += [one.get(n, (0, 0))[1] for n in numbers for one in (now, used)]
            value = zlib.crc32(struct.pack(f"={len(codes)}I", *codes))
            return zero_sum_term(value, step, ranks, self.world.rank, terms)

        settings = [one[0] for both in (now, used) for one in both.values()]
        total = term(self._everyone, self._shared, settings)
        for ranks, numbers in self._members.items():
            total += term(ranks, numbers, [])
        return {ENTRY: [float(total)]}

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """Raises: ConfigError, the same on all ranks, naming the first number that differs."""
        if self.world.size > 1 and numbers.sums(ENTRY)[0]:
            self._refuse(step)

    def updated(self) -> None:
        """The optimizer has stepped: keep what it stepped by."""
        if self.world.size > 1:
            checksums = self._checksums()
            if checksums != self._used:
                self._used, self._used_values = checksums, list(map(list, self._settings()))

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, and those of optimizers that it holds, each once."""
        groups: list[dict[str, Any]] = list(self.optimizer.param_groups)
        for inner in self._inner:
            known = set(map(id, groups))
            groups += [group for group in inner.param_groups if id(group) not in known]
        return groups

    def _settings(self) -> Iterator[list[tuple[str, Any]]]:
        for group in self._groups():
            yield [(k, self._plain(v)) for k, v in group.items() if k not in PARAMETERS]

    def _checksums(self) -> dict[int, tuple[int, int]]:
        """Checksums of each group's keys and values: of `SETTINGS`, of the others."""
        found = {}
        for number, group in enumerate(self._groups()):
            seen = self._seen.get(number)
            if seen is None or seen.keys != list(group):
                seen = self._seen[number] = _Seen(list(group))
            for place, (value, before) in enumerate(zip(group.values(), seen.values, strict=True)):
                if value is before:
                    continue
                key = seen.keys[place]
                if key not in PARAMETERS:
                    code = zlib.crc32(f"{key} {self._plain(value)!r}".encode())
                    seen.sums[key not in SETTINGS] ^= seen.codes[place] ^ code
                    seen.codes[place] = code
                if key in PARAMETERS or value.__class__ in FIXED:  # what it holds stays
                    seen.values[place] = value
            found[number] = (seen.sums[0], seen.sums[1])
        return found

    def _plain(self, value: Any) -> Any:
        """A value as all ranks would print it."""
        if isinstance(value, torch.Tensor):
            return self._read(value)
        if isinstance(value, bool | str | None):
            return value
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, list | tuple):
            return tuple(map(self._plain, value))
        return type(value).__name__  # a function, an object: what it holds nobody can compare

    def _read(self, tensor: torch.Tensor) -> Any:
        """The numbers of a tensor; one on a device is read where it was written since."""
        if tensor.device.type != "cpu":
            held, count, read = self._tensors.get(id(tensor), (None, -1, []))
            if held is not tensor or count != writes(tensor):
                read = tensor.detach().double().reshape(-1).tolist()
                self._tensors[id(tensor)] = tensor, writes(tensor), read
        else:
            read = tensor.detach().double().reshape(-1).tolist()
        return read[0] if tensor.dim() == 0 else tuple(read)

    def _refuse(self, step: int) -> None:
        """Raise for the first number that differs; every rank calls it."""
        from shoal.trainer.unlike_settings import refuse_unlike_settings

        told = self.world.gather_json([list(map(list, self._settings())), self._used_values])
        refuse_unlike_settings(step, told, self.stepped, SETTINGS)


FIXED = (float, int, bool, str, tuple, type(None))
"""Classes whose objects keep their values."""
