"""Fully sharded data parallel (ZeRO stage 3), or in replicas (hsdp), on torch's `fully_shard`.

Every block of the model is a unit: its parameters are sharded by rows over `dp_shard`, gathered
before its forward and before its backward pass, and its gradients are reduce-scattered after it.
Parameters outside of blocks (embedding, head, final norm, and blocks that share a parameter) are
gathered once per pass and kept from forward to backward: the loss may still need the head.
`fsdp.reshard` keeps blocks from forward to backward too, whole or sharded over a node's
ranks. Under hsdp parts are then summed over `dp_replicate`. Experts that `ep` distributes over
ranks are units of their own, over the ranks that hold the same ones.

Gradients are sums: torch's division by the number of ranks is switched off. The optimizer steps on
local tensors, not on DTensors (0.88 against 2.55 ms for the same weights). Parameters that a pass
leaves unused count as zero, so that ranks with different unused parameters still meet.

Under bf16 and fp16 a unit's vectors (norms, biases) are gathered in the narrow dtype with its
matrices; the root unit is gathered in its own dtype.

A rank that skips a block joins the collectives of it (`unit_visits.py`).

Source: Zhao et al. 2023 (PyTorch FSDP); torch.distributed.fsdp.fully_shard
Limits: under pp and ep ranks that run different blocks in one step are reported (`unit_log.py`),
        not supported; a block that is a bare layer stays in the root unit (in-place operations on
        its output would fail)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shoal.base.errors import BugError, PlanError
from shoal.base.layouts.resharding import MANY_BLOCKS, gathers_all_blocks, ranks_after_reshard
from shoal.base.text.units import bytes_text
from shoal.fabric import World
from shoal.fabric.axis_worlds import build_device_mesh
from shoal.fabric.collectives.sharded_collectives import GatherParameters, ScatterGradients
from shoal.fabric.world import register_group_owner
from shoal.machine.process_memory import trim_heap
from shoal.parallel._torch import (
    clear_forward_order,
    drop_process_groups,
    pytree,
    reduce_unused_gradients,
    set_post_forward_mesh,
)
from shoal.parallel.build.mmap_init import copy_to_memory, is_mapped, load_own_rows, mmap_init
from shoal.parallel.data_parallel.buckets import expert_parameters, reduce_dtype
from shoal.parallel.data_parallel.shared_parameters import all_reduce_message
from shoal.parallel.mutated_weights import watch_unit_weights
from shoal.parallel.program import (
    HookedReducer,
    LocalParameter,
    Program,
    frozen_parameters,
    trainable_parameters,
)
from shoal.parallel.unit_log import LoggedGather, LoggedScatter, UnitLog
from shoal.parallel.unit_visits import make_unit_visits
from shoal.trace.find.blocks import detect_blocks, fsdp_blocks, list_shared_parameters
from shoal.trace.isolation.module_copies import copy_to_meta
from shoal.trace.isolation.replaced_forward import ReplacedForward


def apply(program: Program) -> Program:
    """Shard the module in place into DTensors; the optimizer steps the local rows."""
    module, world, plan = program.module, program.world, program.plan
    layout = plan.layout
    _check_dtypes(program)
    axes = ["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else ["dp_shard"]
    twin = program.twin or copy_to_meta(module)  # a sharded module cannot be copied
    _prepare_parameters(program)
    blocks = {name: module.get_submodule(name) for name in _unit_names(program)}
    units = [*blocks.values()]
    program.notices.extend(
        _no_blocks_notice(program, units)
        + _scalars_notice(program)
        + _small_blocks_notice(program, units)
    )
    scatter = ScatterGradients(world.traffic, layout.dp_replicate, axes)
    detours = []
    log = UnitLog(world)
    comms = _UnitComms(program, layout.degrees, axes, scatter, log)
    gathers, scatters = [comms.gather], [scatter]
    if layout.ep > 1 and layout.expert_shard > 1:  # also on ranks without experts: equal logs
        among = ["expert_replicate"] if layout.expert_replicate > 1 else []
        over = [*among, "expert_shard"]
        scatters.append(ScatterGradients(world.traffic, layout.expert_replicate, over))
        own = [name for name in program.parameters if program.is_expert(name)]
        of_experts = _UnitComms(program, layout.expert_degrees, over, scatters[1], log)
        gathers.append(of_experts.gather)
        for part in _expert_layers(program, own):
            detours += _shard_units(program, [part], of_experts)
    detours += _shard_units(program, [*units, module], comms)
    shards = [m for m in module.modules() if isinstance(m, FSDPModule)]
    detours += watch_unit_weights(shards, program)
    parameters = trainable_parameters(module)
    undealt = _unsharded_buckets(program)
    reducer = ShardedGradients(module, parameters, gathers, scatters, log, plan.defer_sync, undealt)
    paths = {id(part): path for path, part in module.named_modules()}
    detours += [
        hook for shard in shards for hook in reducer.watch_gradients(shard, paths[id(shard)])
    ]
    detours.append(module.register_forward_hook(reducer.free_gather_buffers))
    if (visits := make_unit_visits(program, blocks)) is not None:
        detours += visits.watch(module, units)
        reducer.on_finish = visits.finish_step
    still = frozen_parameters(module)
    parts = {
        name: (_to_local(p).detach(), program.rows[name].stored_shard(program.at, layout))
        for name, p in {**parameters, **still}.items()
    }
    local = _local_parameters(parameters, parts)
    reducer.local, reducer.dealt = local, expert_parameters(program)

    def reshard() -> None:
        for shard in shards:
            shard.reshard()
            clear_forward_order(shard)

    return replace(
        program,
        parameters=parameters,
        frozen=still,
        local=local,
        parts=parts,
        reducer=reducer,
        unit_log=log,
        together=True,
        twin=twin,
        on_evaluated=(*program.on_evaluated, reshard),
        on_close=(*program.on_close, *(d.remove for d in detours), reducer.close),
    )


def _local_parameters(
    parameters: dict[str, nn.Parameter], parts: dict[str, tuple[torch.Tensor, Any]]
) -> dict[str, LocalParameter]:
    """Return the parts that the optimizer steps on this rank: those that have elements."""
    return {
        name: LocalParameter(nn.Parameter(parts[name][0]), parts[name][1])
        for name, parameter in parameters.items()
        if parts[name][0].numel() or not parameter.numel()
    }


def _prepare_parameters(program: Program) -> None:
    """Prepare parameters for sharding: row order; unsharded ones move to the device."""
    for parameter in program.module.parameters():
        # torch refuses channels_last, and sharding is by rows anyway. Mapped ones: unit by unit.
        if not parameter.is_contiguous() and not is_mapped(parameter):
            parameter.data = parameter.data.contiguous()
    copy_to_memory(_unsharded_parameters(program))
    for parameter in _unsharded_parameters(program):
        parameter.data = parameter.data.to(program.world.device)


def _unsharded_buckets(program: Program) -> list[tuple[tuple[str, ...], World]]:
    """Return the buckets of unsharded parameters, and the ranks over which each is summed."""
    firsts = [(bucket.names, bucket.names[0]) for bucket in program.plan.buckets]
    return [(n, program.sums[one][0]) for n, one in firsts if program.rows[one].data == "whole"]


def _no_blocks_notice(program: Program, units: list[nn.Module]) -> list[str]:
    """Return a notice if the model has no blocks, so that fsdp gathers all of it at once.

    There is none for blocks that are gathered together because they are small
    (`gathers_all_blocks`): that costs nothing.
    """
    if units:
        return []
    blocks = fsdp_blocks(program.module, program.plan).values()
    elements = sum(p.numel() for block in blocks for p in block.parameters())
    if gathers_all_blocks(len(blocks), elements, program.plan.names_blocks):
        return []
    name = program.plan.layout.strategy
    size_bytes = sum(
        p.numel() * p.element_size() for p in program.module.parameters() if not p.is_meta
    )
    gathered = f"so {bytes_text(size_bytes)} are gathered at once instead of block by block"
    found = detect_blocks(program.module, program.plan)
    if shared := list_shared_parameters(program.module, found):
        return [
            f"layout.strategy = {name}: {len(shared)} of the {len(found)} blocks share weights "
            f"with other parts of the model, first: {next(iter(shared.values()))}, {gathered}; "
            f"try: layout.strategy=zero2"
        ]
    return [
        f"layout.strategy = {name}: the model has no blocks of layers (entries of a ModuleList or "
        f"Sequential, or attributes of one class), {gathered}; "
        f"try: layout.strategy=zero2, or layout.blocks=NAME"
    ]


def _small_blocks_notice(program: Program, units: list[nn.Module]) -> list[str]:
    """Return the notice of `small_units` if many blocks are too small."""
    if len(units) < MANY_BLOCKS:
        return []
    from shoal.parallel.data_parallel.small_units import cluster_of, small_units_line

    line = small_units_line(program.plan, program.rows.values(), cluster_of(program.world))
    return [line] if line else []


def _unit_names(program: Program) -> list[str]:
    """Return the names of the blocks that this rank holds fully, and gathers one at a time."""
    rows = [row for row in program.rows.values() if row.unit and not row.is_expert]
    elsewhere = {row.unit for row in rows if program.pipe.rank not in row.stages}
    return [unit for unit in dict.fromkeys(row.unit for row in rows) if unit not in elsewhere]


def _unsharded_parameters(program: Program) -> list[nn.Parameter]:
    """Return the parameters that fsdp leaves unsharded: scalars, empty ones, unshared experts."""
    every = {**program.parameters, **program.frozen}
    return [p for name, p in every.items() if program.rows[name].data == "whole"]


def _scalars_notice(program: Program) -> list[str]:
    """Return a notice on scalar parameters, which cannot be sharded."""
    names = [n for n, row in program.rows.items() if row.trains and not row.shape]
    if not names:
        return []
    some = f"{len(names)} scalar parameters have" if len(names) > 1 else "1 scalar parameter has"
    return [
        f"layout.strategy = {program.plan.layout.strategy}: {some} no rows to cut, first: "
        f"{names[0]}; they stay whole on every rank, their gradients are summed once a step"
    ]


def _expert_layers(program: Program, names: list[str]) -> list[nn.Module]:
    """Return the expert layers that ep distributes; a replaced forward calls their experts."""
    own = {id(program.parameters[name]) for name in names}
    return [
        part
        for part in program.module.modules()
        if _calls_experts(part) and {id(p) for p in part.parameters() if p.requires_grad} & own
    ]


def _calls_experts(part: nn.Module) -> bool:
    """Return whether a layer's forward distributes its experts, whatever replaces it besides."""
    forward = part.__dict__.get("forward")
    while isinstance(forward, ReplacedForward):
        if forward.calls_experts:
            return True
        forward = forward.replaced
    return False


