"""Planes between real processes: what arrives, where it listens, and who is named when it fails.

Functions that take a world run on its members, one island each. As a script

    python plane_case.py faults | links

it forks islands (torch is imported once) that die, stop or lose their link in the middle of an
exchange, and prints what the others say as JSON. Exit code 77: no network namespaces here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import netns
from shoal.base.errors import ShoalError
from shoal.fabric import World
from shoal.fabric.compressed.codecs import find_codec
from shoal.fabric.islands import compressed_all_reduce
from shoal.fabric.islands.inter_island_group import (
    CompressedExchange,
    InterIslandGroup,
    IslandLost,
    connect_islands,
    join_island_store,
)

DEADLINE_S, PATIENT_S = 20.0, 3.0
SMALL_CHUNK = 8192


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def joined(index: int, count: int, at: str, connections: int = 2) -> Iterator[InterIslandGroup]:
    store = join_island_store(at, index, count, deadline_s=DEADLINE_S)
    host = at.rpartition(":")[0]
    plane = connect_islands(
        store, "0", index, count, connections=connections, host=host, deadline_s=DEADLINE_S
    )
    yield plane
    plane.close()


class Raw:
    """Float bytes as they are, and products and sums rounded one by one; counts what it is asked."""

    gathers = False

    def __init__(self, dtype: torch.dtype = torch.float32, gathers: bool = False) -> None:
        self.name, self.dtype, self.gathers = "raw", dtype, gathers
        self.encoded = self.decoded = 0

    def size_bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def encode(self, numbers: Tensor, out: Tensor) -> None:
        self.encoded += 1
        out.copy_(numbers.view(torch.uint8))

    def decode(
        self, packed: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        self.decoded += 1
        numbers = packed.view(self.dtype) * weight
        out.copy_(out + numbers if add else numbers)


class Tags:
    """Feedback that keeps nothing but what it was asked for."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def encode(self, tag: str, codec: Any, numbers: Tensor, out: Tensor) -> None:
        assert tag not in self.seen
        self.seen[tag] = numbers.numel()
        codec.encode(numbers, out)


def message(island: int, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 + island)
    return torch.randn(elements, generator=generator, dtype=dtype)


