"""Image folders: classes, what is held out, and pixels; what needs Pillow has the marker `proof`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.base.errors import ConfigError, UserError
from shoal.config.sections import DataSection
from shoal.data.files.image_folders import ImageFolder, check_model, choose_held_out, open_images
from shoal.data.loading.loader import Loader
from shoal.data.sources import open_source


def folder(at: Path, classes: dict[str, int]) -> Path:
    """Images by name alone; listing them opens none."""
    for name, count in classes.items():
        (at / name).mkdir(parents=True)
        for number in range(count):
            (at / name / f"{number}.png").write_bytes(b"")
    return at


def test_every_image_is_on_one_side_and_added_ones_move_no_other(tmp_path: Path) -> None:
    at = folder(tmp_path / "pets", {"cat": 40, "ant": 40})
    (at / "cat" / "notes.txt").write_text("no image")
    before = open_images(str(at), 8, 0.25, "data.source")
    train, held = before["train"], before["validation"]
    assert len({*train.names, *held.names}) == len(train) + len(held) == 80
    assert 8 <= len(held) <= 32
    assert {n.split("/")[0]: c for n, c in zip(train.names, train.classes, strict=True)} == {
        "ant": 0, "cat": 1,
    }  # fmt: skip
    folder(at / "more", {"dog": 40})
    after = open_images(str(at), 8, 0.25, "data.source")
    assert set(held.names) <= set(after["validation"].names)
    assert set(train.names) <= set(after["train"].names)


def test_both_sides_have_an_image() -> None:
    assert sum(choose_held_out(["a", "b", "c"], 1e-9)) == 1
    assert sum(choose_held_out(["a", "b", "c"], 0.999999)) == 2
    assert choose_held_out(["a"], 0.5) == [False]


@pytest.mark.parametrize(
    ("classes", "line"),
    [
        ({}, "data.source = images:PICS: has no folders; images lie in one folder for each class: "
         "PICS/CLASS/name.jpg"),
        ({"cat": 0, "dog": 0}, "data.source = images:PICS: no image in cat, dog; images end in "),
        ({"train": 1, "val": 1}, "data.source = images:PICS: has train, val, which are parts, not "
         "classes; try: data.source=images:PICS/train data.validation=images:PICS/val"),
    ],
)  # fmt: skip
def test_a_folder_that_is_none_is_one_line(
    tmp_path: Path, classes: dict[str, int], line: str
) -> None:
    at = folder(tmp_path / "pics", classes)
    at.mkdir(exist_ok=True)
    with pytest.raises(ConfigError) as caught:
        open_images(str(at), 8, 0.1, "data.source")
    assert str(caught.value).startswith(line.replace("PICS", str(at)))


def test_classes_are_numbered_as_in_training(tmp_path: Path) -> None:
    at = folder(tmp_path / "val", {"cat": 2})
    found = open_images(str(at), 8, 0.0, "data.validation", ("ant", "cat"))
    assert found["train"].classes == [1, 1]
    with pytest.raises(ConfigError, match=r"class cat is none of the training data's; try: ct"):
        open_images(str(at), 8, 0.0, "data.validation", ("ant", "ct"))


def test_a_model_for_other_images_is_one_line() -> None:
    wanted = {"classes": 3, "image_channels": 3, "image_size": 64}
    check_model("resnet", wanted, {"classes": 10, "image_channels": 3, "width": 1})
    with pytest.raises(ConfigError) as caught:
        check_model("vit", wanted, {"classes": 2, "image_channels": 3, "image_size": 8})
    assert str(caught.value) == (
        "model.name = vit: has classes 2, image_size 8, the data is other; try: "
        "model.classes=3 model.image_size=64"
    )


def test_folders_of_other_classes_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # no image is opened
    for name, classes in (("a", ("cat", "dog")), ("b", ("cow", "dog")), ("c", ("cat", "dog"))):
        folder(tmp_path / name, dict.fromkeys(classes, 4))
    mixed = f"mix:0.5*images:{tmp_path}/a+0.5*images:{tmp_path}/"
    assert len(open_source(DataSection(source=f"{mixed}c", image_size=4), 0).train)
    with pytest.raises(ConfigError, match=r"has the classes cow, dog, .* has cat, dog; try: "):
        open_source(DataSection(source=f"{mixed}b", image_size=4), 0)


@pytest.mark.proof
def test_pixels_are_scaled_and_the_middle_is_cut(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:, 4:12, 0], pixels[:, :4, 1] = 255, 255  # red in the middle, green at the left
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    section = DataSection(source=f"images:{tmp_path}", image_size=4, validation="0")
    source = open_source(section, 0)
    picture, kind = source.train[3]
    assert (picture.shape, kind, source.classes) == ((3, 4, 4), 1, ("a", "b"))
    assert picture[0].min() > 0.8, "at the edges the filter sees a pixel beyond"
    assert picture[0, :, 1:3].eq(1).all()
    assert picture[1:, :, 1:3].eq(0).all()
    grey = tmp_path / "a" / "0.png"
    image.fromarray(pixels[:, :, 0]).save(grey)
    assert source.train[0][0].shape == (3, 4, 4)
    grey.write_bytes(grey.read_bytes()[:60])
    (tmp_path / "a" / "1.png").write_bytes(b"no image")
    data = ImageFolder(str(tmp_path), ["a/0.png", "a/1.png"], [0, 0], 4)
    for number in range(2):
        with pytest.raises(UserError, match=rf"a/{number}\.png: is no image that can be read"):
            list(Loader(_One(data, number), batch=1, micro_batch=1, seed=0))


class _One:
    def __init__(self, data: Any, number: int) -> None:
        self.data, self.number = data, number

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self.data[self.number]