class _UnitComms:
    """Mesh, collectives and logs of one kind of units.

    Attributes:
        mesh: mesh of `axes`: the last one shards parameters, a first one replicates the parts.
        kept: state of a unit between its passes: sharded as usual, whole, or over a mesh
        (`_post_forward_state`).
    """

    def __init__(
        self,
        program: Program,
        degrees: Mapping[str, int],
        axes: list[str],
        scatter: ScatterGradients,
        log: UnitLog,
    ) -> None:
        self.mesh = build_device_mesh(program.world, degrees, axes)
        self.kept, split = _post_forward_state(program, degrees, axes[-1])
        self.scatter, self.log = scatter, log
        self.gather = GatherParameters(program.world.traffic, axes[-1])
        shard = log.add_axis(degrees, axes[-1])
        self.gathers = [shard, *([log.add_axis(split, "node")] if split else [])]
        self.scatters = [shard, *(log.add_axis(degrees, axis) for axis in axes[:-1])]

    def attach(self, shard: FSDPModule, unit: nn.Module, path: str) -> None:
        """Set these collectives as the custom collectives of an FSDP unit."""
        # Any: torch's annotation names classes of its own, with the same call signature.
        gather: Any = LoggedGather(self.gather, path, self.log, self.gathers)
        summed: Any = LoggedScatter(self.scatter, path, self.log, self.scatters)
        self.log.scatter_of[id(unit)] = summed
        shard.set_custom_all_gather(gather)
        shard.set_custom_reduce_scatter(summed)


