"""Folders as DeepSpeed's ranks write them, made without it, by the source `foreign_deepspeed` names.

Padding is NaN, so that an element of it in a weight is seen. Objects of DeepSpeed's own classes lie
among the rest, as in its files.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Named = Mapping[str, Tensor]


class Writer:
    """One save of a model by several ranks.

    groups   parameters as the optimizer groups them, fp32 · frozen, buffers  by name
    shared   tied name → name · untrained  of the module, in no group
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        groups: Sequence[Named],
        *,
        frozen: Named | None = None,
        buffers: Named | None = None,
        shared: Mapping[str, str] | None = None,
        untrained: Named | None = None,
    ) -> None:
        self.folder, self.ranks, self.groups = folder / "global_step7", ranks, groups
        self.frozen, self.buffers = dict(frozen or {}), dict(buffers or {})
        self.shared, self.untrained = dict(shared or {}), dict(untrained or {})
        self.folder.mkdir(parents=True)
        (folder / "latest").write_text("global_step7")

    def expected(self) -> dict[str, Tensor]:
        """The weights that must come back."""
        trained = {name: tensor for group in self.groups for name, tensor in group.items()}
        return {**trained, **self.frozen, **self.buffers, **self.untrained}

    def module(self, *, whole: bool) -> dict[str, Tensor]:
        """The module's own state dict: bf16 weights, or empty places for those that are cut."""
        found: dict[str, Tensor] = OrderedDict()
        for name, tensor in self.expected().items():
            cut = not whole and name not in self.buffers
            kept = name in {*self.buffers, *self.untrained, *self.frozen}
            found[name] = torch.empty(0) if cut else tensor if kept else tensor.bfloat16()
        for alias, name in self.shared.items():
            found[alias] = found[name]
        return found

    def model_states(self, *, whole: bool, fragments: Named) -> dict[str, Any]:
        return {
            "module": self.module(whole=whole),
            "buffer_names": [*self.buffers],
            "optimizer": None,
            "param_shapes": [
                OrderedDict((name, tensor.shape) for name, tensor in group.items())
                for group in self.groups
            ],
            "frozen_param_shapes": {name: t.shape for name, t in self.frozen.items()} or None,
            "frozen_param_fragments": OrderedDict(fragments) or None,
            "shared_params": self.shared,
            "lr_scheduler": {"last_batch_iteration": 7},
            "sparse_tensor_module_names": set(),
            "ds_config": {"train_batch_size": 4, "zero_optimization": {"stage": 2}},
            "ds_version": "0.19.8",
            "client": Path("anything"),
        }

    def write12(self, *, lean: bool, stage: int = 2, prefix: str = "") -> None:
        """Stages 1 and 2: flat groups in equal parts; `lean` ones are saved without padding."""
        states = self.model_states(whole=True, fragments=self.frozen)
        torch.save(states, self.folder / "mp_rank_00_model_states.pt")
        parts: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for group in self.groups:
            flat = torch.cat([tensor.flatten() for tensor in group.values()])
            padded = torch.full((-(-len(flat) // (2 * self.ranks)) * 2 * self.ranks,), torch.nan)
            padded[: len(flat)] = flat
            each = len(padded) // self.ranks
            for rank in range(self.ranks):
                part = padded[rank * each : (rank + 1) * each].clone()
                left = max(min(len(flat) - rank * each, each), 0)
                parts[rank].append(part[:left] if lean else part)
        for rank, flats in enumerate(parts):
            self._save(rank, stage, prefix, {"single_partition_of_fp32_groups": flats})

    def write3(self, *, sub_group: int) -> None:
        """Stage 3: every parameter cut alone, `sub_group` of them in one vector."""
        for rank in range(self.ranks):
            frozen = {name: self.part(tensor, rank) for name, tensor in self.frozen.items()}
            states = self.model_states(whole=False, fragments=frozen)
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            torch.save(states, self.folder / name)
            flats = []
            for group in self.groups:
                cut = [self.part(tensor, rank) for tensor in group.values()]
                for first in range(0, len(cut), sub_group):
                    flat = torch.cat(cut[first : first + sub_group])
                    flats.append(torch.nn.Parameter(flat))
            self._save(rank, 3, "", {"fp32_flat_groups": flats})

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        """A rank's part of one parameter, padded."""
        each = -(-tensor.numel() // self.ranks)
        padded = torch.full((each * self.ranks,), torch.nan, dtype=tensor.dtype)
        padded[: tensor.numel()] = tensor.flatten()
        return padded[rank * each : (rank + 1) * each].clone()

    def _save(self, rank: int, stage: int, prefix: str, weights: dict[str, Any]) -> None:
        groups = len(self.groups)
        state = {
            "zero_stage": own("deepspeed.runtime.zero.config", "ZeroStageEnum"),
            "loss_scaler": own("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
            "partition_count": self.ranks if stage == 3 else [self.ranks] * groups,
            "base_optimizer_state": {"state": {0: {"exp_avg": torch.ones(3)}}},
            "param_slice_mappings": [
                OrderedDict(w=own("deepspeed.utils.tensor_fragment", "fragment_address"))
            ],
            **weights,
        }
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, self.folder / name)


def own(module: str, name: str) -> Any:
    """An object of a class that only DeepSpeed has, while it is saved."""
    for place in [i for i, letter in enumerate(module) if letter == "."]:  # the packages around it
        sys.modules.setdefault(module[:place], ModuleType(module[:place]))
    known = sys.modules.setdefault(module, ModuleType(module))
    if not hasattr(known, name):
        setattr(known, name, type(name, (), {"__module__": module}))
    made = getattr(known, name)()
    made.numel, made.start = 3, 0
    return made
