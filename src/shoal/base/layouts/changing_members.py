"""Methods and settings with which islands may come and go (`islands.least`).

The table of docs/how-it-works/members.md; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.base.errors import ConfigError

NO_CHANGING_MEMBERS = {
    "streaming-diloco": "fragments of several rounds are under way at a time",
    "sparse-loco": "an island that goes takes along what its codec has left out so far",
    "noloco": "its islands are never equal, so none can give another its state",
    "scaffold": "its controls belong to owners, whose data stay where they are",
}
"""Methods whose islands cannot come and go, and why; all others allow it."""

CODECS_WITHOUT_MEMORY = ("none", "bf16", "int8")
"""Codecs whose error is not sent later."""

ONLY: dict[str, Any] = {"data": "shared", "fragments": 1, "overlap": 0, "regions": 1, "mixing": 0}
"""Value of each key that islands that come and go must have: they merge the whole model at once."""

MOST_PORT = 65535

GOODBYE = "it said goodbye"
"""Why an island left whose user stopped it."""
FIRST_WITNESS = 10_000
"""Numbers of members from here on are those of witnesses."""


def name_member(number: int) -> str:
    """Return the name of a member for a person.

    >>> name_member(2), name_member(10_000)
    ('island 2', 'the witness')
    """
    return f"island {number}" if number < FIRST_WITNESS else "the witness"


def list_addresses(at: str) -> dict[int, str]:
    """Return the address of every island of `islands.at`, by its number.

    >>> list_addresses("10.0.0.1:29400,10.0.0.2:29400")
    {0: '10.0.0.1:29400', 1: '10.0.0.2:29400'}
    """
    return dict(enumerate(at.split(","))) if at else {}


def complete_lone_island(overrides: list[str], kept: Any) -> list[str]:
    """Return the overrides of a resume, with what `islands.count=1` implies for the last survivor.

    Its address is its own one of the kept list, and its index 0, unless the user sets them.

    Args:
        overrides: `section.key=value`, of the command line.
        kept: `IslandsPolicy` of the run folder.

    >>> from types import SimpleNamespace
    >>> kept = SimpleNamespace(least=1, index=1, at="10.0.0.1:29400,10.0.0.2:29400")
    >>> complete_lone_island(["islands.count=1"], kept)
    ['islands.count=1', 'islands.at=10.0.0.2:29400', 'islands.index=0']
    """
    values = dict(one.partition("=")[::2] for one in overrides)
    own = list_addresses(kept.at).get(kept.index, "")
    least = values.get("islands.least", str(kept.least))
    if values.get("islands.count") != "1" or least == "0" or not own:
        return overrides
    implied = {"islands.at": own, "islands.index": "0"}
    return overrides + [f"{key}={implied[key]}" for key in implied if key not in values]


def complete_known_islands(
    overrides: list[str],
    kept: Any,
    names: Sequence[int],
    addresses: Mapping[int, str],
    resume: str,
) -> list[str]:
    """Return the overrides of a resume, so that the island looks for all islands of its last turn.

    Else it would train alone beside islands that joined it and train on. An `islands.count` of the
    command line stays: with 1 the island goes on alone.

    Args:
        overrides: `section.key=value`, of the command line.
        kept: `IslandsPolicy` of the run folder.
        names: islands of the last turn in the folder; an island that said goodbye is none of them.
        addresses: of other islands, as the folder knows them.
        resume: the command, without overrides.

    Raises:
        ConfigError: the folder lacks an address.

    >>> from types import SimpleNamespace
    >>> kept = SimpleNamespace(least=1, index=0, count=1, at="10.0.0.1:29400")
    >>> complete_known_islands([], kept, (1,), {1: "10.0.0.2:29400"}, "")
    ['islands.count=2', 'islands.at=10.0.0.1:29400,10.0.0.2:29400']
    """
    values = dict(one.partition("=")[::2] for one in overrides)
    listed = list_addresses(values.get("islands.at", kept.at))
    count = max(1 + max(names, default=0), len(listed))
    is_fixed = values.get("islands.least", str(kept.least)) == "0"
    if "islands.count" in values or is_fixed or not listed or count <= kept.count:
        return overrides
    known = {**addresses, **listed}
    found = [known.get(name, "ADDRESS") for name in range(count)]
    completed = [f"islands.count={count}", f"islands.at={','.join(found)}"]
    if "ADDRESS" in found:
        whom = " and ".join(str(name) for name in names if name != kept.index)
        raise ConfigError(
            f"islands.count = {kept.count}: island {whom} had joined, and may train on; this "
            f"folder lacks an address; try: {resume} {' '.join(completed)}; or, to go on alone: "
            f"{resume} islands.count=1"
        )
    return [one for one in overrides if not one.startswith("islands.at=")] + completed


def rank_address(address: str, rank: int) -> str:
    """Return where a rank of an island listens: at the port of its rank 0, plus its own rank.

    Raises:
        ConfigError: there is no such port.

    >>> rank_address("10.0.0.1:29400", 3)
    '10.0.0.1:29403'
    """
    host, _, port = address.rpartition(":")
    if int(port) + rank > MOST_PORT:
        raise ConfigError(
            f"islands.at = {address}: rank {rank} listens {rank} ports above, and {MOST_PORT} is "
            f"the last one; try: {host}:{MOST_PORT - 1000}"
        )
    return f"{host}:{int(port) + rank}"


def check_rank_addresses(addresses: dict[int, str], index: int, processes: int) -> None:
    """Refuse an island whose ranks would listen at the port of another one.

    Islands may have different numbers of processes, so each checks its own ports.

    Args:
        index, processes: of this island.

    Raises:
        ConfigError: names the two islands.

    >>> check_rank_addresses({0: "10.0.0.1:29400", 1: "10.0.0.1:29402"}, 0, 2)
    """
    own = [rank_address(addresses[index], rank) for rank in range(processes)]
    for island, address in addresses.items():
        if island != index and address in own:
            host, _, port = addresses[index].rpartition(":")
            raise ConfigError(
                f"islands.at = {','.join(addresses.values())}: an island of {processes} "
                f"processes listens at {processes} ports, and those of islands {index} and "
                f"{island} overlap; try: {host}:{int(port) + processes} for island {island}"
            )


def check_changing_members(policy: Any, is_address: Callable[[str], bool]) -> None:
    """Refuse what islands that come and go cannot have.

    Args:
        policy: `IslandsPolicy`, its numbers settled.
        is_address: returns whether a text is HOST:PORT.

    Raises:
        ConfigError: names the key and the nearest legal value.
    """
    if policy.key and not policy.least:
        raise ConfigError(
            f"islands.key = {policy.key}: islands of a fixed list send over gloo, which encrypts "
            f"nothing; try: islands.least={policy.count}, or a private network and no key"
        )
    if policy.key and not policy.at and policy.count > 1 and "{index}" not in policy.key:
        raise ConfigError(
            f"islands.key = {policy.key}: the {policy.count} islands of this machine need a key "
            f"each; try: islands.key=keys/{{index}}.key"
        )
    if why := NO_CHANGING_MEMBERS.get(policy.method, ""):
        raise ConfigError(
            f"islands.least = {policy.least}: {policy.method} has a fixed list of islands: {why}; "
            f"try: islands.method=diloco, or islands.least=0"
        )
    for key, only in ONLY.items():
        if getattr(policy, key) != only:
            raise ConfigError(
                f"islands.{key} = {getattr(policy, key)}: islands that come and go merge the whole "
                f"model, all at once; try: islands.{key}={only}, or islands.least=0"
            )
    if policy.codec not in CODECS_WITHOUT_MEMORY:
        raise ConfigError(
            f"islands.codec = {policy.codec}: what it leaves out is sent later, and an island that "
            f"goes takes that along; try: islands.codec=int8, or islands.least=0"
        )
    if policy.least > policy.count:
        raise ConfigError(
            f"islands.least = {policy.least}: more than islands.count = {policy.count}; try: "
            f"islands.least={policy.count}"
        )
    given = list_addresses(policy.at).values()
    if len(given) > policy.count and all(map(is_address, given)):
        raise ConfigError(
            f"islands.at = {policy.at}: {len(given)} addresses for islands.count = {policy.count}; "
            f"with islands.least each island has one; try: islands.count={len(given)}, which looks "
            f"for the others first, or this island's own address alone, which begins without them"
        )
    if given and (len(given) != policy.count or not all(map(is_address, given))):
        raise ConfigError(
            f"islands.at = {policy.at}: with islands.least an address of each of the "
            f"{policy.count} islands is wanted, in their order; try: "
            f"islands.at=10.0.0.1:29400,10.0.0.2:29400"
        )
