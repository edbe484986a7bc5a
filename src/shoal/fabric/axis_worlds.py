"""Sub-worlds along the axes of a layout: the ranks that differ on these axes only.

With axes pp 2 × dp 2 × tp 2, rank = (pp · 2 + dp) · 2 + tp: ranks 0 and 1 split layers among
themselves (tp), 0 and 2 hold the same part of the model (dp), 0 and 4 are two stages of one
pipeline (pp). A part is a `World`, so whatever works on all ranks works on a part, unchanged.

Every rank must make the same parts in the same order, also those it is not in: that is how process
groups are made. `World` caches its parts, so a second call creates no group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shoal.base.errors import BugError
from shoal.fabric.collectives.json_messages import authenticate_peers
from shoal.fabric.collectives.traffic_counts import WORLD
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.fabric.world import COLLECTIVE_TIMEOUT, World


def list_axis_groups(degrees: Mapping[str, int], names: Sequence[str]) -> list[tuple[int, ...]]:
    """List the ranks of every sub-world in which only the named axes differ, in ascending order.

    Args:
        degrees: of all axes, outermost first; the last one's neighbours have consecutive ranks.

    >>> list_axis_groups({"pp": 2, "dp": 2, "tp": 2}, ["tp"])
    [(0, 1), (2, 3), (4, 5), (6, 7)]
    >>> list_axis_groups({"pp": 2, "dp": 2, "tp": 2}, ["pp", "tp"])
    [(0, 1, 4, 5), (2, 3, 6, 7)]
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*(range(n) for n in degrees.values()))):
        others = tuple(p for p, axis in zip(place, degrees, strict=True) if axis not in names)
        found.setdefault(others, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def name_axes(ranks: Sequence[int], degrees: Mapping[str, int]) -> str:
    """Return the axes along which ranks differ, joined by "+"; "" if there are none.

    Args:
        ranks: of a group.
        degrees: of all axes, outermost first.

    >>> degrees = {"pp": 2, "dp_shard": 2, "tp": 2}
    >>> [name_axes(ranks, degrees) for ranks in ((0, 1), (0, 2), (1, 3, 5, 7), (4,))]
    ['tp', 'dp_shard', 'pp+dp_shard', '']
    """
    stride, found = 1, list[str]()
    for axis, degree in reversed(list(degrees.items())):
        if len({rank // stride % degree for rank in ranks}) > 1:
            found.append(axis)
        stride *= degree
    return "+".join(reversed(found))


def label_axes(world: World, degrees: Mapping[str, int]) -> None:
    """Set the axis under which the traffic of a world, and of each of its parts, is counted.

    Args:
        world: of all processes.
        degrees: of the layout that runs next, outermost first; a later call replaces an earlier.
    """
    world.degrees = dict(degrees)
    several = sum(degree > 1 for degree in degrees.values()) > 1
    world.axis = WORLD if several else name_axes(world.ranks, degrees) or WORLD
    for ranks, part in world.parts.items():
        part.axis = name_axes(ranks, degrees) or WORLD


def axis_world(world: World, degrees: Mapping[str, int], names: Sequence[str]) -> World:
    """Return this rank's part of `world`: the ranks that differ along the named axes only.

    The part is a World. A collective: every rank must call it with the same arguments, since it
    creates process groups. The first result is cached.

    Args:
        world: of all processes.
        degrees: of all axes, outermost first.

    Raises:
        BugError: the product of the degrees is not `world.size`.
    """
    if math.prod(degrees.values()) != world.size:
        raise BugError(f"axes {dict(degrees)} do not make {world.size} ranks")
    return partition_world(world, list_axis_groups(degrees, names))


def partition_world(world: World, parts: Sequence[tuple[int, ...]]) -> World:
    """Return the part that contains this rank, as a World; a rank in no part gets itself alone.

    A collective: every rank passes the same `parts` in the same order, since each becomes a process
    group. The first result is cached. A part of all ranks is `world` itself.

    Args:
        world: of all processes: torch lets a group be made by all of them together only.
        parts: ranks of each part; they do not overlap.
    """
    own = world
    for ranks in parts:
        part = _make_part_world(world, tuple(ranks))
        if world.rank in ranks:
            own = part
    if not any(world.rank in ranks for ranks in parts):
        own = _make_part_world(world, (world.rank,))
    return own


def _make_part_world(world: World, ranks: tuple[int, ...]) -> World:
    if len(ranks) == world.size:
        return world
    if ranks not in world.parts:
        group = None
        if len(ranks) > 1 and world.group is not None:
            group = dist.new_group(list(ranks), COLLECTIVE_TIMEOUT, world.backend)
            if world.rank in ranks:
                authenticate_peers(group, ranks, world.key)
        place = ranks.index(world.rank) if world.rank in ranks else 0
        part = World(
            ProcessInfo(place, len(ranks), world.local_rank, world.local_size, world.started_by),
            world.device,
            group if world.rank in ranks else None,
            store=world.store,
        )
        part.ranks, part.backend = ranks, world.backend
        part.traffic, part.key = world.traffic, world.key
        part.axis = name_axes(ranks, world.degrees) or WORLD
        world.parts[ranks] = part
    return world.parts[ranks]


def build_device_mesh(world: World, degrees: Mapping[str, int], names: Sequence[str]) -> DeviceMesh:
    """Return torch's DeviceMesh of this rank's part of `world` along the named axes.

    The axes of the mesh are `names`, outermost first. A collective: every rank must call it with
    the same arguments. `world` caches the mesh and its groups.

    Args:
        degrees: of all axes, outermost first; their product is `world.size`.
    """
    key = (tuple(degrees.items()), tuple(names))
    if key not in world.meshes:
        parts = [axis_world(world, degrees, [name]) for name in names]
        # Any: torch's signature requires existing groups, either several or one.
        groups: Any = [part.group for part in parts]
        shape = [degrees[name] for name in names]
        ranks = torch.tensor(axis_world(world, degrees, names).ranks).view(shape)
        world.meshes[key] = DeviceMesh.from_group(
            groups if len(names) > 1 else groups[0],
            world.device.type,
            mesh=ranks if len(names) > 1 else None,
            mesh_dim_names=tuple(names),
        )
    return world.meshes[key]