def bits(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def both(
    plane: InterIslandGroup, flat: Tensor, codec: Any, weights: list[float], **other: Any
) -> Any:
    """(Arrived, sum) of one exchange."""
    named = {"feedback": None, "tag": "t", "deadline_s": DEADLINE_S, **other}
    arrived: CompressedExchange = plane.start_compressed_all_reduce(flat, codec, **named)
    total = arrived.finish(weights, sum(weights) or 1.0, deadline_s=named["deadline_s"])
    return arrived, total


def fixed_sum(messages: list[Tensor], weights: list[float]) -> Tensor:
    """Weighted mean in the order of the islands, each operation rounded."""
    total = messages[0] * weights[0]
    for one, weight in zip(messages[1:], weights[1:], strict=True):
        total = total + one * weight
    return total / sum(weights)


def sums(world: World, at: str) -> list[dict[str, Any]]:
    """Exchanges of many sizes, with our own plain codec and with the real plain one."""
    told = []
    weights = [float(3 + 2 * island) for island in range(world.size)]
    with joined(world.rank, world.size, at) as plane, small_chunks():
        for dtype in (torch.float32, torch.float64):
            for elements in (0, 1, 3, 100_001):
                for codec in (Raw(dtype), Raw(dtype, gathers=True), find_codec("none", dtype)):
                    messages = [message(i, elements, dtype) for i in range(world.size)]
                    arrived, total = both(plane, messages[world.rank], codec, weights)
                    gram = torch.tensor(
                        [
                            json.loads(one)
                            for one in plane.gather(
                                json.dumps(arrived.gram).encode(), deadline_s=DEADLINE_S
                            )
                        ],
                        dtype=torch.float64,
                    ).sum(0)
                    wide = torch.stack(messages).double()
                    told.append(
                        {
                            "elements": elements,
                            "equal": torch.equal(total, fixed_sum(messages, weights)),
                            "gram": float((gram - wide @ wide.T).abs().max()),
                            "finite": arrived.finite,
                        }
                    )
    return told


@contextmanager
def small_chunks() -> Iterator[None]:
    with mock.patch.object(compressed_all_reduce, "chunk_elements", return_value=SMALL_CHUNK):
        yield


def coded(world: World, at: str, name: str) -> dict[str, Any]:
    """A lossy codec: sums are the owner's code of the sum of codes, the same bits everywhere."""
    codec, elements = find_codec(name, torch.float32), 100_001
    weights = [1.0, 0.0, 2.0, 1.0][: world.size]
    tags = Tags()
    with joined(world.rank, world.size, at) as plane, small_chunks():
        before = plane.sent_bytes
        messages = [message(i, elements) for i in range(world.size)]
        messages[1][777] = float("nan")
        arrived, total = both(plane, messages[world.rank], codec, weights, feedback=tags, tag="3")
        sent = plane.sent_bytes - before
        finite = plane.gather(json.dumps(arrived.finite).encode(), deadline_s=DEADLINE_S)
        cut = compressed_all_reduce.ChunkLayout(
            elements, 1 if codec.gathers else world.size, SMALL_CHUNK
        )
        true = torch.empty(elements)
        theory = 0
        for owner in range(1 if codec.gathers else world.size):
            for chunk in range(cut.chunks):
                first, last = cut.piece(owner, chunk)
                part = fixed_sum(
                    [back(codec, messages[i][first:last]) for i in range(world.size) if weights[i]],
                    [weight for weight in weights if weight],
                )
                true[first:last] = part if codec.gathers else back(codec, part)
                size = codec.size_bytes(last - first)
                own = owner == world.rank
                theory += size * ((world.size - 1) if codec.gathers or own else 1)
    return {
        "bits": bits(total),
        "far": float((total - true).abs().max() / true.abs().max()),
        "finite": [all(json.loads(one)[i] for one in finite) for i in range(world.size)],
        "tags": tags.seen,
        "sent": sent,
        "theory": theory,
    }


def back(codec: Any, numbers: Tensor) -> Tensor:
    """What is left of numbers that were coded."""
    code = torch.empty(codec.size_bytes(numbers.numel()), dtype=torch.uint8)
    codec.encode(numbers.contiguous(), code)
    out = torch.empty_like(numbers)
    codec.decode(code, out)
    return out


def parts(world: World, at: str) -> dict[str, Any]:
    """Pairs of four islands, then other pairs, then all again; bytes of any length."""
    with joined(world.rank, world.size, at) as plane:
        told = []
        for pair in (
            (world.rank // 2 * 2, world.rank // 2 * 2 + 1),
            (world.rank % 2, world.rank % 2 + 2),
        ):
            part = plane.subgroup(pair)
            assert part is plane.subgroup(pair)
            _, total = both(part, message(world.rank, 5000), Raw(), [1.0, 1.0])
            told.append(torch.equal(total, fixed_sum([message(i, 5000) for i in pair], [1.0, 1.0])))
            said = part.gather(bytes([world.rank] * world.rank), deadline_s=DEADLINE_S)
            told.append(said == [bytes([i] * i) for i in pair])
        told.append(plane.subgroup(tuple(range(world.size))) is plane)
        said = plane.gather(b"x" * 100_000 * world.rank, deadline_s=DEADLINE_S)
        told.append([len(one) for one in said] == [100_000 * i for i in range(world.size)])
        counted = plane.sent_bytes > plane.links.sent_bytes
        keys = sorted(plane.links.store.list_keys())
    return {"right": told, "counted": counted, "keys": keys}


def listening(world: World, at: str) -> list[str]:
    """Addresses at which this process listens because of a plane, in hexadecimal."""
    before = listeners()
    with joined(world.rank, world.size, at):
        return sorted(listeners() - before)


def listeners() -> set[str]:
    """The kernel's table of this process's listening sockets."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        own.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                found.add(fields[1])
    return found


def refused(world: World, at: str, index: int, count: int, times: int = 1) -> str:
    """What rank 1 is told when it joins with such settings, or more than once."""
    store = None
    try:
        if world.rank == 0:
            store = join_island_store(at, 0, 2, deadline_s=PATIENT_S)
        for _ in range(times * world.rank):
            join_island_store(at, index, count, deadline_s=PATIENT_S)
    except ShoalError as failure:
        return f"{type(failure).__name__}: {failure}"
    finally:
        world.barrier()
        del store
    return ""


# Faults: each island is a fork of the script's process.

ISLANDS, CHUNKS, FAULT_DEADLINE_S = 3, 6, 3.0
Island = Callable[[int, InterIslandGroup], Any]


class Deadly(Raw):
    """Sends its process a signal when asked to code the n-th time."""

    def __init__(self, number: int, at: int) -> None:
        super().__init__()
        self.number, self.at = number, at

    def encode(self, numbers: Tensor, out: Tensor) -> None:
        super().encode(numbers, out)
        if self.encoded == self.at:
            os.kill(os.getpid(), self.number)


def fault(victim: int, number: int, half: int) -> Island:
    """Exchanges in which the victim ends itself after two chunks of a half."""

    def island(index: int, plane: InterIslandGroup) -> Any:
        codec: Any = Raw()
        if index == victim:
            codec = Deadly(number, 2 * ISLANDS if half == 1 else CHUNKS * ISLANDS + 2)
        flat = message(index, ISLANDS * CHUNKS * SMALL_CHUNK)
        weights, ahead = [1.0] * ISLANDS, {"deadline_s": FAULT_DEADLINE_S}
        return lost(plane, lambda: both(plane, flat, codec, weights, **ahead))

    return island


def late(index: int, plane: InterIslandGroup) -> Any:
    """Island 1 lives, but does not come."""
    if index == 1:
        time.sleep(2 * FAULT_DEADLINE_S)
        return None
    return lost(plane, lambda: plane.gather(b"", deadline_s=1.0))


def lost(plane: InterIslandGroup, work: Callable[[], Any]) -> Any:
    """What is said of a failure, how long that took, and what is said when asked again."""
    began_s = time.monotonic()
    try:
        work()
    except IslandLost as failure:
        took_s = time.monotonic() - began_s
        again = ""
        try:
            plane.gather(b"", deadline_s=1)
        except IslandLost as same:
            again = str(same)
        closing_s = time.monotonic()
        plane.close()
        return {
            "islands": failure.islands,
            "after_s": failure.after_s,
            "took_s": took_s,
            "said": str(failure),
            "again": again == str(failure),
            "close_s": time.monotonic() - closing_s,
        }
    return "nothing failed"


def run_islands(
    at: str, island: Island, net: netns.Net | None = None, count: int = ISLANDS
) -> list[Any]:
    """Fork islands, each with the reading end of what it answers."""
    fork = multiprocessing.get_context("fork")
    started = []
    for index in range(count):
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=be_island, args=(index, count, at, island, net, sender))
        process.start()
        sender.close()
        started.append((process, receiver))
    return started


def be_island(
    index: int, count: int, at: str, island: Island, net: netns.Net | None, answer: Any
) -> None:
    torch.set_num_threads(1)
    if net is not None:
        net.enter(index)
    chunks = small_chunks() if net is None else contextlib.nullcontext()
    with chunks, joined(index, count, at) as plane:
        answer.send(island(index, plane))


def collect(started: list[Any], until_s: float) -> list[Any]:
    """Answers by island; None of those that died, stopped or said nothing."""
    answers = []
    for _, receiver in started:
        try:
            ready = receiver.poll(max(0.0, until_s - time.monotonic()))
            answers.append(receiver.recv() if ready else None)
        except EOFError:
            answers.append(None)
    for process, _ in started:
        process.kill()
        process.join()
    return answers


def faults() -> dict[str, Any]:
    """All faults side by side."""
    cases: dict[str, Island] = {"late": late}
    for victim, name, half in [(1, "KILL", 1), (1, "KILL", 2), (2, "STOP", 1), (2, "STOP", 2),
                               (0, "KILL", 1), (0, "STOP", 2)]:  # fmt: skip
        number = getattr(signal, f"SIG{name}")
        cases[f"{name}-{victim}-{half}"] = fault(victim, number, half)
    running = {
        name: run_islands(f"127.0.0.1:{free_port()}", island) for name, island in cases.items()
    }
    until_s = time.monotonic() + DEADLINE_S
    told = {}
    for name, started in running.items():
        victim = 1 if name == "late" else int(name.split("-")[1])
        others = [one for index, one in enumerate(started) if index != victim]
        told[name] = collect(others, until_s)
        collect([started[victim]], 0.0)
    return told


def linked(elements: int) -> Island:
    """An undisturbed exchange, one with the link away for a while, one with the link gone."""

    def island(index: int, plane: InterIslandGroup) -> Any:
        codec, flat = find_codec("int8", torch.float32), message(index, elements)
        weights = [1.0] * ISLANDS
        plane.gather(b"", deadline_s=DEADLINE_S)
        payload, before = plane.sent_bytes, netns.counters()[1]
        digests = [bits(both(plane, flat, codec, weights)[1])]
        plane.gather(b"", deadline_s=DEADLINE_S)
        wire, payload = netns.counters()[1] - before, plane.sent_bytes - payload
        again = netns.sent_again()
        digests.append(bits(both(plane, flat, codec, weights)[1]))  # the link is away meanwhile
        again = netns.sent_again() - again
        gone = lost(
            plane, lambda: [both(plane, flat, codec, weights, deadline_s=2.0) for _ in range(200)]
        )
        told = {"wire": wire, "payload": payload, "digests": digests, "gone": gone}
        return {**told, "sent_again": again, "settings": netns.settings()}

    return island


def links() -> dict[str, Any]:
    """Three islands at 100 Mbit/s; the third one's link is cut, mended, and cut for good."""
    elements = 3_000_000
    with netns.Net(ISLANDS, 100) as net:
        started = run_islands(f"{net.addresses[0]}:29400", linked(elements), net)
        whole = find_codec("int8", torch.float32).size_bytes(elements) * 4 // 3
        # Bytes tell how far they are; a cut takes place in the middle of an exchange.
        sent_beyond(net, 1.5 * whole)
        net.cut(2)
        time.sleep(1.0)
        net.mend(2)
        sent_beyond(net, 2.5 * whole)
        net.cut(2)
        return {"told": collect(started, time.monotonic() + DEADLINE_S), "whole": whole}


def sent_beyond(net: netns.Net, size: float) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while net.sent_bytes(2) < size and time.monotonic() < until_s:
        time.sleep(0.01)


if __name__ == "__main__":
    try:
        print(json.dumps({"faults": faults, "links": links}[sys.argv[1]]()))
    except netns.Forbidden as refusal:
        sys.stderr.write(f"{refusal}\n")
        sys.exit(netns.FORBIDDEN)