def _shard_units(
    program: Program, wrapped: list[nn.Module], comms: _UnitComms
) -> list[RemovableHandle]:
    """Shard some units, the root last; return the hooks that this needs."""
    module, plan, over, kept = program.module, program.plan, comms.mesh, comms.kept
    parked = plan.offloads_parameters and program.world.device.type != "cpu"
    host = CPUOffloadPolicy() if parked else OffloadPolicy()
    detours = []
    # Parameters of other stages, without rows, or of an axis of one rank.
    ignored = {p for p in module.parameters() if p.is_meta} | set(_unsharded_parameters(program))
    for unit in wrapped:
        before = [(p, p.data, is_mapped(p)) for p in unit.parameters() if p not in ignored]
        load_own_rows([p for p, *_ in before], over, program.world.device)
        # Before torch's own hook, which attaches the gather for backward to the outputs found here.
        detours.append(unit.register_forward_hook(_copy_view_outputs))
        # Not around the gathers: they resize tensors, and a mapped tensor cannot be resized.
        with mmap_init() if plan.builds_in_files else nullcontext():
            fully_shard(
                unit,
                mesh=over,
                ignored_params=ignored,
                reshard_after_forward=unit is not module and kept is not False,
                mp_policy=_mixed_precision_policy(unit, program, root=unit is module),
                offload_policy=host,
            )
        if unit is not module and isinstance(kept, DeviceMesh):
            set_post_forward_mesh(unit, kept)
        for parameter, data, in_file in before:
            # The optimizer refers to `parameter` until it gets the rows. Without this the whole
            # model would stay on the device, or its file in the host's page cache.
            if in_file:
                parameter.data = data.new_empty(1).expand(data.shape)
            elif parameter.data_ptr() != data.data_ptr():
                parameter.data = data
            del data  # else this tensor would live while the next unit is gathered
        del before
        trim_heap()
    paths = {id(part): path for path, part in module.named_modules()}
    for shard in wrapped:
        if not isinstance(shard, FSDPModule):
            raise BugError("fully_shard left a unit as it was")
        comms.attach(shard, shard, paths[id(shard)])
        shard.set_gradient_divide_factor(1.0)
        shard.set_force_sum_reduction_for_comms(True)
        if shard is module and plan.layout.pp > 1:
            # A stage alternates forward and backward passes: the root unit stays gathered for them.
            shard.set_reshard_after_backward(False, recurse=False)
        reduce_unused_gradients(shard)
        register_group_owner(shard, drop_process_groups)
    return detours


