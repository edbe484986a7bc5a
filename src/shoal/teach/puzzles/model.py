"""Rules of the LLM-Training-Puzzles: a rank's operations on weights, activations and gradients.

A program is `async def program(m: Model)`, the same for every rank. It owns nothing but five stores
(weights, states, activations, grads, weight_grads) and names each tensor by key, so that the memory
count is complete:

    load, input       before the first event; a batch's input may be fetched once
    forward, backward need the whole weight; a layer's input and its gradient for the same batches
    update            needs the gradient of ALL batches, shards that cover the weight's
    all_reduce, reduce_scatter, all_gather   all ranks meet · send, receive  one to one
    free              the only way to hold less

Every call becomes operations of the event engine, which times them (PuzzleCosts)
and samples memory. teach/puzzles/puzzle_world.py runs the ranks side by side and checks the result.

Sizes are in numbers, hidden 512 and length 256: a weight, its state and its gradient 512 · 512
(a shard its part), an activation or its gradient 512 · 256 per batch element.
Source of the rules: github.com/srush/LLM-Training-Puzzles (MIT), by Sasha Rush.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Hashable, Iterable
from dataclasses import dataclass, replace

from shoal.base.errors import PlanError
from shoal.teach.engine import Op

HIDDEN, LENGTH = 512, 256
STORES = ("weights", "states", "activations", "grads", "weight_grads")
Program = Callable[["PuzzleRank"], Awaitable[None]]


@dataclass(frozen=True)
class StoreEntry:
    """One entry of a store. Activations have batches, weights have shards, gradients have both.

    `layer` of an activation is the layer that reads it; of its gradient, the layer that made it.
    """

    store: str
    layer: int
    batches: frozenset[int] = frozenset()
    shards: frozenset[int] = frozenset([0])
    total: int = 1
    step: int = 0

    @property
    def size(self) -> float:
        """Return the number of elements held.

        >>> (
        ...     StoreEntry("activations", 0, frozenset([1, 2])).size,
        ...     StoreEntry("weights", 0, total=4).size,
        ... )
        (262144, 65536.0)
        """
        if self.store in ("activations", "grads"):
            return len(self.batches) * HIDDEN * LENGTH
        return len(self.shards) / self.total * HIDDEN * HIDDEN

    @property
    def whole(self) -> bool:
        """Return whether all shards are here."""
        return len(self.shards) == self.total


@dataclass
class RankRequest:
    """Request of a program to the world: awaiting it pauses the program until the answer."""

    what: str
    rank: int
    thing: StoreEntry | None = None
    peer: int = -1
    answer: StoreEntry | None = None

    def __await__(self) -> Generator[RankRequest, None, StoreEntry]:
        yield self
        if self.answer is None:
            raise PlanError(f"puzzle: rank {self.rank} was woken without an answer to {self.what}")
        return self.answer


class PuzzleRank:
    """One rank of a puzzle; methods are the rules, `ops` the operations for the engine."""

    def __init__(self, rank: int, ranks: int, layers: int, batches: int):
        self.rank, self.ranks, self.layers, self.batches = rank, ranks, layers, batches
        self.stores: dict[str, dict[Hashable, StoreEntry]] = {name: {} for name in STORES}
        self.ops: list[Op] = []
        self._serial: dict[tuple[str, Hashable], int] = {}
        self._fetched: set[int] = set()
        self._started = False
        self._count = 0

    # Held entries.

    def free(self, store: str, *keys: Hashable) -> None:
        """Drop entries of a store."""
        for key in keys:
            self._find_entry(store, key)
            del self.stores[store][key]
            self.ops.append(Op("free", key=(store, key, self._serial[store, key])))

    def _store_entry(self, key: Hashable, thing: StoreEntry) -> None:
        """Store under a key; an old entry is freed after the new one is allocated."""
        name = thing.store, key
        old = self._serial.get(name, -1)
        held = key in self.stores[thing.store]
        self._serial[name] = old + 1
        self.stores[thing.store][key] = thing
        self.ops.append(Op("allocate", key=(*name, old + 1), amount=thing.size, part=thing.store))
        if held:
            self.ops.append(Op("free", key=(*name, old)))

    def _find_entry(self, store: str, key: Hashable) -> StoreEntry:
        if key not in self.stores[store]:
            raise PlanError(f"puzzle: rank {self.rank} holds no {store}[{key}]")
        return self.stores[store][key]

    def _require(self, right: bool, what: str) -> None:
        if not right:
            raise PlanError(f"puzzle: rank {self.rank}: {what}")

    def _add_event(self, kind: str, what: str, label: str, amount: float = 0.0) -> None:
        self._started = True
        self.ops.append(Op(kind, what, label, amount=amount))

    def load(self, layer: int, key: Hashable = None, shard: int = 0, total: int = 1) -> None:
        """Load weight and optimizer state of a layer, or one shard, before the first event."""
        self._require(not self._started, f"weights of layer {layer} are loaded after the start")
        place = layer if key is None else key
        for store in ("weights", "states"):
            self._store_entry(
                place, StoreEntry(store, layer, shards=frozenset([shard]), total=total)
            )

    def input(self, batches: Iterable[int], key: Hashable) -> None:
        """Fetch the input of these batch elements; each once."""
        wanted = frozenset(batches)
        self._require(not wanted & self._fetched, f"input {sorted(wanted)} is fetched twice")
        self._require(max(wanted) < self.batches, f"input {sorted(wanted)}: batches end before")
        self._fetched |= wanted
        self._store_entry(key, StoreEntry("activations", 0, wanted))

    def empty(self, layer: int, key: Hashable) -> None:
        """Make a gradient of no batch at all, for ranks that join a reduction with nothing."""
        self._store_entry(key, StoreEntry("weight_grads", layer))

    # Computation.

    def forward(self, layer: int, inp: Hashable, out: Hashable, weight: Hashable) -> None:
        """Compute the activation of layer + 1 from that of layer."""
        x, w = self._find_entry("activations", inp), self._find_entry("weights", weight)
        self._add_event("compute", "forward", f"F{layer}", len(x.batches))
        self._require(
            w.whole and w.layer == layer, f"forward of layer {layer} lacks its whole weight"
        )
        self._require(x.layer == layer, f"forward of layer {layer} got the input of {x.layer}")
        self._store_entry(out, replace(x, layer=layer + 1))

    def loss(self, inp: Hashable, out: Hashable) -> None:
        """Compute the gradient of the last activation."""
        x = self._find_entry("activations", inp)
        self._add_event("compute", "loss", "loss")
        self._require(x.layer == self.layers, f"the loss reads layer {x.layer}, not the last")
        self._store_entry(out, StoreEntry("grads", self.layers - 1, x.batches))

    def backward(
        self, layer: int, inp: Hashable, grad: Hashable, out: Hashable, made: Hashable,
        weight: Hashable,
    ) -> None:  # fmt: skip
        """Compute the gradient of the layer's input under `out`, of its weight under `made`."""
        x, w = self._find_entry("activations", inp), self._find_entry("weights", weight)
        g = self._find_entry("grads", grad)
        self._add_event("compute", "backward", f"B{layer}", len(x.batches))
        lacks = f"backward of layer {layer}"
        self._require(w.whole and w.layer == layer, f"{lacks} lacks its whole weight")
        self._require(x.layer == layer and g.layer == layer, f"{lacks} got {x.layer} and {g.layer}")
        self._require(x.batches == g.batches, f"{lacks}: input and gradient of different batches")
        self._store_entry(made, StoreEntry("weight_grads", layer, x.batches))
        self._store_entry(out, replace(g, layer=layer - 1))

    def add(self, key: Hashable, other: Hashable) -> None:
        """Add weight_grads[other] to weight_grads[key] in place; `other` stays until freed."""
        a, b = self._find_entry("weight_grads", key), self._find_entry("weight_grads", other)
        self._require(
            (a.layer, a.shards, a.total) == (b.layer, b.shards, b.total),
            f"gradients {key} and {other} are not of the same shard",
        )
        self.stores["weight_grads"][key] = replace(a, batches=a.batches | b.batches)

    def rename(self, store: str, old: Hashable, new: Hashable) -> None:
        """Move an entry to another key; costs nothing."""
        thing = self._find_entry(store, old)
        self._require(new not in self.stores[store], f"{store}[{new}] exists")
        self._store_entry(new, thing)
        self.free(store, old)

    def update(self, layer: int, grad: Hashable, weight: Hashable, out: Hashable = None) -> None:
        """Take one optimizer step, in place or under another key (the old entries stay too)."""
        g, w, s = (
            self._find_entry("weight_grads", grad), self._find_entry("weights", weight),
            self._find_entry("states", weight),
        )  # fmt: skip
        says = f"update of layer {layer}"
        self._require(
            g.layer == layer == w.layer, f"{says} got gradient {g.layer}, weight {w.layer}"
        )
        missing = sorted(set(range(self.batches)) - g.batches)
        self._require(not missing, f"{says} lacks the gradients of batches {missing}")
        covers = g.total == 1 or (g.total == w.total and w.shards <= g.shards)
        self._require(covers and s.shards == w.shards, f"{says}: shards do not match")
        self._require(w.step == s.step, f"{says}: weight at step {w.step}, state at {s.step}")
        self._add_event("compute", "update", f"U{layer}")
        for thing in (w, s):
            new = replace(thing, step=thing.step + 1)
            if out is None:
                self.stores[new.store][weight] = new
            else:
                self._store_entry(out, new)

    # Communication.

    async def all_reduce(self, key: Hashable) -> None:
        """All-reduce a gradient: the sum over ranks replaces it."""
        self._store_entry(
            key, await self._meet("all-reduce", self._find_entry("weight_grads", key))
        )

    async def reduce_scatter(self, key: Hashable) -> None:
        """Reduce-scatter a gradient: this rank's shard of the sum replaces it."""
        mine = self._find_entry("weight_grads", key)
        self._require(mine.whole, "reduce-scatter of a shard")
        total = await self._meet("reduce-scatter", mine)
        self._store_entry(key, replace(total, shards=frozenset([self.rank]), total=self.ranks))

    async def all_gather(self, key: Hashable, out: Hashable) -> None:
        """All-gather the shards of all ranks into a whole entry under another key."""
        self._store_entry(out, await self._meet("all-gather", self._find_entry("weights", key)))

    async def _meet(self, what: str, thing: StoreEntry) -> StoreEntry:
        self._started = True
        label = f"{'G' if what == 'all-gather' else 'R'}{thing.layer}"
        meeting = ("meet", self._count)
        self._count += 1
        self.ops.append(
            Op("collective", what, label, meeting, range(self.ranks), amount=thing.size)
        )
        return await RankRequest(what, self.rank, thing)

    def _message_number(self, way: str, peer: int) -> int:
        """Return the number of earlier messages to or from `peer`, and count this one."""
        number = self._serial.get((way, peer), 0)
        self._serial[way, peer] = number + 1
        return number

    async def send(self, peer: int, store: str, key: Hashable) -> None:
        """Send a copy to another rank."""
        self._started = True
        thing = self._find_entry(store, key)
        place = (self.rank, peer, self._message_number("to", peer))
        self.ops.append(Op("send", "send", f"to {peer}", place, peer=peer, amount=thing.size))
        await RankRequest("send", self.rank, thing, peer)

    async def receive(self, peer: int, key: Hashable) -> None:
        """Receive the next message of a rank; it goes to the store of its kind."""
        self._started = True
        thing = await RankRequest("receive", self.rank, None, peer)
        place = (peer, self.rank, self._message_number("from", peer))
        self.ops.append(Op("receive", "receive", f"from {peer}", place, peer=peer))
        self._store_entry(key, thing)
