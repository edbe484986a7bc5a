"""Compare the optimizer's settings over ranks, before every update.

    lr, betas, weight_decay, momentum, eps, flags, …     all keys of all groups but the parameters

Each rank steps its part of the weights, or its copy, by the numbers in its own `param_groups`. If
one rank alone changes a number (a scheduler stepped where `rank == 0`), the model trains by a
setting that the user never chose, and nothing fails. So the step's all-reduce compares a checksum
of all settings (`step_vector.py`). Ranks gather the values only if it differs.

The checksum covers the settings of the last update, too. Settings that change between the step's
all-reduce and its update, or inside of the optimizer's step, show one step later. All ranks compare
the keys that torch's optimizers have (`SETTINGS`). Other keys of a group are compared on ranks that
step some of it: an optimizer that counts its steps in its groups does not count on other ranks.

Limits: a tensor on a device is read when torch's write counter says that it changed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shoal.fabric import World
from shoal.optim.named_state import inner_optimizers
from shoal.parallel._torch import version_counter
from shoal.trainer.guards.guard import Guard
from shoal.trainer.step.step_vector import Invariant, InvariantGroup, StepNumbers

PARAMETERS = ("params", "param_names")
"""Keys of a group that hold this rank's parameters."""
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


class _GroupCache:
    """Cached values of a group, a checksum of each key and value, and their sums."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.values: list[Any] = [_NOTHING] * len(keys)
        self.codes = [0] * len(keys)
        self.sums = [0, 0]


_NOTHING = object()


class OptimizerSettingsGuard(Guard):
    """Guard against learning rates and other settings that differ between ranks.

    Every rank makes it, with equal numbers of groups: they gather which groups each of them steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World) -> None:
        self.optimizer, self.world = optimizer, world
        self._inner = list(inner_optimizers(optimizer))
        self._tensors: dict[int, tuple[torch.Tensor, int, list[float]]] = {}
        self._seen: dict[int, _GroupCache] = {}
        self._used: dict[int, tuple[int, int]] = {}
        self._used_values: Settings = []
        everyone = tuple(range(world.size))
        # By ranks: the groups that exactly these ranks step.
        members: dict[tuple[int, ...], list[int]] = {everyone: []}
        self.stepped: list[tuple[int, ...]] = []
        if world.size > 1:
            held = world.gather_json([bool(group["params"]) for group in self._groups()])
            for number, column in enumerate(zip(*held, strict=True)):
                ranks = tuple(rank for rank, steps in enumerate(column) if steps)
                self.stepped.append(ranks)
                members.setdefault(ranks, []).append(number)
        self._names = [f"optimizer settings {numbers}" for numbers in members.values()]
        self._compared = [
            (name, InvariantGroup(ranks, world.rank), numbers)
            for name, (ranks, numbers) in zip(self._names, members.items(), strict=True)
            if world.rank in ranks
        ]

    def invariants(self, step: int) -> Sequence[Invariant]:
        """Return checksums of all groups' settings, and of other keys on the group's ranks."""
        now, used = self._checksums(), self._used
        found = []
        for name, group, numbers in self._compared:
            others = [one.get(n, (0, 0))[1] for n in numbers for one in (now, used)]
            settings = [one[0] for both in (now, used) for one in both.values()]
            all_of = settings if group.size == self.world.size else []
            found.append(Invariant(name, all_of + others, group))
        return found

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """Compare the settings of all ranks.

        Raises:
            ConfigError: names the first number that differs; the same on all ranks.
        """
        if numbers.invariants.differs(*self._names):
            self._refuse(step)

    def updated(self, step: int, *, skipped: bool) -> None:
        """Keep the settings of this update."""
        if not skipped:
            checksums = self._checksums()
            if checksums != self._used:
                self._used, self._used_values = checksums, list(map(list, self._settings()))

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups of the optimizer and of its inner optimizers, each once."""
        groups: list[dict[str, Any]] = list(self.optimizer.param_groups)
        for inner in self._inner:
            known = set(map(id, groups))
            groups += [group for group in inner.param_groups if id(group) not in known]
        return groups

    def _settings(self) -> Iterator[list[tuple[str, Any]]]:
        for group in self._groups():
            yield [(k, self._to_comparable(v)) for k, v in group.items() if k not in PARAMETERS]

    def _checksums(self) -> dict[int, tuple[int, int]]:
        """Return checksums of each group's keys and values: of `SETTINGS`, and of the others."""
        found = {}
        for number, group in enumerate(self._groups()):
            seen = self._seen.get(number)
            if seen is None or seen.keys != list(group):
                seen = self._seen[number] = _GroupCache(list(group))
            for place, (value, before) in enumerate(zip(group.values(), seen.values, strict=True)):
                if value is before:
                    continue
                key = seen.keys[place]
                if key not in PARAMETERS:
                    code = zlib.crc32(f"{key} {self._to_comparable(value)!r}".encode())
                    seen.sums[key not in SETTINGS] ^= seen.codes[place] ^ code
                    seen.codes[place] = code
                fixed = key in PARAMETERS or value.__class__ in FIXED  # its contents cannot change
                seen.values[place] = value if fixed else _NOTHING
            found[number] = (seen.sums[0], seen.sums[1])
        return found

    def _to_comparable(self, value: Any) -> Any:
        """Return a value in a form that is equal on all ranks."""
        if isinstance(value, torch.Tensor):
            return self._read_tensor(value)
        if isinstance(value, bool | str | None):
            return value
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, list | tuple):
            return tuple(map(self._to_comparable, value))
        return type(value).__name__  # functions and objects cannot be compared

    def _read_tensor(self, tensor: torch.Tensor) -> Any:
        """Return the numbers of a tensor; reads a device only after a counted write."""
        if tensor.device.type != "cpu":
            held, count, read = self._tensors.get(id(tensor), (None, -1, []))
            if held is not tensor or count != version_counter(tensor):
                read = tensor.detach().double().reshape(-1).tolist()
                self._tensors[id(tensor)] = tensor, version_counter(tensor), read
        else:
            read = tensor.detach().double().reshape(-1).tolist()
        return read[0] if tensor.dim() == 0 else tuple(read)

    def _refuse(self, step: int) -> None:
        """Raise ConfigError for the first number that differs; every rank calls it."""
        from shoal.trainer.guards.reports.optimizer_report import refuse_different_settings

        told = self.world.gather_json([list(map(list, self._settings())), self._used_values])
        refuse_different_settings(step, told, self.stepped, SETTINGS)


FIXED = (float, int, bool, str, tuple, type(None))
"""Classes whose objects are immutable."""
