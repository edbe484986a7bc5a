"""Links between machines: how one that carries nothing is told from a peer that takes its time.

A rank that waits for another cannot see why nothing comes: gloo waits ten minutes. The kernel can:
it asks the other machine's kernel, which answers for a process that computes, or stands in a
debugger, but not over a dead link, and not for a machine that is gone. So every connection that
leaves this machine is asked about when it is silent, and one that nobody answers on for LINK_S
fails, in whatever call waits for it. A link that comes back sooner has lost nothing.

What machines tell each other is collective; a file that one of them lacks is not: `swap`.

Source   tcp(7): SO_KEEPALIVE, TCP_KEEPIDLE, TCP_USER_TIMEOUT (bytes that were sent and not taken)
Limits   Linux; connections of gloo and of stores. NCCL has its own watchdog
"""

from __future__ import annotations

import os
import re
import socket
import stat
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.base.errors import ClusterError
from shoal.fabric.rendezvous.rendezvous_store import is_loopback

LINK_S = 30
"""How long a link may carry nothing."""
ASK_S = 5
"""How long a connection is silent before it is asked about, and between two questions."""
PAIR_S = 120.0
"""How long a piece of a file is waited for: its sender, or its receiver, may wait for a disk."""
TAG = 7402
DEAD = re.compile(r"\[([^\]]+)\]:\d+: (?:Connection timed out|No route to host)")
"""What gloo says where the kernel gave a connection up."""


def dead_link(text: str) -> str:
    """What a failure says of a link that carries nothing, in words; "" where it says no such thing.

    >>> dead_link("[pair.cc:537] Read error [10.0.0.2]:385: Connection timed out. This is")
    'nothing comes from 10.0.0.2 since 30 s: that machine, or the link to it, is down'
    >>> dead_link("Connection closed by peer [10.0.0.2]:385")
    ''
    """
    found = DEAD.search(text)
    if found is None:
        return ""
    return (
        f"nothing comes from {found[1]} since {LINK_S} s: that machine, or the link to it, is down"
    )


def watch_links() -> int:
    """Have the kernel watch this process's connections to other machines; gives how many."""
    if not sys.platform.startswith("linux"):
        return 0
    watched = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            copy = os.dup(int(name))
        except OSError:  # the folder's own, or closed meanwhile
            continue
        with socket.socket(fileno=copy) as link:
            watched += _watch(link)
    return watched


def _watch(link: socket.socket) -> bool:
    """Whether a socket is a connection that leaves this machine; then it is watched."""
    try:
        if link.family not in (socket.AF_INET, socket.AF_INET6) or link.type != socket.SOCK_STREAM:
            return False
        here, there = str(link.getsockname()[0]), str(link.getpeername()[0])
        if here == there or is_loopback(there.removeprefix("::ffff:")):
            return False
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LINK_S // ASK_S - 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LINK_S)
    except OSError:  # it listens, or has ended
        return False
    return True


def swap(
    group: dist.ProcessGroup | None,
    out: tuple[int, torch.Tensor] | None,
    into: tuple[int, torch.Tensor] | None,
    within_s: float = PAIR_S,
) -> None:
    """Send bytes to a rank and take bytes of a rank, both at once: a ring does not wait in turn.

    Args:
        group: of all ranks, which carries what lies in host memory.
        out, into: (rank, [bytes] uint8 in host memory); None: nothing that way.

    Raises:
        ClusterError: naming the rank that did not take, or send, within the time.
    """
    works = []
    if out is not None:
        to, sent = out
        works.append((to, dist.isend(sent, group=group, group_dst=to, tag=TAG)))
    if into is not None:
        source, room = into
        works.append((source, dist.irecv(room, group=group, group_src=source, tag=TAG)))
    for peer, work in works:
        try:
            if work is not None:
                work.wait(timedelta(seconds=within_s))
        except RuntimeError as failure:
            raise ClusterError(
                f"rank {dist.get_rank(group)}: no bytes pass between it and rank {peer} within "
                f"{within_s:g} s: {failure}"
            ) from failure
