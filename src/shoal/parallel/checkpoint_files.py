"""Which tensors still lie in the files of a checkpoint, mapped into memory and read when used.

safetensors maps its files: a tensor that `from_pretrained` neither converts nor merges is a view of
its file's pages, which the system reads when somebody looks at them. Where such a tensor lies is
enough for other processes of the machine to map it too (shared_build.py).

Protocol  /proc/self/smaps: a private mapping of a file without anonymous pages was never written
          into, so what is seen there is what the file holds
Limits    one written page, anywhere in a file, and none of its tensors counts as its own; Linux
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

SMAPS = Path("/proc/self/smaps")
"""Where Linux shows what a process has mapped."""


def checkpoint_of(module: nn.Module) -> Path | None:
    """The folder whose safetensors a model, or a part of one, was made from."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    for part in module.modules():
        if isinstance(part, PreTrainedModel) and part.name_or_path:
            folder = Path(part.name_or_path)
            if next(folder.glob("*.safetensors"), None) is not None:
                return folder
    return None


@contextmanager
def pretrained_shapes() -> Iterator[None]:
    """Inside, transformers' own `from_pretrained` builds a model from its config, without weights.

    For the meta device, where it refuses to load: whoever calls it has the weights from elsewhere,
    and holds names, shapes and formats against them. Nothing happens where transformers was not
    imported. What was asked for beside the config's own settings stays with the config.
    """
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import PreTrainedModel

    def of_shapes(cls: Any, path: Any = None, *_: Any, config: Any = None, **more: Any) -> Any:
        told, dtype = more.pop("output_loading_info", False), more.pop("dtype", None)
        dtype = more.pop("torch_dtype", None) or dtype
        if config is None:
            config = cls.config_class.from_pretrained(path, **more)
        kept = {key: more[key] for key in more if key.endswith("_implementation")}
        kept |= {"dtype": getattr(config, "dtype", None) if dtype in (None, "auto") else dtype}
        model = cls._from_config(config, **kept).eval()
        return (model, {}) if told else model

    own = PreTrainedModel.__dict__["from_pretrained"]
    setattr(PreTrainedModel, "from_pretrained", classmethod(of_shapes))  # noqa: B010 (for mypy)
    try:
        yield
    finally:
        setattr(PreTrainedModel, "from_pretrained", own)  # noqa: B010


@contextmanager
def opened_unread() -> Iterator[None]:
    """Inside, safetensors files are opened without reading more of them than is looked at.

    Whoever opens one looks at its header and at each tensor's first page, of the file as it is
    mapped: the system would read as much around each as the disk reads ahead, up to all of it.
    Pages that are there already make it read nothing. Nothing happens without safetensors.
    """
    own: Any = getattr(sys.modules.get("safetensors"), "safe_open", None)

    def opened(path: Any, *given: Any, **named: Any) -> Any:
        with suppress(OSError, TypeError, ValueError):  # the library says better what is wrong
            _read_starts(path)
        return own(path, *given, **named)

    def give(given: Any, taken: Any) -> None:
        for name in OPENERS:  # transformers may have been imported inside
            if own and getattr(sys.modules.get(name), "safe_open", None) is taken:
                setattr(sys.modules[name], "safe_open", given)  # noqa: B010 (for mypy)

    give(opened, own)
    try:
        yield
    finally:
        give(own, opened)


OPENERS = ("safetensors", "safetensors.torch", "transformers.modeling_utils")
"""Modules by whose name `safe_open` files are opened."""


def _read_starts(path: Any) -> None:
    """Bring a safetensors file's header and its tensors' first pages into the page cache, alone."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        size = int.from_bytes(os.pread(file, 8, 0), "little")
        header = json.loads(os.pread(file, size, 8))
        for name, told in header.items():
            if name != "__metadata__":
                os.pread(file, 1, 8 + size + told["data_offsets"][0])
    finally:
        os.close(file)


def made_beside(module: nn.Module, folder: Path) -> list[str]:
    """Names of tensors that do not lie in files of a folder as they are saved there.

    They were converted when they were read, or merged, or are no part of the checkpoint.
    """
    paths = {str(path.resolve()) for path in folder.glob("*.safetensors")}
    read = [one for one in files_as_read() if one.path in paths]

    def lies_there(tensor: Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr()
        return any(one.start <= at < one.stop for one in read)

    return [name for name, p in module.named_parameters() if p.numel() and not lies_there(p)]


def said_of_files(module: nn.Module, folder: Path | None) -> list[str]:
    """The line on a checkpoint of which not every process can read its part alone."""
    if folder is None or not SMAPS.exists():
        return []
    names = made_beside(module, folder)
    if not names:
        return []
    from shoal.base.units import bytes_text

    sizes = {n: p.numel() * p.element_size() for n, p in module.named_parameters()}
    made_bytes = sum(sizes[name] for name in names)
    return [
        f"model: {bytes_text(made_bytes)} of {bytes_text(sum(sizes.values()))} are not in the "
        f"files of {folder} as the model holds them (another format, merged, or missing), first: "
        f"{names[0]}; one process of each machine reads those whole, every process its part of the "
        f"rest; nearest: save_pretrained of the model as it is built"
    ]


@dataclass(frozen=True)
class AsRead:
    """A file that is mapped privately, and into which nothing was written.

    start, stop   addresses · offset  of the file's part there · node  of the file
    """

    start: int
    stop: int
    offset: int
    node: int
    path: str

    def place(self, address: int) -> int:
        """Where in the file an address is."""
        return self.offset + address - self.start


MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (r..p) ([0-9a-f]+) \S+ (\d+) +(/.*)")
"""First line of a mapping in smaps, of a file, private."""


def files_as_read() -> list[AsRead]:
    """Every file that this process maps privately and has not written into."""
    found, last = [], None
    for line in SMAPS.read_text().splitlines():
        if told := MAPPING.fullmatch(line):
            start, stop, _, offset, node, path = told.groups()
            last = AsRead(int(start, 16), int(stop, 16), int(offset, 16), int(node), path)
            last = None if path.endswith(" (deleted)") else last
        elif line[0] in "0123456789abcdef":
            last = None
        elif line.startswith("Anonymous:") and last is not None and int(line.split()[1]) == 0:
            found.append(last)
    return found
