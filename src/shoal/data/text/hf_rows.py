"""Local datasets of the library `datasets`, as rows or as images.

    hf:FOLDER            saved by `save_to_disk`, or a dataset's files as the Hub has them
    hf:FOLDER#SPLIT      one split of it; else the only one, or `train`

A run reads local files and uses no hub: ranks would download in parallel, and a dataset may change
there. Files in other formats than the library's own are converted once, into the cache folder. Then
rows are memory-mapped, not read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from shoal.base.errors import ConfigError, format_choice_error, nearest_word
from shoal.base.runlog.atomic_files import cache_folder


@lru_cache(maxsize=4)  # the form, the tokenizer's share and both sides read the same one
def open_split(argument: str, where: str) -> Any:
    """Open the `datasets.Dataset` of FOLDER or FOLDER#SPLIT.

    Raises:
        ConfigError: the library cannot read the folder, the split is unknown, or there are several
            splits and none is `train`.
    """
    import datasets  # of the extra `data`; check_data says so where it is missing

    folder, _, split = argument.partition("#")
    path = Path(folder).expanduser()
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()  # ranks would draw over each other
    try:
        if saved:
            made = datasets.load_from_disk(str(path))
        else:
            made = datasets.load_dataset(str(path), cache_dir=str(cache_folder() / "hf"))
    except Exception as error:  # the library raises whatever it meets
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{where} = hf:{argument}: cannot be read: {said[0]}") from error
    finally:
        if shown:
            datasets.enable_progress_bars()
    if not isinstance(made, dict):
        made = {split or str(made.split or "train"): made} if not split else {str(made.split): made}
    names = list(made)
    chosen = split or (names[0] if len(names) == 1 else "train")
    if chosen not in made:
        if split:
            raise ConfigError(format_choice_error(f"{where} = hf:{folder}: split", split, names))
        raise ConfigError(
            f"{where} = hf:{folder}: has the splits {', '.join(names)}; try: "
            f"hf:{folder}#{nearest_word('train', names) or names[0]}"
        )
    return made[chosen]


def document_fields(argument: str, where: str) -> dict[str, Any]:
    """Return the fields of a `Document`; size and time are those of all files in the folder."""
    folder = Path(argument.partition("#")[0]).expanduser()
    stats = [path.stat() for path in sorted(folder.rglob("*")) if path.is_file()]
    if not stats:
        raise ConfigError(f"{where} = hf:{argument}: the folder is empty")
    return {
        "name": argument.partition("#")[2] or "default",
        "path": argument,
        "size_bytes": sum(stat.st_size for stat in stats),
        "modified_ns": max(stat.st_mtime_ns for stat in stats),
    }


def read_hf(argument: str, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`FOLDER: row N`, object) of every row, N from 1.

    Args:
        keys: columns to read; none, or one that the dataset lacks: all columns.
    """
    for number, row in enumerate(_open_columns(argument, keys), 1):
        yield f"{argument}: row {number}", row


def _open_columns(argument: str, keys: Sequence[str]) -> Any:
    data = open_split(argument, "data.source")
    known = keys and set(keys) <= set(data.column_names)
    return data.select_columns(list(keys)) if known else data


def read_spread(
    argument: str, keys: Sequence[str], share: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`FOLDER: row N`, object) of about so large a share of the rows, evenly spread."""
    data = _open_columns(argument, keys)
    for number in range(len(data)):
        if int((number + 1) * share) > int(number * share):
            yield f"{argument}: row {number + 1}", data[number]


def open_hf_images(argument: str, size: int, share: float, where: str) -> dict[str, Any] | None:
    """Open rows with image and class as the fields of a `Source`; None if they have none.

    Raises a ConfigError if the class of a row is no number.
    """
    import datasets

    from shoal.data.files.image_folders import choose_held_out, class_entropy, image_source_fields

    data = open_split(argument, where)
    of = data.features
    images = [key for key, kind in of.items() if isinstance(kind, datasets.Image)]
    labels = [key for key, kind in of.items() if isinstance(kind, datasets.ClassLabel)]
    if not images or not labels:
        return None
    held = np.array(choose_held_out([str(number) for number in range(len(data))], share))
    classes = list(data.with_format(None)[labels[0]])
    sides = [np.flatnonzero(held == side) for side in (False, True)]
    train, validation = (HfImages(data, (images[0], labels[0]), size, side) for side in sides)
    names = tuple(of[labels[0]].names)
    counted = [[classes[n] for n in side] for side in sides]
    entropy = class_entropy(counted[0], counted[1], len(names))
    told = f"{argument}: {len(data)} images at {size}×{size}, {len(names)} classes"
    return image_source_fields(train, validation, entropy, names, size, told)


class HfImages(Dataset[Any]):
    """Rows with an image and a class as (image [3, size, size] float32 in 0 … 1, class int).

    Args:
        numbers: rows of this part.
    """

    draws_nothing = True

    def __init__(self, data: Any, keys: tuple[str, str], size: int, numbers: Any) -> None:
        self.data, self.keys, self.size, self.numbers = data, keys, size, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def whole_index(self, index: int) -> int:
        """Return the row's number in the dataset."""
        return int(self.numbers[index])

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return image and class of one row; IndexError, and the decoder's errors."""
        from shoal.data.files.image_folders import to_tensor

        row = self.data[int(self.numbers[index])]
        return to_tensor(row[self.keys[0]], self.size), int(row[self.keys[1]])
