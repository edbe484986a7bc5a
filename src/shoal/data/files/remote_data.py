"""Remote data (s3://, gs://, hf://, http://, …), copied once into the cache by fsspec.

    jsonl:s3://bucket/web/*.jsonl  ──list──> names, sizes, times ──copy──> <cache>/remote/<key>/…
                                   ──> jsonl:<cache>/remote/<key>/*.jsonl, a source as any other

The key is a hash of the address and of each file's listing, so changed files are copied again. One
process of a machine copies, the others wait; a copy is whole or absent. All bytes cross the network
once per machine, and its disk must hold them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.base.errors import ClusterError, ConfigError
from shoal.base.runlog.atomic_files import cache_folder
from shoal.config.mixture_syntax import split_mixture
from shoal.config.paths import GLOBS, is_remote, parse_validation_share, split_source
from shoal.config.sections import DataSection
from shoal.data.files.tokenizer_cache import content_key, hold_lock
from shoal.wire.phases import iter_with_progress

AT_ONCE = 64
"""Files requested at a time, if a store allows it."""

STAMPS = ("size", "ETag", "etag", "LastModified", "mtime", "created", "md5Hash")
"""Listing fields of stores that identify a changed file."""


def local_section(section: DataSection) -> DataSection:
    """Return the section with every remote source copied and replaced by its local path.

    Raises:
        ConfigError: no library supports the address, or it has no files; ClusterError if a
            connection fails.
    """
    second = parse_validation_share(section)[1]
    return replace(
        section,
        source=_local(section.source, "data.source"),
        validation=_local(second, "data.validation") if second else section.validation,
    )


def _local(source: str, where: str) -> str:
    kind, argument = split_source(source, where)
    if kind == "mix":
        parts = split_mixture(argument, where)
        return "mix:" + "+".join(f"{part}*{_local(one, where)}" for part, one in parts)
    if not is_remote(source):
        return source
    return f"{kind}:{_ensure_local_copy(kind, argument, f'{where} = {source}')}"


def _ensure_local_copy(kind: str, address: str, line: str) -> str:
    """Return the local path or pattern of a remote one, copied if needed."""
    import fsspec

    address, _, split = address.partition("#")
    try:
        store, path = fsspec.core.url_to_fs(address)
        base = _before_wildcard(path) if kind in GLOBS else path.rstrip("/")
        found = (store.glob if kind in GLOBS else store.find)(path, detail=True)
    except FileNotFoundError:
        found = {}
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{line}: {error}") from error
    except Exception as error:  # each store's library has its own
        raise ClusterError(f"{line}: {type(error).__name__}: {error}") from error
    files = {name: about for name, about in sorted(found.items()) if about["type"] == "file"}
    if not files:
        raise ConfigError(f"{line}: no file there")
    below = {name: name[len(base) :].lstrip("/") for name in files}
    for name, rest in below.items():
        if ".." in rest.split("/"):  # a listing is untrusted: write only below the cache
            raise ConfigError(f"{line}: {name} would lie outside of the folder it is copied to")
    stamps = [[below[n], *(str(files[n].get(key)) for key in STAMPS)] for n in files]
    final = cache_folder() / "remote" / content_key(address, stamps)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if not final.is_dir():
            with hold_lock(final):
                if not final.is_dir():
                    _copy(store, below, final, line)
    except OSError as error:
        raise ConfigError(
            f"{line}: cache folder {final.parent}: {error.strerror or error}; "
            f"try: SHOAL_CACHE=a folder that can be written"
        ) from error
    rest = path[len(base) :].lstrip("/")
    return str(final / rest if rest else final) + (f"#{split}" if split else "")


def _before_wildcard(path: str) -> str:
    """Return the folder of a pattern before its first wildcard.

    >>> _before_wildcard("bucket/web/2024-*/a.jsonl"), _before_wildcard("bucket/a.jsonl")
    ('bucket/web', 'bucket')
    """
    first = min((path.find(mark) for mark in "*?[" if mark in path), default=len(path))
    return path[:first].rpartition("/")[0]


def _copy(store: Any, below: dict[str, str], final: Path, line: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f"{final.name}.tmp-", dir=final.parent))
    names = list(below)
    try:
        for at in iter_with_progress("copy", len(names), range(0, len(names), AT_ONCE)):
            some = names[at : at + AT_ONCE]
            targets = [folder / below[name] for name in some]
            for target in targets:
                target.parent.mkdir(parents=True, exist_ok=True)
            store.get(some, [str(target) for target in targets])
        os.replace(folder, final)
    except Exception as error:
        raise ClusterError(f"{line}: copying fails: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
