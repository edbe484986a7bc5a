"""Messages between the stages of a pipeline, derived from the action lists of all ranks.

Messages are no actions: the lists imply them. A forward's outputs arrive at the next stage, a
backward's gradients at the one before; between two ranks they are sent in the order of the sender's
list, which the receiver reads too. So both sides agree without a tag:

    post   receives for the next action are posted before the present one computes; never waits.
           Not while `early` is off: an allocator without free memory waits for all work of its
           device, and posted receives may depend on work that this rank has yet to compute
    take   waits for the message that an action needs; counts as exposed
    send   begins and never waits. Sent tensors are freed as soon as the schedule shows that they
           were received: when a message arrives that the receiver made afterwards

The form of the tensors (shapes, dtypes, requires_grad) is sent once per input signature, in a
header of plain integers before the values: their count, then the integers. Gradients have the form
of the values that need them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shoal.base.errors import BugError, ClusterError, PlanError
from shoal.base.plans.pipeline_actions import Action, PipelineSchedule
from shoal.fabric import World
from shoal.fabric.exchanges.point_to_point import PointToPoint, Transfer
from shoal.parallel.pipeline.stage_tensors import (
    Form,
    decode_form,
    describe_form,
    encode_form,
    form_of_gradients,
)

OUTPUTS, GRADIENTS = "F", "B"


class StageMessage(NamedTuple):
    """Outputs ("F") from the stage before, or gradients ("B") from the one after."""

    kind: str
    stage: int
    micro_batch: int

    @property
    def source(self) -> int:
        """Return the stage that sends it."""
        return self.stage - 1 if self.kind == OUTPUTS else self.stage + 1

    @property
    def boundary(self) -> int:
        """Return the stage whose inputs it is about."""
        return self.stage if self.kind == OUTPUTS else self.stage + 1

    def text(self) -> str:
        """Return the message's kind, sender and receiver for error lines."""
        what = "outputs" if self.kind == OUTPUTS else "gradients"
        return f"{what} of stage {self.source} for stage {self.stage}, micro-batch"


def needed_message(schedule: PipelineSchedule, act: Action) -> StageMessage | None:
    """Return the message that the action waits for; None at the ends of the chain and for W.

    >>> from shoal.planning.pipeline_schedules import make_schedule
    >>> needed_message(make_schedule("gpipe", 2, 1), Action("B", 0, 0))
    StageMessage(kind='B', stage=0, micro_batch=0)
    """
    place = act.stage % schedule.stages_per_copy
    if act.kind == "F" and place > 0:
        return StageMessage(OUTPUTS, act.stage, act.micro_batch)
    if act.kind in "BI" and place < schedule.stages_per_copy - 1:
        return StageMessage(GRADIENTS, act.stage, act.micro_batch)
    return None


def produced_message(schedule: PipelineSchedule, act: Action) -> StageMessage | None:
    """Return the message that the action makes; None at the ends of the chain and for W.

    >>> from shoal.planning.pipeline_schedules import make_schedule
    >>> produced_message(make_schedule("gpipe", 2, 1), Action("F", 0, 0))
    StageMessage(kind='F', stage=1, micro_batch=0)
    """
    place = act.stage % schedule.stages_per_copy
    if act.kind == "F" and place < schedule.stages_per_copy - 1:
        return StageMessage(OUTPUTS, act.stage + 1, act.micro_batch)
    if act.kind in "BI" and place > 0:
        return StageMessage(GRADIENTS, act.stage - 1, act.micro_batch)
    return None


@dataclass(frozen=True)
class MessageRoute:
    """Messages that one rank receives and sends in a schedule.

    Attributes:
        incoming: by peer: the messages for this rank, in the order in which the peer sends them.
        made_at: position in the peer's list of the action that makes an incoming message.
        taken_at: position in the peer's list of the action that takes an outgoing message.
    """

    incoming: dict[int, tuple[StageMessage, ...]]
    made_at: dict[StageMessage, int]
    taken_at: dict[StageMessage, int]


def derive_route(schedule: PipelineSchedule, rank: int) -> MessageRoute:
    """Return the messages between `rank` and its peers.

    >>> from shoal.planning.pipeline_schedules import make_schedule
    >>> [m.micro_batch for m in derive_route(make_schedule("1f1b", 2, 3), 1).incoming[0]]
    [0, 1, 2]
    """
    incoming: dict[int, list[StageMessage]] = {}
    made_at, taken_at = {}, {}
    for peer, acts in enumerate(schedule.ranks):
        for position, act in enumerate(acts if peer != rank else ()):
            made, taken = produced_message(schedule, act), needed_message(schedule, act)
            if made and schedule.stage_rank[made.stage] == rank:
                incoming.setdefault(peer, []).append(made)
                made_at[made] = position
            if taken and schedule.stage_rank[taken.source] == rank:
                taken_at[taken] = position
    return MessageRoute({peer: tuple(told) for peer, told in incoming.items()}, made_at, taken_at)


@dataclass
class _PeerQueue:
    """Messages still to come from one rank, and those sent to it that may still be in flight."""

    to_post: deque[StageMessage]
    header: Transfer | None = None
    sent: list[tuple[int, list[Transfer]]] = field(default_factory=list)


