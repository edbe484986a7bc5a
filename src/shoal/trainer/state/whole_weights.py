"""Whole weights on every rank for a moment, so that any change of them is right on any layout.

    with run.whole_weights():               the parameters of run.model are whole
        run.model.head.weight[0] = 0        every rank makes the same change
    …                                       each rank has its parts again, cut out of these

Rows, norms, new draws and `load_state_dict` are then those of one process. The optimizer keeps its
state. Every rank holds the whole model meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.parallel.build.full_state import local_state
from shoal.parallel.program import Program
from shoal.trainer.full_state_dict import WHOLE_NOW, gather_full_state_dict
from shoal.trainer.guards.checksums import fingerprint
from shoal.trainer.rebind_optimizer import extract_shard


class WholeWeights:
    """The whole parameters of a program's module, in the place of this rank's own.

    Every rank makes it, and calls `cut` or `drop` once.

    Args:
        program: the run's.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        whole, made = gather_full_state_dict(program), dict[str, nn.Parameter]()
        self.parts = local_state(program)
        self.slots: list[tuple[nn.Module, str, str, nn.Parameter]] = []
        for path, layer in program.module.named_modules():
            for key, own in layer._parameters.items():
                name = f"{path}.{key}".lstrip(".")
                first = program.aliases.get(name, name)
                if own is None or first not in whole:
                    continue
                if first not in made:
                    tensor = whole[first].to(program.world.device, copy=True)
                    made[first] = nn.Parameter(tensor, requires_grad=own.requires_grad)
                self.slots.append((layer, key, first, own))
        for layer, key, first, _ in self.slots:
            layer._parameters[key] = made[first]
        self.layers = list(program.module.modules())
        WHOLE_NOW.update(self.layers)
        self.hooks = [
            (layer._load_state_dict_post_hooks, number, hook)
            for layer in self.layers
            for number, hook in layer._load_state_dict_post_hooks.items()
            if str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")
        ]
        for hooks, number, _ in self.hooks:  # they read rows where whole weights are now
            del hooks[number]

    def drop(self) -> dict[str, Any]:
        """Put this rank's own weights back; return the whole ones by name."""
        found: dict[str, Any] = {}
        for layer, key, first, own in self.slots:
            found.setdefault(first, layer._parameters[key])
            layer._parameters[key] = own
        WHOLE_NOW.difference_update(self.layers)
        for hooks, number, hook in self.hooks:
            hooks[number] = hook
        return found

    @torch.no_grad()
    def cut(self) -> None:
        """Put this rank's own weights back, with their parts of the changed whole ones.

        Raises:
            ConfigError: a weight has another shape, or ranks changed it differently; on all ranks.
        """
        program, found = self.program, self.drop()
        shapes = {name: row.shape for name, row in program.rows.items()}
        for name, whole in found.items():
            if whole is None or tuple(whole.shape) != tuple(shapes[name]):
                got = "None" if whole is None else f"{list(whole.shape)}"
                raise ConfigError(
                    f"run.whole_weights: {name} has the shape {list(shapes[name])}, got {got}; "
                    f"try: layers of another size before shoal.parallelize"
                )
        sums = {name: f"{fingerprint([whole], whole=True)}" for name, whole in found.items()}
        if (unlike := program.world.find_differing_rank(sums)) is not None:
            rank, first, other = unlike
            name = next(one for one in first if other.get(one) != first[one])
            raise ConfigError(
                f"run.whole_weights: {name} was changed on rank {rank} otherwise than on rank 0; "
                f"try: the same change on every rank (draws: one seed)"
            )
        for name, (part, shard) in self.parts.items():
            if name in found and shard.slices:
                part.copy_(extract_shard(found[name].detach(), shard).view(part.shape))
        for _, _, name, own in self.slots:  # copies that forward passes read
            if not own.is_meta and not hasattr(own, "device_mesh"):
                whole = found[name].detach()
                here = own.shape == whole.shape
                own.copy_(
                    whole if here else extract_shard(whole, program.shard_of(name)).view(own.shape)
                )
        if program.reducer is not None:
            program.reducer.publish()
