"""Common state of all islands of a run, as one process of one island holds and saves it.

Merged weights, the outer optimizer's state, past norms and the dealing of samples are equal on all
islands after every commit. The checkpoints of every island hold them, with its own model and
optimizer, and with its own error feedback.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shoal.base.plans.tensor_shards import Shard
from shoal.checkpoint.format.manifest import Manifest
from shoal.islands.admission import AdmissionTest, RefusalCounter
from shoal.islands.error_feedback_files import IslandErrorFeedback
from shoal.islands.outer_optimizer import OuterState
from shoal.islands.sample_ranges import SampleRange, SampleStream
from shoal.parallel.program import Part
from shoal.trainer.islands.owner_states import OwnerStates

OUTER = "outer."


@dataclass
class CommonState:
    """State that all islands of a run share, as one process of one island holds it; checkpointed.

    Attributes:
        round: rounds committed so far.
        digest: of W and u after the last of them.
        stream: the samples that no island has been dealt yet.
        dealt: samples of each island's next round.
        underway: samples on which each island has trained since its last message; the next message
            covers them.
        since: tokens behind each fragment's next message; per island, but saved with the rest.
        index: of this island.
        own: the loaded state is this island's own, so `since` holds.
        failures: rounds in a row that were discarded.
        refusals: of each island, in a row.
        left: error feedback of this island's codec; per island, but saved with the rest.
        dropped: a line about error feedback in a checkpoint that fits no more.
        kept: the record as of the end of the last round; see `keep`.
        owners: state of the owners that this group of processes trains; None: islands share a
            stream of samples.
        positions, held: of all owners: samples that each has used, and that each has.
        members: JSON of the committed turn, if islands come and go: who merged, and who is next.
        merged_parts: returns the outer weights in the parts of the layout, a collective of the
            ranks, if `outer` has canonical units. Then a checkpoint has the same slices of them as
            of the model, and a copy of it fetches them once.
    """

    outer: OuterState
    admission: tuple[AdmissionTest, ...]
    refusals: RefusalCounter
    shards: Mapping[str, Shard]
    count: int
    stream: SampleStream
    left: IslandErrorFeedback
    dealt: list[tuple[SampleRange, ...]] = field(default_factory=list)
    underway: list[tuple[SampleRange, ...]] = field(default_factory=list)
    since: list[int] = field(default_factory=list)
    index: int = 0
    own: bool = True
    round: int = 0
    digest: str = ""
    failures: int = 0
    dropped: str = ""
    kept: dict[str, Any] | None = None
    owners: OwnerStates | None = None
    positions: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    members: Any = None
    merged_parts: Callable[[], Mapping[str, Part]] | None = None

    def parts(self) -> dict[str, Part]:
        """Return outer weights and state, sharded as the parameters are, and the error feedback."""
        found: dict[str, Part] = dict(self.left.parts())
        if self.owners is not None:
            found |= self.owners.parts()
        merged = {} if self.merged_parts is None else self.merged_parts()
        for name, (tensor, shard) in merged.items():
            found[OUTER + name] = (tensor, replace(shard, name=OUTER + name))
        for name, tensor in self.outer.tensors().items():
            if self.merged_parts is not None and name in self.outer.weights:
                continue
            owner, kept = self._owner(name), OUTER + name
            dtype = str(tensor.dtype).removeprefix("torch.")
            if tensor.shape == self.outer.weights[owner].shape:
                found[kept] = (tensor, replace(self.shards[owner], name=kept, dtype=dtype))
            else:
                found[kept] = (tensor, Shard.whole(kept, tuple(tensor.shape), dtype))
        return found

    def keep(self) -> None:
        """Fix the record at the end of a round: checkpoints hold it until the next round ends.

        A save may come after discarded rounds. They changed no merged weights, but dealt samples
        and counted failures, which the others' checkpoints of the same round do not contain. Only
        `since` is saved as it is: it is zero by then.
        """
        self.kept = None
        self.kept = copy.deepcopy(self.record())

    def record(self) -> dict[str, Any]:
        """Return the JSON values of the state, as of the end of the last round."""
        found: dict[str, Any] = self.kept or {
            "islands": {
                "index": self.index,
                "round": self.round,
                "digest": self.digest,
                "count": self.count,
                "stream": self.stream.to_json(),
                "dealt": _encode_spans(self.dealt),
                "underway": _encode_spans(self.underway),
                "admission": [one.state() for one in self.admission],
                "failures": self.failures,
                "refusals": self.refusals.state(),
                "left": self.left.record(),
                **({"positions": self.positions, "held": self.held} if self.owners else {}),
                **({"members": self.members} if self.members else {}),
            }
        }
        return {"islands": {**found["islands"], "since": list(self.since)}}

    def list_wanted_shards(self, manifest: Manifest) -> list[Shard]:
        """Return this rank's shards of a checkpoint's outer tensors, and its error feedback."""
        if "islands" not in manifest.record:
            return []
        kept = manifest.record["islands"].get("left")
        found = [
            Shard.whole(name, tuple(manifest.tensors[name].shape), manifest.tensors[name].dtype)
            for name in self.left.select_own_tensors(manifest.tensors, kept)
        ]
        if self.owners is not None:
            found += self.owners.list_wanted_shards(manifest)
        for full, stored in manifest.tensors.items():
            if not full.startswith(OUTER):
                continue
            owner = self._owner(full.removeprefix(OUTER))
            if not owner:
                continue  # on another stage of a pipeline
            if tuple(stored.shape) == self.shards[owner].global_shape:
                found.append(replace(self.shards[owner], name=full, dtype=stored.dtype))
            else:
                found.append(Shard.whole(full, tuple(stored.shape), stored.dtype))
        return [shard for shard in found if shard.slices]

    def load(self, tensors: Mapping[str, torch.Tensor], record: dict[str, Any]) -> None:
        """Load the results of `parts` and `record`, if the run had islands already."""
        if "islands" not in record:
            return
        kept = record["islands"]
        found = {n.removeprefix(OUTER): t for n, t in tensors.items() if n.startswith(OUTER)}
        shapes = {name: weight.shape for name, weight in self.outer.weights.items()}
        for name, tensor in found.items():
            shape = shapes[self._owner(name)]
            found[name] = tensor.view(shape) if tensor.numel() == shape.numel() else tensor
        self.outer.load(found)
        if self.owners is not None:
            self.owners.load(tensors)
            self.positions, self.held = list(kept["positions"]), list(kept["held"])
        self.dropped = self.left.load(tensors, kept.get("left"))
        same = len(kept["admission"]) == len(self.admission)  # as many fragments as now
        for one, state in zip(self.admission, kept["admission"], strict=True) if same else ():
            one.load(state)
        self.round, self.digest = int(kept["round"]), str(kept["digest"])
        self.members = kept.get("members")
        self.stream = SampleStream.from_json(kept["stream"])
        # Older checkpoints have no island index: then only the merged weights count.
        self.dealt, self.underway = (
            _decode_spans(kept["dealt"]),
            _decode_spans(kept.get("underway", [])),
        )
        self.own = same and kept.get("index") == self.index
        self.since = [int(tokens) for tokens in kept["since"]] if self.own else []
        self.failures = int(kept["failures"])
        if int(kept["count"]) == self.count:
            self.refusals.load(kept["refusals"])
        else:  # the number of islands changed: deal again
            for spans in (*self.dealt, *self.underway[self.count :]):
                self.stream = self.stream.return_unused(spans)
            self.dealt, self.underway = [], self.underway[: self.count]

    def lost(self, islands: Sequence[int]) -> None:
        """Deal the samples again on which these islands trained since their last message."""
        for island in islands:
            if island < len(self.underway):
                self.stream = self.stream.return_unused(self.underway[island])
                self.underway[island] = ()

    def _owner(self, name: str) -> str:
        """Return the parameter to which an outer tensor belongs; "" if it is not on this rank."""
        while name and name not in self.shards:
            name = name.rpartition(".")[0]
        return name


def _encode_spans(spans_of: Sequence[Sequence[SampleRange]]) -> list[list[list[int]]]:
    """Return the spans of each island as JSON."""
    return [[[span.start, span.stop] for span in spans] for spans in spans_of]


def _decode_spans(kept: Sequence[Sequence[Sequence[int]]]) -> list[tuple[SampleRange, ...]]:
    return [tuple(SampleRange(*pair) for pair in pairs) for pairs in kept]
