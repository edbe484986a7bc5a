"""Embedding tables on parameter servers, the rest of the model under ddp between the workers.

The last ranks are servers. They hold only the tables, the workers hold the rest. A batch touches
few rows of a large table, so only those are sent (fetched_rows.py); ddp would send all rows'
gradients, zeros too. A server adds the workers' gradients, in the order of their ranks, and steps
its part whole: momentum and weight decay move rows that no batch touched, as they do under ddp. The
step's one all-reduce of counts and norms is over all ranks: one scale, one clipping for both parts.

With several servers each has some columns of every table. Requested rows are skewed (tokens are
numbered by frequency) and tables differ in size. Columns are requested equally often,
whatever the data, and are one box of a checkpoint. The price is that row numbers, 4 bytes each,
go to every server.

    supported      nn.Embedding, nn.EmbeddingBag and their subclasses; padding_idx; several
                   lookups, accumulation; tables that lookups share
    left to ddp    frozen tables; tables whose weight other layers hold too (a tied head)
    refused        max_norm (a pass would write rows), weights that are read otherwise

Source: PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework";
columns: TorchRec's column-wise sharding
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.base.layouts.layout import Layout
from shoal.base.layouts.parameter_servers import SERVES, count_workers, own_batches_error
from shoal.base.plans.placement import DimCut, Placement
from shoal.fabric.exchanges.point_to_point import PointToPoint
from shoal.parallel.data_parallel import ddp
from shoal.parallel.data_parallel.buckets import reduce_dtype
from shoal.parallel.data_parallel.fetched_rows import (
    RemoteTable,
    RowFetcher,
    RowServer,
    host_message_world,
)
from shoal.parallel.program import (
    Pass,
    Program,
    copy_part,
    empty_on_meta,
    frozen_parameters,
    trainable_parameters,
)
from shoal.wire import phases

TABLES = (nn.Embedding, nn.EmbeddingBag)


def place(rows: Mapping[str, Placement], module: nn.Module, layout: Layout) -> dict[str, Placement]:
    """Return placements with the tables on the servers, divided by columns.

    Raises:
        PlanError: the model has no table, a name is no table's, or a table has max_norm.
    """
    found = dict(rows)
    for number, name in enumerate(_select_tables(module, layout)):
        width, count = rows[name].shape[1], layout.servers
        ends = [0]
        for server in range(count):  # the remainder goes to another server for each table
            more = (server - number) % count < width % count
            ends.append(ends[-1] + width // count + more)
        cut = DimCut("servers", 1, (tuple(ends),), tuple(range(count)))
        found[name] = replace(rows[name], cut=cut, stages=(1,))
    return found


def _select_tables(module: nn.Module, layout: Layout) -> list[str]:
    """Return the names of the weights that `layout.serves` selects."""
    first = {id(p): name for name, p in module.named_parameters()}
    holders = Counter(
        id(p) for m in module.modules() for p in m._parameters.values() if p is not None
    )
    lookups: Counter[int] = Counter()
    paths: dict[str, list[str]] = {}
    for path, part in module.named_modules():
        weight = part._parameters.get("weight")
        if isinstance(part, TABLES) and weight is not None:
            lookups[id(weight)] += 1
            paths.setdefault(first[id(weight)], []).append(path)
            _check_max_norm(path, part, layout)
    weights = dict(module.named_parameters())
    able = {
        name: where
        for name, where in paths.items()
        if weights[name].requires_grad and holders[id(weights[name])] == lookups[id(weights[name])]
    }
    if layout.serves == SERVES[1]:
        chosen = list(able)
    else:
        chosen = []
        for word in layout.serves.split(","):
            told = [n for n, where in able.items() if _matches(word.strip(), n, where)]
            if not told:
                raise _no_table_error(
                    f"{word.strip()} is no table that servers can hold", layout, able
                )
            chosen += [name for name in told if name not in chosen]
    if not chosen:
        raise _no_table_error("the model has no table for the servers", layout, able)
    return chosen


def _matches(word: str, name: str, paths: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(one, word) for one in (name, *paths))


def _check_max_norm(path: str, part: nn.Module, layout: Layout) -> None:
    if getattr(part, "max_norm", None) is not None:
        raise PlanError(
            f"layout.serves = {layout.serves}: {path}.max_norm shortens the rows that a pass looks "
            f"up, which are the servers'; try: torch.nn.utils.parametrize with a norm of all "
            f"rows, or layout.strategy=single"
        )


def _no_table_error(what: str, layout: Layout, able: Mapping[str, Any]) -> PlanError:
    has = ", ".join(name.removesuffix(".weight") for name in able)
    near = f"layout.serves={has.replace(', ', ',')}" if has else "layout.serves=weights"
    return PlanError(
        f"layout.serves = {layout.serves}: {what} (a trained weight of nn.Embedding or "
        f"nn.EmbeddingBag that no other layer holds too); try: {near}, or layout.strategy=ddp"
    )


def cut_tables(program: Program) -> Program:
    """Keep this rank's tensors: the tables' columns on a server, all but tables on a worker."""
    module, rows = program.module, program.rows
    serves, number = bool(program.at["pp"]), program.at["servers"]
    every = [*module.named_parameters(), *module.named_buffers()]
    names = {id(tensor): name for name, tensor in every}
    instead: dict[int, Any] = {}
    for part in module.modules():
        for home in (part._parameters, part._buffers):
            for key, tensor in home.items():
                if tensor is None:
                    continue
                row = rows[names[id(tensor)]]
                if row.is_table or serves:
                    if id(tensor) not in instead:
                        instead[id(tensor)] = _replacement_of(tensor, row, serves, number)
                    home[key] = instead[id(tensor)]
    return replace(
        program, parameters=trainable_parameters(module), frozen=frozen_parameters(module)
    )


def _replacement_of(
    tensor: torch.Tensor, row: Placement, serves: bool, number: int
) -> torch.Tensor:
    """Return the replacement of a tensor: a server's columns, a placeholder, or a meta tensor."""
    if row.is_table and not serves:
        return RemoteTable.of(cast(nn.Parameter, tensor), row)
    if row.is_table and row.cut is not None:
        return nn.Parameter(copy_part(tensor.detach(), row.cut, number))
    return empty_on_meta(tensor)


