"""Find experts that a model holds as a list of modules, by their structure and their calls.

A list holds experts if its entries are equal (one class, parameters of the same shapes) and are not
blocks of the model's trunk. Besides, every entry that the sample calls must receive some rows [n,
d] and nothing else. Each entry then works on rows that the code around it chose.
`expert_parallel/expert_check.py` checks by a run that it treats every row alone. The choice of rows
and the use of the results stay in the model's code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shoal.trace.isolation.layer_calls import LayerCall


@dataclass(frozen=True)
class ListedExperts:
    """List of modules that are experts.

    Attributes:
        name, part: the layer that calls them.
        names, entries: name and module of each expert, in the order of the list.
        sample: rows [n, d] that one of them was called with.
    """

    name: str
    part: nn.Module
    names: tuple[str, ...]
    entries: tuple[nn.Module, ...]
    sample: Tensor

    @property
    def experts(self) -> int:
        """Return the number of experts."""
        return len(self.entries)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return a key: lists with the same key compute alike."""
        return _kind(self.entries[0])


def iterate_expert_lists(
    module: nn.Module, blocks: Collection[str]
) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield lists, with their names, of equal entries that are not blocks."""
    for name, part in module.named_modules():
        if not isinstance(part, nn.ModuleList) or len(part) < 2:
            continue
        kinds = {_kind(entry) for entry in part}
        plain = all(p.dim() for p in part.parameters())
        own = {f"{name}.{k}" if name else str(k) for k in range(len(part))}
        is_block = any(_is_within(block, own) for block in blocks)
        trained = next(part.parameters(), None) is not None
        if len(kinds) == 1 and plain and trained and not is_block:
            yield name, part


def _is_within(name: str, parts: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in parts)


def detect_listed_experts(
    module: nn.Module, blocks: Collection[str], calls: Mapping[str, LayerCall]
) -> list[ListedExperts]:
    """Find all lists of experts, in the order of the module.

    Args:
        calls: first calls of the entries of `iterate_expert_lists`.
    """
    found = []
    for name, part in iterate_expert_lists(module, blocks):
        names = tuple(f"{name}.{k}" if name else str(k) for k in range(len(part)))
        seen = [calls[one] for one in names if one in calls]
        rows = [call.args[0] for call in seen if len(call.args) == 1 and not call.kwargs]
        fitting = [r for r in rows if isinstance(r, Tensor) and r.dim() == 2 and len(r)]
        floating = [r for r in fitting if r.is_floating_point()]
        if not floating or len(rows) < len(seen) or "." not in name:
            continue
        home = name.rpartition(".")[0]
        sample = floating[0].detach()
        found.append(ListedExperts(home, module.get_submodule(home), names, tuple(part), sample))
    return found


def _kind(entry: nn.Module) -> tuple[Any, ...]:
    return type(entry), tuple((n, tuple(p.shape), p.dtype) for n, p in entry.named_parameters())
