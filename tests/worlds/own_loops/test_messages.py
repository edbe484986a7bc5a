"""Messages of ranks arrive whole at everybody, and cost what is new in them."""

from __future__ import annotations

from typing import Any

from message_case import LONG


def test_messages_arrive(worlds: Any) -> None:
    told = worlds(4).call("message_case:talk")
    assert all(one == told[0] for one in told)
    assert told[0] | {"equal_bytes": 0} == {
        "equal": [{"a": [1, 2]}] * 4,
        "equal_bytes": 0,
        "short": [0, 1, 2, 3],
        "long": [f"{rank}" * (LONG + rank) for rank in range(4)],
        "pairs": ["0" * LONG, "0" * LONG, "1" * LONG, "1" * LONG],
        "one": ["é"] * LONG,
        "agreed": None,
        "unlike": [2, "same", "other 2"],
        "places": [[], [1, 2]],
    }
    assert told[0]["equal_bytes"] <= 2 * 72  # as counted on the wire of an all-reduce