def apply(program: Program) -> Program:
    """Connect workers and servers, and give each the reducer of its tensors."""
    layout = program.plan.layout
    pairs = PointToPoint(host_message_world(program.world))
    tables = [row for row in program.rows.values() if row.is_table]
    workers, servers = (part(range(layout.processes), layout) for part in (_workers, _servers))
    sent = reduce_dtype(program.plan)
    phases.mark_unequal_parts(phases.PASSES, phases.BACKWARD, phases.UPDATE, always=True)
    program.notices.extend(_start_notices(tables, workers, servers))
    if program.world.rank in servers:
        read: Mapping[str, torch.Tensor] = program.parameters
        answers = RowServer(pairs, workers, tables, read, sent)
        program = ddp.apply(program, partial(_TableServerReducer, answers=answers, layout=layout))
        ends: list[Any] = [answers.collect_gradients]
        return replace(
            program,
            forward=_refuse_evaluation,
            on_evaluate=(*program.on_evaluate, answers.open),
            on_evaluated=(*program.on_evaluated, *ends),
            on_close=(*program.on_close, answers.close),
        )
    lookups = RowFetcher(pairs, servers, tables, program.world.device, sent)
    for part in program.module.modules():
        for weight in part._parameters.values():
            if isinstance(weight, RemoteTable):
                weight.lookups = lookups
    program = ddp.apply(program, partial(_WorkerReducer, lookups=lookups))
    return replace(
        program,
        on_evaluate=(*program.on_evaluate, lookups.start_session),
        on_evaluated=(*program.on_evaluated, lookups.end),
    )