class StageMessenger:
    """Messages of one rank in the present step, and the forms known from earlier steps.

    Attributes:
        early: post receives before they are needed; each rank may set it on its own.
    """

    def __init__(self, pipe: World) -> None:
        self.pipe, self.early = pipe, True
        self.wire = PointToPoint(pipe)
        self.forms: dict[Hashable, Form] = {}
        self.signature: Callable[[int], Hashable] = lambda micro_batch: None
        self.route = MessageRoute({}, {}, {})
        self.peers: dict[int, _PeerQueue] = {}
        self.posted: dict[StageMessage, list[Transfer]] = {}
        self.rank_of: tuple[int, ...] = ()

    def start_step(
        self, route: MessageRoute, stage_rank: tuple[int, ...], signature: Callable[[int], Hashable]
    ) -> None:
        """Start a step; signature: of a micro-batch's inputs, the same on every rank."""
        self.wait_for_sends()
        self.route, self.rank_of, self.signature = route, stage_rank, signature
        self.posted = {}
        self.peers = {peer: _PeerQueue(deque(told)) for peer, told in route.incoming.items()}

    def is_local(self, message: StageMessage) -> bool:
        """Return whether the message stays on this rank, which then passes it on itself."""
        return self.rank_of[message.stage] == self.rank_of[message.source]

    def post_receive(self, message: StageMessage) -> None:
        """Post the receives of a message and of those before it, if their forms are known."""
        if self.early:
            self._post_until(message, wait=False)

    def receive(self, message: StageMessage) -> tuple[list[torch.Tensor], Form]:
        """Wait for a message; return its tensors and their form.

        Raises:
            ClusterError: the message does not come; the text names stages and micro-batch.
        """
        source = self.rank_of[message.source]
        try:
            self._post_until(message, wait=True)
            tensors = [transfer.wait() for transfer in self.posted.pop(message)]
            self._release_received(source, self.route.made_at[message])
        except RuntimeError as failure:
            raise self._lost_error(message, "did not come from", source, failure) from failure
        form = self._form(message)
        if form is None:
            raise BugError(f"{self._name(message)}: arrived, but in which form is not known")
        return tensors, form

    def send(self, message: StageMessage, tensors: Sequence[torch.Tensor], form: Form) -> None:
        """Begin to send; the form of outputs must be the known one for the same signature.

        Raises:
            PlanError: a shape depends on data.
            ClusterError: the message cannot be sent.
        """
        target = self.rank_of[message.stage]
        sent = list(tensors)
        if message.kind == OUTPUTS:
            known = self.forms.setdefault(self._key(message), form)
            if known is form:
                told = torch.tensor(encode_form(form), dtype=torch.int64, device=self.pipe.device)
                sent = [told.new_tensor([told.numel()]), told, *sent]
            elif known != form:
                raise self._form_changed_error(message, known, form)
        try:
            transfers = [self.wire.send(tensor, target) for tensor in sent]
        except RuntimeError as failure:
            raise self._lost_error(message, "cannot be sent to", target, failure) from failure
        peer = self.peers.setdefault(target, _PeerQueue(deque()))
        peer.sent.append((self.route.taken_at[message], transfers))

    def wait_for_sends(self) -> None:
        """Wait until all sent messages have been received."""
        for target in self.peers:
            try:
                self._release_received(target, None)
            except RuntimeError as failure:
                raise ClusterError(
                    f"stages on rank {self.pipe.rank} of the pipeline: rank {target} does not "
                    f"receive what was sent to it: {_first_line(failure)}"
                ) from failure

    def _release_received(self, target: int, position: int | None) -> None:
        """Free messages that `target` took up to this position of its list; None: all."""
        peer = self.peers[target]
        kept = []
        for taken_at, transfers in peer.sent:
            if position is None or taken_at <= position:
                for transfer in transfers:
                    transfer.wait()
            else:
                kept.append((taken_at, transfers))
        peer.sent = kept

    def _post_until(self, message: StageMessage, *, wait: bool) -> None:
        """Post receives in the sender's order up to this one; at an unknown form stop or wait."""
        source = self.rank_of[message.source]
        peer = self.peers[source]
        while message not in self.posted:
            coming = peer.to_post[0]
            form = self._form(coming)
            if form is None and coming.kind == OUTPUTS:
                if peer.header is None:
                    peer.header = self.wire.receive((1,), torch.int64, source)
                if wait:
                    length, peer.header = int(peer.header.wait().item()), None
                    told = self.wire.receive((length,), torch.int64, source).wait()
                    form = self.forms[self._key(coming)] = decode_form(told.tolist())
            if form is None:
                if wait:
                    raise BugError(f"{self._name(coming)}: comes before its outputs were sent")
                return
            peer.to_post.popleft()
            values = form if coming.kind == OUTPUTS else form_of_gradients(form)
            self.posted[coming] = [self.wire.receive(v.shape, v.dtype, source) for v in values]

    def _key(self, message: StageMessage) -> Hashable:
        signature = self.signature(message.micro_batch)
        return message.boundary, signature, torch.is_grad_enabled()

    def _form(self, message: StageMessage) -> Form | None:
        """Return the form of the values at the message's boundary, if known."""
        return self.forms.get(self._key(message))

    def _name(self, message: StageMessage) -> str:
        return f"pipeline: {message.text()} {message.micro_batch}"

    def _lost_error(
        self, message: StageMessage, how: str, peer: int, failure: RuntimeError
    ) -> ClusterError:
        return ClusterError(
            f"{self._name(message)}: {how} rank {peer} of the pipeline: {_first_line(failure)}"
        )

    def _form_changed_error(self, message: StageMessage, known: Form, form: Form) -> PlanError:
        return PlanError(
            f"{self._name(message)}: are {describe_form(form)}, and were {describe_form(known)} "
            "for inputs of the "
            f"same shapes: shapes that depend on data cannot cross between stages; try: "
            f"another layout.pp, or layout.pp=1"
        )


def _first_line(failure: BaseException) -> str:
    return str(failure).strip().split("\n")[0]
