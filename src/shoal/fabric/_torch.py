"""Private, changed or early-import names of torch, in one file; tested on torch 2.13."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# 2.13 renamed `all_gather_into_tensor`; the old name still works there but warns at every use.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

storage_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""Count of references to a storage, by its address; None where torch lacks it."""
storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")

# Imported here for its side effect: its functions have the default group as default ARGUMENT,
# taken at import. Imported later (torch itself does, from many places) it would hold the process
# group for ever; gloo's threads then outlive `destroy_process_group` and may abort the exit of
# the interpreter ("terminate called without an active exception"; docs/lab-log.md).
importlib.import_module("torch.distributed.nn.functional")


def fused_optimizer_devices() -> list[str]:
    """Return the device types for which torch's optimizers have a fused kernel."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return list(_get_fused_kernels_supported_devices())


KNOCK = 1
"""Tag of messages that no rank receives; collectives use other tags."""


def create_gloo_group(
    store: dist.Store,
    index: int,
    count: int,
    *,
    address: str,
    threads: int,
    timeout: timedelta,
) -> dist.ProcessGroupGloo:
    """Create a gloo group beside the default one; each of its `count` members must call it.

    Args:
        store: the store that this group alone uses.
        address: the one address of this machine on which the group listens.
        threads: exchanges that the group runs at a time.
        timeout: time limit for connecting.

    Raises:
        RuntimeError: the members do not connect in time.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._threads = threads
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, index, count, options)


def start_uneven_all_to_all(
    group: dist.ProcessGroupGloo,
    received: torch.Tensor,
    sent: torch.Tensor,
    *,
    of: Sequence[int],
    to: Sequence[int],
    timeout: timedelta,
) -> dist.Work:
    """Start an all-to-all of unequal parts: `to[i]` elements to member i, `of[i]` from it.

    Raises:
        RuntimeError: the group is broken.
    """
    options = dist.AllToAllOptions()
    options.timeout = timeout
    work: dist.Work = group.alltoall_base(  # type: ignore[attr-defined]
        received, sent, list(of), list(to), options
    )
    return work


def post_unreceived_byte(group: dist.ProcessGroupGloo, member: int) -> None:
    """Announce a byte that no member receives; a closed connection makes this fail at once.

    Raises:
        RuntimeError: the connection is closed.
    """
    group.send([torch.zeros(1, dtype=torch.uint8)], member, KNOCK)  # type: ignore[attr-defined]


def drop_mesh_groups(mesh: DeviceMesh) -> None:
    """Remove the process groups that a DeviceMesh lists, so that Python can free them.

    DTensor caches sharding decisions by DTensorSpec, in C++ and for ever. A DTensorSpec refers to
    its mesh, and since torch 2.13 the mesh refers to its groups. Python's garbage collector does
    not see that chain.
    """
    for one in (mesh, getattr(mesh, "_root_mesh", None)):
        getattr(one, "_pg_registry", {}).clear()


def clone_store_connection(store: dist.Store) -> dist.Store:
    """Return the same store over a connection that no other thread uses."""
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]
    return clone


def get_default_store() -> dist.Store:
    """Return the store of the default process group, also if other code initialized that group."""
    return dist.distributed_c10d._get_default_store()
