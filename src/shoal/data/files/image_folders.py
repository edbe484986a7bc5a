"""Image folders with one subfolder per class: FOLDER/CLASS/…/name.jpg; read by Pillow.

    image ──shorter side to image_size──> ──its middle, a square──> [3, size, size] float32 in 0 … 1

Classes are numbered by their folders' sorted names. A hash of its path decides whether an image is
held out, so new images move no other. Nothing is drawn at random: for augmentation write your own
dataset (pkg.mod:function), which may read this one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from shoal.base.errors import ConfigError, nearest_word
from shoal.data.files.documents import hash_fraction
from shoal.data.files.token_files import cross_entropy

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
PARTS = ("train", "training", "val", "valid", "validation", "test")
"""Folder names such as train and val, which are no classes if a folder has no others."""


def to_tensor(picture: Any, size: int) -> torch.Tensor:
    """Return a Pillow image as float32 [3, size, size] in 0 … 1: scaled, center-cropped."""
    from PIL import Image  # of the extra `data`; check_data says so where it is missing

    picture = picture.convert("RGB")
    width, height = picture.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    square = picture.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous().float() / 255


def decode_image(file: Any, size: int, name: str) -> torch.Tensor:
    """Decode the image in a file, open or by path; ValueError with `name` if it is none."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            return to_tensor(picture, size)
    except OSError as error:
        if error.errno is not None:  # the disk's, which may work again
            raise
        raise ValueError(f"{name}: is no image that can be read: {error}") from error


class ImageFolder(Dataset[Any]):
    """Images of one part of a folder: dataset[i] is (image [3, size, size], class int).

    Args:
        names: paths below `folder`.
        classes: class index of each image.
    """

    draws_nothing = True

    def __init__(self, folder: str, names: Sequence[str], classes: Sequence[int], size: int):
        self.folder, self.size = folder, size
        self.names, self.classes = list(names), list(classes)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return one image and its class; IndexError, or ValueError with a damaged file's path."""
        path = os.path.join(self.folder, self.names[index])
        return decode_image(path, self.size, path), self.classes[index]


def open_images(
    argument: str, size: int, share: float, where: str, known: Sequence[str] | None = None
) -> dict[str, Any]:
    """Open an image folder as the fields of a `Source`, without `collate` and `kind`.

    Args:
        known: classes of the training data, if this is the validation data.

    Raises:
        ConfigError: the folder has no classes or images, or parts such as train/ and val/, or a
            class that the training data lacks.
    """
    folder = str(Path(argument).expanduser())
    names = class_names(folder, argument, where)
    if known is not None:
        _check_known(names, known, f"{where} = images:{argument}")
    order = list(known or names)
    found = [(name, order.index(c)) for c in names for name in _images_below(folder, c)]
    if not found:
        raise ConfigError(
            f"{where} = images:{argument}: no image in {', '.join(names[:3])}; images end in "
            f"{', '.join(ENDINGS)}"
        )
    held = choose_held_out([name for name, _ in found], share)
    sides = [[one for one, out in zip(found, held, strict=True) if out is s] for s in (False, True)]
    train, validation = (
        ImageFolder(folder, [n for n, _ in side], [c for _, c in side], size) for side in sides
    )
    entropy = class_entropy(train.classes, validation.classes, len(order))
    told = (
        f"{argument}: {len(found)} images at {size}×{size}, {len(order)} classes "
        f"({', '.join(order[:3])}{', …' if len(order) > 3 else ''})"
    )
    return image_source_fields(train, validation, entropy, order, size, told)


def class_names(folder: str, argument: str, where: str) -> list[str]:
    """Return the sorted class folders of a folder; ConfigError, as open_images."""
    names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and e.name[0] != ".")
    if not names:
        raise ConfigError(
            f"{where} = images:{argument}: has no folders; images lie in one folder for each "
            f"class: {argument}/CLASS/name.jpg"
        )
    if len(names) > 1 and all(name in PARTS for name in names):
        first = next((name for name in names if name.startswith("train")), names[0])
        other = next(name for name in names if name != first)
        raise ConfigError(
            f"{where} = images:{argument}: has {', '.join(names)}, which are parts, not classes; "
            f"try: data.source=images:{os.path.join(argument, first)} "
            f"data.validation=images:{os.path.join(argument, other)}"
        )
    return names


def _check_known(names: Sequence[str], known: Sequence[str], where: str) -> None:
    for name in names:
        if name not in known:
            close = nearest_word(name, known)
            hint = f"try: {close}" if close else f"it has {', '.join(known[:5])}"
            raise ConfigError(f"{where}: class {name} is none of the training data's; {hint}")


def _images_below(folder: str, name: str) -> list[str]:
    """Return sorted paths below `folder` of one class's images: the same on every machine."""
    found = []
    for here, _, files in os.walk(os.path.join(folder, name), followlinks=True):
        below = os.path.relpath(here, folder).replace(os.sep, "/")
        found += [f"{below}/{f}" for f in files if f.lower().endswith(ENDINGS) and f[0] != "."]
    return sorted(found)


def choose_held_out(names: Sequence[str], share: float) -> list[bool]:
    """Return which names are held out, by a hash; of two or more at least one, never all."""
    if share <= 0 or len(names) < 2:
        return [False] * len(names)
    places = [hash_fraction(name) for name in names]
    ranked = sorted(places)
    count = min(max(1, sum(place < share for place in places)), len(names) - 1)
    return [place <= ranked[count - 1] for place in places]


def image_source_fields(
    train: Any, held: Any, entropy: float, classes: Sequence[str], size: int, told: str
) -> dict[str, Any]:
    """Return the fields of a `Source` of images with classes, without `collate` and `kind`.

    Args:
        told: description of the data, for the run's first lines.
    """
    kept = f"{len(held)} held out" if len(held) else "none held out"
    return {
        "train": train,
        "validation": held if len(held) else None,
        "vocabulary": None,
        "tokenizer": None,
        "unigram_entropy": entropy,
        "description": f"{told}; {kept}",
        "classes": tuple(classes),
        "image": (3, size),
    }


def class_entropy(train: Any, held: Any, classes: int) -> float:
    """Return nats per image of guessing by the training data's class frequencies."""
    counts = [
        np.bincount(np.array(one, int), minlength=classes)
        for one in (train, held if len(held) else train)
    ]
    return cross_entropy(counts[0], counts[1])


def check_model(name: str, wanted: dict[str, int], given: dict[str, Any]) -> None:
    """Refuse a built-in model whose arguments do not fit the images, before its first batch.

    Args:
        wanted: classes, image_channels, image_size of the data.
        given: the model's own arguments.

    Raises:
        ConfigError: an argument differs; with the keys to set.
    """
    differ = {key: n for key, n in wanted.items() if key in given and given[key] != n}
    if "classes" in differ and given["classes"] > wanted["classes"]:
        del differ["classes"]  # more than there are: allowed
    if differ:
        has = ", ".join(f"{key} {given[key]}" for key in differ)
        near = " ".join(f"model.{key}={n}" for key, n in differ.items())
        raise ConfigError(f"model.name = {name}: has {has}, the data is other; try: {near}")
