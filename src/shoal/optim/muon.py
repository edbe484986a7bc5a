"""Muon for the matrices inside a network and AdamW for all other parameters, in one optimizer.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, so it is defined for matrices
only. Norms, biases, embeddings and the output head need AdamW. torch.optim.Muon refuses a model
that has any of those. This optimizer therefore runs both over one list of groups and one state:
learning-rate schedules, checkpoints and layouts see an ordinary optimizer.

The two share `lr` and `weight_decay`: with `match_rms_adamw` a Muon step is as large as AdamW's.

Source: Jordan et al. 2024 (Muon); Liu et al. 2025, "Muon is scalable for LLM training", §2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shoal.optim.lion import run_closure

Choice = Callable[[torch.Tensor], bool]
MUON, ADAMW = "muon", "adamw"


def is_matrix(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has two dims; embeddings and heads do too."""
    return parameter.ndim == 2


def hidden_matrices(module: nn.Module) -> Choice:
    """Return a rule that selects the matrices for Muon, without embeddings and the head.

    An embedding is the weight of an nn.Embedding. The head is the last matrix that the module
    registers (a tied head is an embedding already). A wrong guess only means that AdamW steps one
    matrix.
    """
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for _, p in module.named_parameters(remove_duplicate=False) if p.ndim == 2]
    chosen = {id(p) for p in matrices} - tables - {id(p) for p in matrices[-1:]}
    return lambda parameter: id(parameter) in chosen


class MuonWithAdamW(torch.optim.Optimizer):
    """Optimizer with torch.optim.Muon on matrices and torch.optim.AdamW on the rest.

    Args:
        params: parameters or groups; each group is split in two, and its key `rule` names the half.
        lr: of both.
        betas, fused: AdamW's.
        weight_decay: of both.
        momentum: Muon's.
        adjust_lr_fn: how Muon's step scales with the shape, see torch.optim.Muon.
        matrix: selects the parameters of Muon; default: all that have two dims. `hidden_matrices`
            leaves embeddings and the head to AdamW, if the module is known.

    Raises:
        ValueError: from torch: numbers out of range, or `matrix` selects a tensor of other dims.

    Note:
        Convolution kernels (4 dims) go to AdamW. Muon needs whole matrices: a layout that splits
        the optimizer assigns whole parameters to ranks.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        adjust_lr_fn: str = "match_rms_adamw",
        fused: bool = False,
        matrix: Choice = is_matrix,
    ) -> None:
        parted = _split_groups(params, matrix)
        # torch's own optimizers check the settings and write them into the groups. This optimizer
        # shares the groups with them: one dict per group, whoever changes it.
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self.muon = torch.optim.Muon(
            [group for group in parted if group["rule"] == MUON] or [{"params": []}],
            momentum=momentum,
            adjust_lr_fn=adjust_lr_fn,
            **shared,
        )
        self.adamw = torch.optim.AdamW(
            [group for group in parted if group["rule"] == ADAMW] or [{"params": []}],
            betas=betas,
            fused=fused,
            **shared,
        )
        super().__init__(parted, shared)
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one update of both; return the closure's result, if there is a closure."""
        loss = run_closure(closure)
        self._share()  # load_state_dict replaces the groups and the state
        self.muon.step()
        self.adamw.step()
        return loss

    def _share(self) -> None:
        for rule, inner in ((MUON, self.muon), (ADAMW, self.adamw)):
            inner.param_groups = [group for group in self.param_groups if group["rule"] == rule]
            inner.state = self.state


def _split_groups(params: Iterable[Any], matrix: Choice) -> list[dict[str, Any]]:
    """Split every group in two, by rule; omit empty halves."""
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    parted = []
    for group in groups:
        members = list(group["params"])
        for rule, wanted in ((MUON, True), (ADAMW, False)):
            chosen = [p for p in members if matrix(p) is wanted]
            if chosen:
                parted.append({**group, "params": chosen, "rule": rule})
    return parted
