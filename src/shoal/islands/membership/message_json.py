"""JSON of the members' messages and of committed turns: parsed, never executed.

A value of one of the classes below is [class, field, …], a tuple is ["", element, …].
"""

from __future__ import annotations

from typing import Any, get_args

from shoal.islands.membership.committed_turn import CommittedTurn, MemberWork, Seat, TurnProposal
from shoal.islands.membership.session_meeting import ArrivalReport
from shoal.islands.membership.turn_messages import Message
from shoal.islands.sample_ranges import SampleRange, SampleStream

CLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *get_args(Message),
        *(ArrivalReport, CommittedTurn, MemberWork, Seat, TurnProposal),
    )
}


def encode_message(value: Any) -> Any:
    """Return the JSON values of a message, a turn or a part of one.

    >>> encode_message((Seat(1, 7), None))
    ['', ['Seat', 1, 7], None]
    """
    if isinstance(value, SampleStream):
        return ["SampleStream", value.cursor, encode_message(value.open)]
    if isinstance(value, SampleRange):
        return ["SampleRange", value.start, value.stop]
    if isinstance(value, tuple):
        name = type(value).__name__ if hasattr(value, "_fields") else ""
        return [name, *map(encode_message, value)]
    return value


def decode_message(found: Any) -> Any:
    """Return the value of `encode_message`.

    Raises:
        ValueError: the JSON is of no message; TypeError: a class has other fields.

    >>> decode_message(encode_message((Seat(1, 7), None)))
    (Seat(name=1, boot=7), None)
    """
    if not isinstance(found, list):
        if isinstance(found, dict):
            raise ValueError("an object in a message")
        return found
    name, *parts = found
    values = [decode_message(part) for part in parts]
    if name == "":
        return tuple(values)
    if name == "SampleStream":
        return SampleStream(*values)
    if name == "SampleRange":
        return SampleRange(*values)
    if name not in CLASSES:
        raise ValueError(f"a message of {name!r}")
    return CLASSES[name](*values)
