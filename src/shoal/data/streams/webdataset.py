"""WebDataset shards: .tar files whose neighbours with one name to its dot form a sample.

    shard-000.tar   cat/001.jpg cat/001.cls cat/002.jpg cat/002.cls …

The offset of each file of each sample is read once, from the tars' headers, and cached. Then a
sample is read by its offset, its bytes and no others. So shards have a length and an index, and
every guarantee for datasets holds for them; `stream_order.py` defines their order. Compressed tars
have no offsets and are refused. Source the format: webdataset (Aizman et al. 2019, 2001.01858)
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from shoal.base.errors import ConfigError
from shoal.config.paths import fixed_folder, glob_files
from shoal.data.files.documents import Document
from shoal.data.files.image_folders import (
    ENDINGS,
    choose_held_out,
    class_entropy,
    decode_image,
    image_source_fields,
)
from shoal.data.files.tokenizer_cache import NewEntry, content_key, open_cached
from shoal.data.streams.stream_order import StreamOrder, check_degree
from shoal.wire.phases import iter_with_progress

OPEN_FILES = 128
"""Most shard files that a process keeps open."""

Ints = npt.NDArray[np.int64]


class TarSamples(Dataset[Any]):
    """Samples of tar shards: dataset[i] is `decode_image` of {"__key__": name, "jpg": bytes, …}.

    Args:
        pattern: pattern of the shards' paths.
        decode: None: the dict itself.
        only: ascending sample numbers of this part; None: all.

    Raises:
        ConfigError: there is no shard, or a compressed or damaged one.
    """

    def __init__(
        self,
        pattern: str,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        only: Ints | None = None,
        where: str = "data.source",
    ) -> None:
        self._files: dict[str, int] = {}
        self.pattern, self.decode = pattern, decode
        self.paths = [str(path) for path in glob_files(pattern, where, "wds")]
        self.index = open_index(pattern, where)
        self.only = np.arange(len(self.index["ends"])) if only is None else only
        self.draws_nothing = decode is None

    def __len__(self) -> int:
        return len(self.only)

    def whole_index(self, index: int) -> int:
        """Return the sample's number before a part was held out."""
        return int(self.only[index])

    def deal(self, turn: int, degree: int) -> StreamOrder:
        """Return the order in which a loader reads; ConfigError for a degree that does not fit."""
        check_degree(degree)
        bounds = np.concatenate(([0], np.cumsum(self.index["shard_samples"])))
        sizes = np.diff(np.searchsorted(self.only, bounds))
        return StreamOrder(sizes.tolist(), turn)

    def key(self, number: int) -> str:
        """Return the name of sample `number` of all samples."""
        stop = int(self.index["key_ends"][number])
        start = int(self.index["key_ends"][number - 1]) if number else 0
        return bytes(self.index["keys"][start:stop]).decode(errors="replace")

    def __getitem__(self, index: int) -> Any:
        """Return one sample; raises IndexError, OSError, ValueError, or decode's errors."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(self.only[index])
        stop = int(self.index["ends"][number])
        start = int(self.index["ends"][number - 1]) if number else 0
        sample: dict[str, Any] = {"__key__": self.key(number)}
        for file in range(start, stop):
            shard, ending, place, size = (int(n) for n in self.index["files"][file])
            name = str(self.index["endings"][ending])
            sample[name] = self._read(self.paths[shard], place, size)
        return sample if self.decode is None else self.decode(sample)

    def _read(self, path: str, place: int, size: int) -> bytes:
        if path not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._close()
            self._files[path] = os.open(path, os.O_RDONLY)
        parts = []
        while size and (part := os.pread(self._files[path], size, place)):
            parts.append(part)
            place, size = place + len(part), size - len(part)
        if size:
            raise ValueError(f"{path}: ends {size} bytes early; it was cut after it was opened")
        return b"".join(parts)

    def _close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": {}}

    def __del__(self) -> None:
        if "_files" in vars(self):  # not where the pattern was refused
            self._close()


class TarImages(TarSamples):
    """Images and classes of tar shards: (image [3, size, size] float32 in 0 … 1, class int)."""

    def __init__(self, pattern: str, size: int, only: Ints | None, where: str) -> None:
        super().__init__(pattern, self._picture, only, where)
        self.size = size
        self.draws_nothing = True

    def _picture(self, sample: dict[str, Any]) -> Any:
        key = sample["__key__"]
        picture = next((n for n in sample if f".{n.rpartition('.')[2].lower()}" in ENDINGS), "")
        if not picture or "cls" not in sample:
            has = ", ".join(name for name in sample if name != "__key__")
            raise ValueError(
                f"{self.pattern}: sample {key} has {has}; an image and .cls, the class's number, "
                f"are wanted; try: a function that gives shoal.data.streams.webdataset.TarSamples"
            )
        tensor = decode_image(BytesIO(sample[picture]), self.size, f"{self.pattern}: sample {key}")
        return tensor, int(sample["cls"])


def open_index(pattern: str, where: str) -> dict[str, Any]:
    """Return the offset of every file of every sample of some shards; cached, or read now.

    Returns:
        files [files, 4] shard, ending, place, size · ends [samples] of a sample's files · classes
        [samples], −1 without .cls · keys, key_ends · shard_samples · endings.

    Raises:
        ConfigError: a shard is no plain tar.
    """
    paths = glob_files(pattern, where, "wds")
    folder = fixed_folder(pattern)
    key = content_key([Document.of(path, folder).recipe() for path in paths], "shards")

    def build(entry: NewEntry) -> dict[str, Any]:
        return _build(entry, paths)

    made, about = open_cached("shards", key, build)
    names = ("files", "ends", "classes", "keys", "key_ends", "shard_samples")
    arrays = {n: np.load(made / f"{n}.npy", mmap_mode="r", allow_pickle=False) for n in names}
    return {**arrays, **about}


def _build(entry: NewEntry, paths: Sequence[Path]) -> dict[str, Any]:
    files: list[tuple[int, int, int, int]] = []
    ends: list[int] = []
    keys: list[bytes] = []
    classes: list[int] = []
    endings: dict[str, int] = {}
    shard_samples = []
    for shard, path in enumerate(iter_with_progress("shards", len(paths), paths)):
        before, last = len(ends), None
        for name, place, size, kind in _members(path):
            key, ending = _split(name)
            if key != last:
                ends.append(len(files))
                keys.append(key.encode())
                classes.append(-1)
                last = key
            files.append((shard, endings.setdefault(ending, len(endings)), place, size))
            ends[-1] = len(files)
            classes[-1] = kind if ending == "cls" else classes[-1]
        shard_samples.append(len(ends) - before)
    if not ends:
        raise ConfigError(f"{paths[0]}: holds no sample")
    arrays: dict[str, npt.NDArray[Any]] = {
        "files": np.array(files, dtype=np.int64),
        "ends": np.array(ends, dtype=np.int64),
        "classes": np.array(classes, dtype=np.int64),
        "keys": np.frombuffer(b"".join(keys), dtype=np.uint8),
        "key_ends": np.cumsum([len(key) for key in keys]),
        "shard_samples": np.array(shard_samples, dtype=np.int64),
    }
    for name, array in arrays.items():
        entry.save_array(name, array)
    return {"endings": list(endings)}


def _split(name: str) -> tuple[str, str]:
    """Split a file's name into (sample, ending), at the first dot of the last part.

    >>> _split("a.b/001.left.jpg")
    ('a.b/001', 'left.jpg')
    """
    folder, slash, last = name.rpartition("/")
    stem, _, ending = last.partition(".")
    return f"{folder}{slash}{stem}", ending


def _members(path: Path) -> list[tuple[str, int, int, int]]:
    """Return (name, offset, size, class) of every file of a tar; the class of .cls files, else −1.

    It reads headers alone, 512 bytes each, unbuffered: a buffer would read the data after them too.
    """
    found = []
    try:
        with open(path, "rb", buffering=0) as raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            for member in tar:
                if not member.isreg():
                    continue
                kind = -1
                if member.name.endswith(".cls"):
                    text = os.pread(raw.fileno(), member.size, member.offset_data)
                    kind = int(text)
                found.append((member.name, member.offset_data, member.size, kind))
                tar.members = []  # type: ignore[attr-defined]  # else it keeps every header
    except tarfile.ReadError as error:
        raise ConfigError(
            f"{path}: is no plain tar ({error}); try: unpack it, gzip -d {path}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: a .cls that is no number: {error}") from error
    return found


def open_shards(argument: str, size: int, share: float, where: str) -> dict[str, Any]:
    """Open shards as the fields of a `Source` of images, without `collate` and `kind`.

    Raises:
        ConfigError: samples have no .cls, and as open_index.
    """
    index = open_index(argument, where)
    whole = TarSamples(argument, where=where)
    classes = np.asarray(index["classes"])
    if classes.min() < 0:
        number = int(np.argmin(classes))
        first = whole.key(number)
        raise ConfigError(
            f"{where} = wds:{argument}: sample {first} has no .cls, the class's number; try: a "
            f"function that gives shoal.data.streams.webdataset.TarSamples"
        )
    held = np.array(choose_held_out([whole.key(n) for n in range(len(classes))], share))
    sides = [np.flatnonzero(held == side) for side in (False, True)]
    train, validation = (TarImages(argument, size, side, where) for side in sides)
    count = int(classes.max()) + 1
    entropy = class_entropy(classes[sides[0]], classes[sides[1]], count)
    told = (
        f"{argument}: {len(index['shard_samples'])} shards, {len(classes)} images at "
        f"{size}×{size}, {count} classes"
    )
    names = [str(number) for number in range(count)]
    return image_source_fields(train, validation, entropy, names, size, told)
