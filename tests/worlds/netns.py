"""Islands on one machine with real links: network namespaces on a bridge, each at a shaped rate.

    hub            holds the bridge, and one port per island
    island k       has `eth0`, 10.77.0.(k + 1), the other end of its port, and loopback
    rate           a token bucket (tc tbf) on `eth0` shapes what an island sends, one on its port
                   shapes what it receives; the bucket holds BURST_BYTES

Each namespace is held by a process that reads from a pipe of this one, so nothing is left when this
process dies, however it dies. Needs root, `ip` and `tc` (iproute2), `unshare` and `nsenter`
(util-linux); where a machine forbids it, `Forbidden` says why.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

FORBIDDEN = 77
"""Exit code of a script on a machine that makes no namespaces; the reason is on its stderr."""
CLONE_NEWNET = 0x40000000
BURST_BYTES, QUEUE_MS = 256 * 1024, 200
START_S, COMMAND_S = 5.0, 10.0
SIOCETHTOOL = 0x8946
OFFLOADS = {"tso": 0x1E, "gso": 0x23, "gro": 0x2B, "checksum": 0x16}
"""ETHTOOL_GTSO, _GGSO, _GGRO, _GTXCSUM of linux/ethtool.h."""


class Forbidden(Exception):
    """This machine makes no such namespaces."""


class Net:
    """`count` islands whose links carry `rate_mbit` Mbit/s in each direction; 0: as fast as can be."""

    def __init__(self, count: int, rate_mbit: float = 0) -> None:
        for tool in ("ip", "tc", "unshare", "nsenter"):
            if shutil.which(tool) is None:
                raise Forbidden(f"`{tool}` is missing (apt-get install iproute2 util-linux)")
        self.rate_mbit = rate_mbit
        self.holders: list[subprocess.Popen[bytes]] = []
        self.addresses = [f"10.77.0.{island + 1}" for island in range(count)]
        try:
            self.hub = self._hold()
            self._command(self.hub, "ip link add bridge type bridge")
            self._command(self.hub, "ip link set bridge up")
            self.islands = [self._island(number) for number in range(count)]
        except (OSError, subprocess.SubprocessError, Forbidden) as refusal:
            self.close()
            said = getattr(refusal, "stderr", None)
            raise Forbidden(said.decode().strip() if said else str(refusal)) from refusal

    def __enter__(self) -> Net:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def inside(self, island: int) -> list[str]:
        """What to put before a command so that it runs on an island."""
        return ["nsenter", f"--net={self.path(island)}"]

    def path(self, island: int) -> str:
        """The file by which a process comes to an island."""
        return f"/proc/{self.islands[island]}/ns/net"

    def enter(self, island: int) -> None:
        """Take this process, which has one thread, to an island."""
        with Path(self.path(island)).open() as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def cut(self, island: int) -> None:
        """The link of an island goes down: nothing arrives there or leaves it."""
        self._command(self.hub, f"ip link set port{island} down")

    def mend(self, island: int) -> None:
        """The link comes up again."""
        self._command(self.hub, f"ip link set port{island} up")

    def sent_bytes(self, island: int) -> int:
        """Bytes that have left an island, as its interface counts them, headers included."""
        return counters(Path(f"/proc/{self.islands[island]}/net/dev"))[1]

    def received_bytes(self, island: int) -> int:
        """Bytes that have come to an island."""
        return counters(Path(f"/proc/{self.islands[island]}/net/dev"))[0]

    def close(self) -> None:
        """Let go of the namespaces; they end when the last process in them does."""
        for holder in self.holders:
            holder.kill()
            holder.wait()

    def _hold(self) -> int:
        """The process id of a new namespace's holder."""
        holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
        self.holders.append(holder)
        own, until_s = os.readlink("/proc/self/ns/net"), time.monotonic() + START_S
        while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
            if holder.poll() is not None or time.monotonic() > until_s:
                raise Forbidden("unshare --net makes no network namespace here")
            time.sleep(0.005)
        return holder.pid

    def _island(self, number: int) -> int:
        island = self._hold()
        peer = f"type veth peer name eth0 netns {island}"
        self._command(self.hub, f"ip link add port{number} {peer}")
        self._command(self.hub, f"ip link set port{number} master bridge up")
        self._command(island, f"ip address add {self.addresses[number]}/24 dev eth0")
        self._command(island, "ip link set lo up")
        self._command(island, "ip link set eth0 up")
        if self.rate_mbit:
            shape = f"root tbf rate {self.rate_mbit}mbit burst {BURST_BYTES} latency {QUEUE_MS}ms"
            self._command(island, f"tc qdisc add dev eth0 {shape}")
            self._command(self.hub, f"tc qdisc add dev port{number} {shape}")
        return island

    def _command(self, namespace: int, command: str) -> None:
        subprocess.run(
            ["nsenter", f"--net=/proc/{namespace}/ns/net", *command.split()],
            check=True,
            capture_output=True,
            timeout=COMMAND_S,
        )


def skip(what: str, why: str) -> NoReturn:
    """Skip a test, said aloud: `what` was not tested, because this machine makes no namespaces."""
    import pytest  # scripts that run in namespaces have no use for it

    reason = f"{what}: no network namespaces: {why}"
    warnings.warn(reason, stacklevel=2)
    pytest.skip(reason)


def told_by(script: str, *arguments: str, what: str, deadline_s: float) -> Any:
    """The JSON that a script beside this file prints; skips the test where namespaces are forbidden.

    what   as `skip` says it: "links between islands NOT TESTED"
    """
    from forks import shared  # scripts that run in namespaces start nothing

    path = str(Path(__file__).parent / script)
    done = shared().run(path, *arguments, timeout=deadline_s)
    if done.returncode == FORBIDDEN:
        skip(what, done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def counters(table: Path = Path("/proc/self/net/dev"), interface: str = "eth0") -> tuple[int, int]:
    """(received, sent) bytes of an interface in one of the kernel's tables."""
    line = next(one for one in table.read_text().splitlines() if f"{interface}:" in one)
    fields = line.split(":")[1].split()
    return int(fields[0]), int(fields[8])


def sent_again(table: Path = Path("/proc/self/net/snmp")) -> int:
    """TCP segments that this process's namespace had to send a second time."""
    names, numbers = (line.split() for line in table.read_text().splitlines() if "Tcp:" in line)
    return int(numbers[names.index("RetransSegs")])


def settings(interface: str = "eth0") -> dict[str, Any]:
    """MTU and offloads of an interface of this process's namespace.

    With segmentation offload a packet of up to 64 KiB crosses the link whole: its headers count
    once, where a wire would carry them once per MTU.
    """
    told: dict[str, Any] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        name = interface.encode()
        told["mtu"] = struct.unpack(
            "16si12x", fcntl.ioctl(handle, 0x8921, struct.pack("16si12x", name, 0))
        )[1]
        for offload, command in OFFLOADS.items():
            value = ctypes.create_string_buffer(struct.pack("II", command, 0), 8)
            fcntl.ioctl(handle, SIOCETHTOOL, struct.pack("16sP8x", name, ctypes.addressof(value)))
            told[offload] = bool(struct.unpack("II", value.raw)[1])
    return told