def _post_forward_state(
    program: Program, degrees: Mapping[str, int], axis: str
) -> tuple[bool | DeviceMesh, Mapping[str, int]]:
    """Return a unit's state between passes: sharded, unsharded (False), or over part of `axis`.

    The part is the last axis of the mesh. All units share this mesh; torch would make new groups.

    Returns:
        Also the degrees with that axis split in nodes and node, {} if it is not split.
    """
    layout, shards = program.plan.layout, degrees[axis]
    apart = layout.cp * layout.tp * (layout.ep if axis == "expert_shard" else 1)
    kept = ranks_after_reshard(program.plan.reshard, shards, program.world.local_size, apart)
    if kept in (1, shards):
        return kept == shards, {}
    split: dict[str, int] = {}
    for name, degree in degrees.items():
        split |= {"nodes": shards // kept, "node": kept} if name == axis else {name: degree}
    return build_device_mesh(program.world, split, ["nodes", "node"]), split


def _mixed_precision_policy(
    unit: nn.Module, program: Program, *, root: bool
) -> MixedPrecisionPolicy:
    """Gather a unit in the narrow dtype if all of its matrices are read in it anyway."""
    plan, reduce = program.plan, reduce_dtype(program.plan)
    copied = {name: bucket.compute for bucket in plan.buckets for name in bucket.names}
    names = {id(p): name for name, p in program.parameters.items()}
    here = [(p, copied.get(names.get(id(p), ""), "")) for p in unit.parameters()]
    matrices = {compute for p, compute in here if p.ndim >= 2}
    if root or len(matrices) != 1 or not next(iter(matrices)):
        return MixedPrecisionPolicy(reduce_dtype=reduce)
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, matrices.pop()),
        reduce_dtype=reduce or torch.float32,
        cast_forward_inputs=False,
    )


