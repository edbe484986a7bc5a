"""Detection of dead links between machines, as distinct from peers that are slow.

A rank that waits for another rank cannot see why nothing arrives: gloo waits ten minutes. The
kernel can: it probes the other machine's kernel, which answers for a process that computes or
stands in a debugger. A dead link or a lost machine does not answer. So TCP keepalive probes every
connection that leaves this machine. A connection without an answer for LINK_S fails, in whatever
call waits for it. A link that recovers sooner has lost nothing.

Machines exchange everything by collectives, except files that one of them lacks:
`send_and_receive`.

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
"""Seconds that a link may be dead before its connection fails."""
ASK_S = 5
"""Seconds of silence before a connection is probed, and between two probes."""
PAIR_S = 120.0
"""Seconds to wait for a piece of a file: sender or receiver may wait for a disk."""
TAG = 7402
DEAD = re.compile(r"\[([^\]]+)\]:\d+: (?:Connection timed out|No route to host)")
"""Text of gloo's error after the kernel dropped a connection."""


def dead_link_text(text: str) -> str:
    """Return a sentence on the dead link that an error text reports; "" if it reports none.

    >>> dead_link_text("[pair.cc:537] Read error [10.0.0.2]:385: Connection timed out. This is")
    'nothing comes from 10.0.0.2 since 30 s: that machine, or the link to it, is down'
    >>> dead_link_text("Connection closed by peer [10.0.0.2]:385")
    ''
    """
    found = DEAD.search(text)
    if found is None:
        return ""
    return (
        f"nothing comes from {found[1]} since {LINK_S} s: that machine, or the link to it, is down"
    )


def enable_link_keepalive() -> int:
    """Enable TCP keepalive on this process's connections to other machines; return their number."""
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
            watched += _enable_keepalive(link)
    return watched


def _enable_keepalive(link: socket.socket) -> bool:
    """Enable keepalive on a socket that leaves this machine; return whether it does."""
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


def send_and_receive(
    group: dist.ProcessGroup | None,
    out: tuple[int, torch.Tensor] | None,
    into: tuple[int, torch.Tensor] | None,
    within_s: float = PAIR_S,
) -> None:
    """Send bytes to one rank while receiving bytes from another, so that a ring does not serialize.

    Args:
        group: a process group of all ranks for tensors in host memory.
        out, into: (rank, [bytes] uint8 in host memory); None: no transfer in this direction.

    Raises:
        ClusterError: a rank did not receive, or send, in time; the message names it.
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