def _workers(ranks: range, layout: Layout) -> range:
    return ranks[: count_workers(layout)]


def _servers(ranks: range, layout: Layout) -> range:
    return ranks[count_workers(layout) :]


def _start_notices(tables: list[Placement], workers: range, servers: range) -> list[str]:
    """Return the notices at the start of a run."""
    names = ", ".join(row.name.removesuffix(".weight") for row in tables[:3])
    more = f" and {len(tables) - 3} more" if len(tables) > 3 else ""
    elements = sum(row.elements for row in tables)
    who, others = (", ".join(map(str, ranks)) for ranks in (servers, workers))
    return [
        f"parameter-server: rank {who} holds {names}{more} ({elements:,} elements) and no samples; "
        f"rows travel as batches look them up, and the rest is ddp between ranks {others}"
    ]


def _refuse_evaluation(program: Program, one: Pass) -> None:
    """Return no outputs, since a server computes none.

    Raises:
        ConfigError: this server's rank brought samples to evaluate.
    """
    if getattr(one, "parts", (None, None))[1] is not None:
        raise own_batches_error(program.plan.layout)


class _WorkerReducer(ddp.SumReducer):
    """Reducer of a worker: ddp for its own parameters, and row gradients to the servers."""

    def __init__(self, *given: Any, lookups: RowFetcher) -> None:
        super().__init__(*given)
        self.lookups = lookups

    def start_step(self, rounds: int) -> None:
        """Zero the buffers and start to fetch rows from the servers."""
        super().start_step(rounds)
        self.lookups.start_session()

    def finish(self) -> None:
        """Send the row gradients before waiting for the other workers' gradients."""
        self.lookups.end()
        super().finish()

    def local_norms(self) -> list[torch.Tensor]:
        """Return the norms of buckets and of tables, as this rank computed them."""
        return [*super().local_norms(), *self.lookups.norms()]


class _TableServerReducer(ddp.SumReducer):
    """Reducer of a server: the sums of its columns of the tables."""

    def __init__(self, *given: Any, answers: RowServer, layout: Layout) -> None:
        super().__init__(*given)
        self.answers, self.layout = answers, layout

    def start_step(self, rounds: int) -> None:
        """Zero the sums, and let workers read."""
        super().start_step(rounds)
        self.answers.open()

    def prepare_backward(self, last: bool, once: bool = True) -> None:
        """Raise ConfigError: a server has no samples, so it must not run a pass."""
        raise own_batches_error(self.layout)

    def finish(self) -> None:
        """Add the workers' gradients in rank order, for the same bits in every run."""
        for told in self.answers.collect_gradients():
            for name, brought in told.items():
                sums = self.views[name]
                sums.index_add_(0, brought.rows, brought.gradients.to(sums.dtype))
                self.seen.add(name)
        super().finish()

    def local_norms(self) -> list[torch.Tensor]:
        """Return none: a server computes no gradients; the workers report bad norms."""
        return []


def check_optimizer(layout: Layout, allowed: Any) -> None:
    """Refuse an optimizer that steps by whole matrices, or by all parameters of the model.

    Servers hold columns of the tables, and no rank holds all parameters.

    Args:
        allowed: two reasons of the optimizer, "" if it has none (`optim/elementwise_probe.py`):
            flat, against cut weights; apart, against parameters on several ranks.

    Raises:
        PlanError: the optimizer needs whole weights, or all weights on one rank.
    """
    if allowed.flat and layout.servers > 1:
        raise PlanError(
            f"layout.servers = {layout.servers}: cuts embedding tables by columns, and "
            f"{allowed.flat}; try: layout.servers=1, or optimizer.name=adamw"
        )
    if allowed.apart:
        raise PlanError(
            f"layout.serves = {layout.serves}: no rank sees all parameters, and {allowed.apart}; "
            f"try: layout.strategy=ddp, or optimizer.name=adamw"
        )