class ShardedGradients(HookedReducer):
    """The reducer over `fully_shard`, which sends by itself; see `program.Reducer`.

    Args:
        undealt: buckets of parameters that `fully_shard` ignores, and the ranks to sum each over at
            the end.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        gathers: list[GatherParameters],
        scatters: list[ScatterGradients],
        log: UnitLog,
        defer_sync: bool,
        undealt: Sequence[tuple[tuple[str, ...], World]],
    ) -> None:
        self.module, self.parameters, self.undealt = module, parameters, undealt
        self.gathers, self.scatters = gathers, scatters
        self.log, self.defer_sync = log, defer_sync
        self.norms: list[torch.Tensor] = []
        self.local: dict[str, LocalParameter] = {}
        self.dealt: frozenset[str] = frozenset()
        self.seen: set[str] = set()
        self.fresh: set[str] = set()
        self.hooks: dict[str, Any] = {}
        self.on_finish: Callable[[], None] = lambda: None

    def watch_gradients(
        self, unit: nn.Module, path: str
    ) -> tuple[RemovableHandle, RemovableHandle]:
        """Record which parameters of a unit get gradients, from its first forward pass on.

        If the unit were gathered for that at the start, it would be in memory twice: flat, and as
        parameters.

        Args:
            path: the unit's name.

        Returns:
            The hooks.
        """

        def before(_unit: nn.Module, _given: Any) -> None:
            early.remove()
            if torch.is_inference_mode_enabled():  # FSDP reuses the tensors that it makes now
                with torch.inference_mode(False):
                    cast(FSDPModule, unit).unshard()

        def first(_unit: nn.Module, _given: Any) -> None:
            once.remove()
            for own, parameter in unit.named_parameters(path, remove_duplicate=False):
                gathered = not isinstance(parameter, DTensor)
                trains = gathered and parameter.requires_grad  # a script may freeze it meanwhile
                if trains and own in self.parameters and own not in self.hooks:
                    hook = parameter.register_post_accumulate_grad_hook(self._mark_used(own))
                    self.hooks[own] = hook

        early = unit.register_forward_pre_hook(before, prepend=True)
        once = unit.register_forward_pre_hook(first)
        return early, once

    def replace_scatters(self, make: Callable[[ScatterGradients, nn.Module], Any]) -> list[Any]:
        """Replace each unit's reduce-scatter by `make(plain, unit)`; return all in order."""
        made = []
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                made.append(make(self.scatters[0], part))
                self.log.scatter_of[id(part)].set_inner(made[-1])
        return made

    def start_step(self, rounds: int) -> None:
        """Drop all gradients at the start of a step."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for local in self.local.values():
            local.parameter.grad = None
        self.seen, self.fresh = set(), set()
        self.norms = []
        for scatter in self.scatters:
            scatter.norms = []

    def prepare_backward(self, last: bool, once: bool = True) -> None:
        """Turn gradient sync on for every pass, or with `defer_sync` for the last known one."""
        if self.defer_sync and isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last or not once)

    def free_gather_buffers(self, *_: object) -> None:
        """Free the memory of gathers: at the loss most activations are in memory."""
        for gather in self.gathers:
            gather.drop()

    def end_backward(self, counted: bool) -> None:
        """Free buffers after a backward pass, in which `fully_shard` reduced the gradients."""
        self.free_gather_buffers()
        for scatter in self.scatters:
            scatter.drop()
        self.seen |= self.fresh if counted else self.fresh & self.dealt
        self.fresh = set()

    def finish(self) -> None:
        """Give each local tensor its gradient; reshard what a pipeline kept gathered."""
        if isinstance(self.module, FSDPModule):
            self.module.reshard()
        for name, local in self.local.items():
            gradient = self.parameters[name].grad
            if gradient is None:
                local.parameter.grad = torch.zeros_like(local.parameter)
            else:
                local.parameter.grad = _to_local(gradient)
        self._all_reduce_unsharded()
        self.on_finish()

    def _all_reduce_unsharded(self) -> None:
        """All-reduce the gradients of unsharded parameters, bucket by bucket."""
        for names, world in self.undealt:
            gradients = [grad for n in names if (grad := self.local[n].parameter.grad) is not None]
            self.norms += [torch.linalg.vector_norm(gradient) for gradient in gradients]
            all_reduce_message(world, gradients)

    def publish(self) -> None:
        """Reshard all units, so that the next pass gathers the new weights."""
        for shard in self.module.modules():
            if isinstance(shard, FSDPModule):
                shard.reshard()

    def close(self) -> None:
        """Remove the hooks; the module stays sharded."""
        for hook in self.hooks.values():
            hook.remove()
        for local in self.local.values():
            local.parameter.grad = None

    def local_norms(self) -> list[torch.Tensor]:
        """Return the norm of each unit's gradients as this rank computed them."""
        return [*self.norms, *(norm for scatter in self.scatters for norm in scatter.norms)]

    def sums(self) -> list[torch.Tensor]:
        """Return the gradients of this rank's rows."""
        return [p.parameter.grad for p in self.local.values() if p.parameter.grad is not None]

    def summed_names(self) -> list[str]:
        """Return the names of the parameters whose rows have a gradient."""
        return [name for name, p in self.local.items() if p.parameter.grad is not None]

    def _mark_used(self, name: str) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            self.fresh.add(name)

        return note


@torch.no_grad()  # a view with autograd history costs a seventh of a step of small blocks
def _to_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy_view_outputs(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Return outputs that are safe for in-place operations and that die with the pass.

    An in-place operation on a view would drop torch's hook that gathers for the backward pass, and
    gradients would be wrong. On a parameter (a tied head) such hooks would pile up pass by pass.
    """

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        if isinstance(leaf, nn.Parameter):
            return leaf.view_as(leaf)
        return leaf.clone() if leaf._is_view() else leaf

    return pytree.tree_map(own, outputs)


def _check_dtypes(program: Program) -> None:
    dtypes = {p.dtype for p in [*program.parameters.values(), *program.frozen.values()]}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise PlanError(
            f"layout.strategy = {program.plan.layout.strategy}: gathers parameters of one format, "
            f"the model has {names}; try: layout.strategy=zero2"
        )
