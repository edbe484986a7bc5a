"""Keys of islands for tests and proofs: a file of each, and one file that lists all."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.island_key import make_key


def make_keys(folder: Path, count: int, head: str = "") -> list[str]:
    """Make 0.key, 1.key, … and all.pub in a folder; return the public lines, with their ends."""
    lines = [f"{make_key(folder / f'{k}.key', f'host-{k}').line}\n" for k in range(count)]
    (folder / "all.pub").write_text(head + "".join(lines))
    return lines


def key_settings(folder: Path) -> dict[str, str]:
    """islands.key and islands.keys of islands whose keys are in a folder."""
    return {"key": str(folder / "{index}.key"), "keys": str(folder / "all.pub")}


def fingerprint(folder: Path, index: int) -> str:
    """The fingerprint of an island's key, as lines on refusals name it."""
    return (folder / f"{index}.key.pub").read_text().split()[1]
