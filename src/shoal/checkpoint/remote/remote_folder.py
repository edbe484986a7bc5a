"""Checkpoints in a remote folder (s3://, gs://, …) by fsspec: list, upload and download.

    ADDRESS/checkpoints/step-N/rank-K.safetensors   first
    ADDRESS/run.toml, ADDRESS/hub/…                 as in the run's folder
    ADDRESS/checkpoints/step-N/manifest.json        last: without it the step is not there
    ADDRESS/tags/TAG/…                              the same, of a tag

A deletion removes the manifest first and the files after it, so an interrupted upload or deletion
never looks like a checkpoint. Stores have no locks: one run, one address. No torch here.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.base.errors import ClusterError, ConfigError, ShoalError, nearest_word
from shoal.checkpoint.format import folders
from shoal.checkpoint.format.checkpoint_faults import DamagedFileError, describe_failure
from shoal.checkpoint.format.hub_folder import HUB
from shoal.checkpoint.format.listing import step_folder
from shoal.checkpoint.format.manifest import FILE_NAME, Manifest, decode

STORED = re.compile(r"checkpoints/step-([0-9]+)/([^/]+)")


class RemoteFolderError(ClusterError):
    """ClusterError for a remote folder that cannot be reached or that refuses a transfer."""


def check_remote(address: Any) -> None:
    """Refuse an address that no installed library serves; no network is used.

    Raises:
        ConfigError: with the nearest address, or the library that is missing.
    """
    where = f"checkpoint.remote = {address}"
    if not isinstance(address, str) or "://" not in address:
        near = f"file://{Path(address).expanduser().absolute()}"
        raise ConfigError(f"{where}: an address is wanted, as s3://bucket/run; try: {near}")
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            f"{where}: needs fsspec, which is not installed; try: pip install 'shoal[data]'"
        ) from None
    protocol = address.partition("://")[0].rpartition("::")[2]
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:  # which says what to install
        raise ConfigError(f"{where}: {error}") from error
    except ValueError as error:
        near = nearest_word(protocol, fsspec.available_protocols()) or "s3"
        raise ConfigError(f"{where}: {error}; try: {near}://…") from error


class RemoteFolder:
    """A run's folder in a store: `RemoteFolder(address)`; it connects on first use.

    below    of a method: the folder of a tag, `tags/TAG/`, or another one in the run's; "" its own

    Raises:
        RemoteFolderError: from every method, with the address and the error of the store's library.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    @functools.cached_property
    def _store(self) -> tuple[Any, str]:
        import fsspec

        store, path = fsspec.core.url_to_fs(self.address)
        return store, path.rstrip("/")

    @contextlib.contextmanager
    def _open_store(self) -> Iterator[tuple[Any, str]]:
        """Yield the store and the path in it; turn its errors into RemoteFolderError."""
        try:
            yield self._store
        except ShoalError:
            raise
        except Exception as error:  # each store's library has its own
            said = " ".join(describe_failure(error).split())
            raise RemoteFolderError(f"checkpoint.remote = {self.address}: {said}") from error

    def _list_files(self, below: str) -> dict[int, dict[str, int]]:
        """Return step → file → bytes of all remote files, complete steps or not."""
        with self._open_store() as (store, path):
            store.invalidate_cache()
            try:
                found = store.find(f"{path}/{below}checkpoints", detail=True)
            except FileNotFoundError:
                found = {}
            steps: dict[int, dict[str, int]] = {}
            for name, about in found.items():
                match = STORED.fullmatch(name[len(f"{path}/{below}") :])
                if match:
                    steps.setdefault(int(match[1]), {})[match[2]] = about["size"]
            return steps

    def steps(self, below: str = "") -> list[int]:
        """List the steps that have a manifest there, newest first; nothing is read yet."""
        listed = self._list_files(below)
        return sorted((s for s, files in listed.items() if FILE_NAME in files), reverse=True)

    def read_manifest(self, below: str, step: int) -> tuple[Manifest, bytes]:
        """Read a step's manifest, and its bytes as stored.

        Raises:
            Damaged: it was cut short, or its files are not all there.
        """
        with self._open_store() as (store, path):
            data: bytes = store.cat_file(f"{path}/{below}checkpoints/step-{step}/{FILE_NAME}")
        file = step_folder(Path("checkpoints"), step) / FILE_NAME
        manifest = decode(data, file)
        if manifest.step != step:
            raise DamagedFileError(file, f"is of step {manifest.step}")
        if lacking := _find_missing_file(manifest, self._list_files(below).get(step, {})):
            raise DamagedFileError(
                file.with_name(lacking), "is not there, or not as long as it was saved"
            )
        return manifest, data

    def get(self, below: str, step: int, name: str, target: Path) -> None:
        """Copy one file of a step to `target`; the caller verifies it."""
        with self._open_store() as (store, path):
            store.get_file(f"{path}/{below}checkpoints/step-{step}/{name}", str(target))

    def upload_checkpoint(self, checkpoint: Path, below: str, keep: int) -> None:
        """Upload a complete checkpoint, unless it is there; delete those beyond the `keep` newest.

        Later steps are neither counted nor touched, except under a tag, which has one checkpoint.

        Raises:
            CheckpointError: the local manifest is damaged.
        """
        data = (checkpoint / FILE_NAME).read_bytes()
        manifest = decode(data, checkpoint / FILE_NAME)
        with self._open_store() as (store, path):
            listed = self._list_files(below)
            folder = f"{path}/{below}checkpoints/{checkpoint.name}"
            there = listed.get(manifest.step, {})
            has_manifest = FILE_NAME in there
            if not (has_manifest and store.cat_file(f"{folder}/{FILE_NAME}") == data):
                if has_manifest:  # from before the run went back to an earlier step
                    store.rm_file(f"{folder}/{FILE_NAME}")
                self._put_files(checkpoint, below, manifest)
                store.pipe_file(f"{folder}/{FILE_NAME}", data)
            self._delete_old_steps(below, manifest.step, listed, keep)

    def _put_files(self, checkpoint: Path, below: str, manifest: Manifest) -> None:
        """Upload all files but the manifest.

        Raises:
            RemoteFolderError: the store has other sizes afterwards.
        """
        store, path = self._store
        folder, base = f"{path}/{below}checkpoints/{checkpoint.name}", checkpoint.parent.parent
        wanted = {checkpoint / name: f"{folder}/{name}" for name in manifest.files}
        for file in (base / "run.toml", *sorted((base / HUB).glob("*"))):
            if file.is_file():
                wanted[file] = f"{path}/{below}{file.relative_to(base)}"
        if not store.async_impl:  # object stores have no folders: this would make a bucket
            for parent in {name.rpartition("/")[0] for name in wanted.values()}:
                store.makedirs(parent, exist_ok=True)
        store.put([str(file) for file in wanted], list(wanted.values()))
        if lacking := _find_missing_file(manifest, self._list_files(below).get(manifest.step, {})):
            raise RemoteFolderError(
                f"checkpoint.remote = {self.address}: {lacking} is not there as it was sent"
            )

    def _delete_old_steps(
        self, below: str, newest: int, listed: dict[int, dict[str, int]], keep: int
    ) -> None:
        store, path = self._store
        whole = {newest, *(step for step, files in listed.items() if FILE_NAME in files)}
        past = sorted((step for step in whole if step <= newest), reverse=True)[keep:]
        past += [step for step in listed if step not in whole]  # a copy that was cut off
        past += [step for step in whole if step > newest and is_tag(below)]
        for step in past:
            folder = f"{path}/{below}checkpoints/step-{step}"
            if step in whole:
                store.rm_file(f"{folder}/{FILE_NAME}")
            if set(listed[step]) - {FILE_NAME} or not store.async_impl:
                store.rm(folder, recursive=True)


def is_tag(below: str) -> bool:
    """Return whether a folder is a tag's, which has one checkpoint, of whatever step."""
    return below.startswith("tags/")


def _find_missing_file(manifest: Manifest, there: dict[str, int]) -> str:
    """Return the first file that is missing or of another size there; "" if none is."""
    for name, file in manifest.files.items():
        if there.get(name) != file.size_bytes:
            return name
    return ""


@contextlib.contextmanager
def protect_from_deletion(checkpoint: Path) -> Iterator[None]:
    """Keep a local checkpoint from being deleted (`folders.retire`) while it is copied."""
    folders.IN_USE.add(checkpoint)
    try:
        yield
    finally:
        folders.IN_USE.discard(checkpoint)
