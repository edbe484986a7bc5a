"""The manifest: a small file that lists the content of a checkpoint and the digests of its bytes.

`manifest.json` is canonical JSON (keys sorted, no spaces, one newline at the end):

    format, version, step
    tensors   name → shape, dtype, slices: file, key in the file, box, sha256 of the slice's bytes
    files     name → size_bytes, sha256 of its header (the 8-byte length and the JSON)
    aliases   name of a tied weight → the name it is stored under
    record    free JSON of the run: layout, data cursor, seeds, optimizer settings, versions
    digest    sha256 of this JSON without the key `digest`

Header, slices and size cover every byte of every file; the digest and the canonical form cover
every byte of the manifest. It guards against accidents, not against a forger, who can recompute
it: so nothing here is trusted further than a file offset, and nothing is ever executed. No torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.base.errors import CheckpointError
from shoal.base.plans.tensor_shards import DTYPES, Box
from shoal.checkpoint.format import boxes
from shoal.checkpoint.format.checkpoint_faults import DamagedFileError, short_path

FORMAT = "shoal-checkpoint"
VERSION = 1
FILE_NAME = "manifest.json"
SHARD_FILE = re.compile(r"rank-[0-9]+\.safetensors")


@dataclass(frozen=True)
class StoredSlice:
    """One box of a tensor: its file, its key there, and its digest."""

    file: str
    key: str
    box: Box
    sha256: str


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: its global shape, torch's dtype name, and the slices that tile it."""

    shape: tuple[int, ...]
    dtype: str
    slices: tuple[StoredSlice, ...]


@dataclass(frozen=True)
class StoredFile:
    """One shard file: its size, and the digest of its header."""

    size_bytes: int
    header_sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents.

    Attributes:
        tensors: name → shape, dtype, and for each slice its file, key, box and sha256.
        files: name of a shard file → its size, and sha256 of its header.
        aliases: name of a tied weight → the name it is stored under.
        record: free JSON of the run: layout, data cursor, seeds, optimizer settings, versions.
        digest: sha256 of manifest.json without this key; "" before it is written.
    """

    step: int
    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]
    aliases: dict[str, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    digest: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(file.size_bytes for file in self.files.values())


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json.

    Raises:
        CheckpointError: the record is not plain JSON.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "tensors": {
            name: {
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                "slices": [vars(piece) for piece in tensor.slices],
            }
            for name, tensor in manifest.tensors.items()
        },
        "files": {name: vars(file) for name, file in manifest.files.items()},
        "aliases": manifest.aliases,
        "record": to_plain_json(manifest.record),
    }
    return _add_digest(content)


def to_plain_json(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record as it will be read back: tuples become lists, keys become text.

    Raises:
        CheckpointError: JSON cannot hold it (tensors, NaN, infinities).
    """
    try:
        result: dict[str, Any] = json.loads(json.dumps(record, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as failure:
        raise CheckpointError(f"the run's record is not plain JSON: {failure}") from failure
    return result


def decode(data: bytes, path: Path) -> Manifest:
    """Return the manifest in these bytes, every field checked; `path` is for messages only.

    Raises:
        Damaged: the bytes were not written by `encode`.
        CheckpointError: this Shoal does not read the version.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as failure:
        raise DamagedFileError(path, "is not JSON: it was cut short or overwritten") from failure
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedFileError(path, "is not a Shoal manifest")
    stated = content.pop("digest", None)
    if _add_digest(content) != data:
        raise DamagedFileError(path, "does not match its own digest")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{short_path(path)}: format version {content.get('version')}, this Shoal reads "
            f"{VERSION}; "
            f"use the Shoal that wrote it, or a newer one"
        )
    try:
        manifest = msgspec.convert({**content, "digest": stated}, type=Manifest)
    except (msgspec.ValidationError, RecursionError) as failure:
        raise DamagedFileError(path, f"has a field of another type: {failure}") from failure
    problem = _find_contradiction(manifest)
    if problem:
        raise DamagedFileError(path, problem)
    return manifest


def _add_digest(content: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(_to_canonical_json(content)).hexdigest()
    return _to_canonical_json({**content, "digest": digest}) + b"\n"


def _to_canonical_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _find_contradiction(manifest: Manifest) -> str | None:
    """Return a contradiction in a well-typed manifest, or None."""
    for file in manifest.files:
        # A path with a folder in it could point anywhere on the machine.
        if not SHARD_FILE.fullmatch(file):
            return f"names a file {file!r}; shards are called rank-K.safetensors"
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in DTYPES:
            return f"{name} has the unknown dtype {tensor.dtype}"
        lost = [piece.file for piece in tensor.slices if piece.file not in manifest.files]
        if lost:
            return f"{name} lies in {lost[0]}, which is not among its files"
        problem = boxes.explain_untiled(tensor.shape, [piece.box for piece in tensor.slices])
        if problem:
            return f"{name}: {problem}"
    for alias, name in manifest.aliases.items():
        if alias in manifest.tensors or name not in manifest.tensors:
            return f"the alias {alias} → {name} does not lead from a free name to a tensor"
    return None
