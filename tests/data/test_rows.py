"""Parquet and HF datasets give what the same rows give as JSON lines; proof: their libraries."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.config.paths import check_data_path
from shoal.config.sections import DataSection
from shoal.data.loading.iterable import IterableLoader
from shoal.data.sources import open_source

FORMS: dict[str, list[dict[str, Any]]] = {
    "text": [{"id": n, "text": f"the tide number {n} is {n * n} high\n"} for n in range(120)],
    "pair": [{"prompt": f"say {n}: ", "completion": f"{n * n}"} for n in range(120)],
    "chat": [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]}
        for n in range(120)
    ],
}  # fmt: skip


def section(source: str, **more: Any) -> DataSection:
    return DataSection(source=source, validation="0.2", tokenizer="bpe:300", sequence=16, **more)


def content(source: Any) -> list[list[str]]:
    """All samples of both sides, as text."""
    return [[str(side[n]) for n in range(len(side))] for side in (source.train, source.validation)]


@pytest.fixture
def as_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for form, rows in FORMS.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{form}.jsonl").write_text(lines)
    return tmp_path


@pytest.mark.proof
@pytest.mark.parametrize("form", FORMS)
def test_parquet_gives_what_json_lines_give(as_lines: Path, form: str) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist(FORMS[form])
    parquet.write_table(table, as_lines / f"{form}.parquet", row_group_size=50)
    plain = open_source(section(f"jsonl:{as_lines}/{form}.jsonl"), 0)
    columns = open_source(section(f"parquet:{as_lines}/{form}.parquet"), 0)
    assert content(columns) == content(plain)
    assert len(columns.validation)


@pytest.mark.proof
@pytest.mark.parametrize("form", FORMS)
def test_hf_datasets_give_what_json_lines_give(as_lines: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(FORMS[form])
    made.save_to_disk(as_lines / "saved")
    datasets.DatasetDict({"train": made, "rest": made.select(range(9))}).save_to_disk(
        as_lines / "parts"
    )
    (as_lines / "files").mkdir()
    made.to_parquet(as_lines / "files" / "train-00000-of-00001.parquet")
    plain = content(open_source(section(f"jsonl:{as_lines}/{form}.jsonl"), 0))
    for name in ("saved", "parts", "files", "parts#train"):
        assert content(open_source(section(f"hf:{as_lines}/{name}"), 0)) == plain, name
    parts = section(f"hf:{as_lines}/parts")
    second = replace(parts, validation=f"hf:{as_lines}/parts#rest")
    assert len(open_source(second, 0).validation) < len(plain[0])
    with pytest.raises(ConfigError, match=r"split = rst: not one of train, rest; try: rest"):
        open_source(section(f"hf:{as_lines}/parts#rst"), 0)


@pytest.mark.proof
def test_rows_of_another_form_are_told_by_file_and_number(as_lines: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [*FORMS["text"][:70], {"id": 70, "text": None}]
    parquet.write_table(arrow.Table.from_pylist(rows), as_lines / "none.parquet")
    with pytest.raises(ConfigError, match=r"none\.parquet: row 71: text is NoneType, a text is"):
        open_source(section(f"parquet:{as_lines}/none.parquet"), 0)
    parquet.write_table(arrow.Table.from_pylist([{"txt": "a"}]), as_lines / "key.parquet")
    with pytest.raises(ConfigError, match=r"row 1: has txt; .*; try: data\.field=txt"):
        open_source(section(f"parquet:{as_lines}/key.parquet"), 0)
    with pytest.raises(ConfigError, match=r"row 1: has no text; nearest key: txt"):
        open_source(section(f"parquet:{as_lines}/key.parquet", field="text"), 0)
    whole = (as_lines / "none.parquet").read_bytes()
    (as_lines / "short.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"short\.parquet: row 1: cannot be read: "):
        open_source(section(f"parquet:{as_lines}/short.parquet"), 0)


@pytest.mark.proof
def test_hf_images_are_samples(as_lines: Path) -> None:
    datasets, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    pictures = [image.fromarray(np.full((6, 6, 3), n, dtype=np.uint8)) for n in range(50)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["even", "odd"])}
    )
    rows = {"image": pictures, "label": [n % 2 for n in range(50)]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(as_lines / "images")
    source = open_source(DataSection(f"hf:{as_lines}/images", validation="0.2", image_size=6), 0)
    assert (source.classes, source.image, source.kind) == (("even", "odd"), (3, 6), "samples")
    seen = [side[n] for side in (source.train, source.validation) for n in range(len(side))]
    values = [round(float(picture.mean()) * 255) for picture, _ in seen]
    assert sorted(values) == list(range(50))
    assert [kind for _, kind in seen] == [value % 2 for value in values]
    assert torch.equal(seen[0][0], source.train[0][0])


@pytest.mark.proof
def test_a_streaming_dataset_gives_each_sample_once_over_a_resume(as_lines: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for part in range(3):
        rows = {"id": list(range(part * 40, part * 40 + 40))}
        datasets.Dataset.from_dict(rows).to_parquet(as_lines / f"part{part}.parquet")

    def world(degree: int) -> list[IterableLoader]:
        files = str(as_lines / "part*.parquet")
        made = [
            datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
            for _ in range(degree)
        ]
        given = {"batch": 8, "micro_batch": 2, "seed": 0, "degree": degree}
        return [IterableLoader(one, rank=rank, **given) for rank, one in enumerate(made)]

    def ids(loaders: list[IterableLoader], steps: int) -> list[int]:
        taken = [batch for one in loaders for batch in itertools.islice(one, steps)]
        return [int(n) for batch in taken for value in batch.values for n in value["id"]]

    first, second = world(2), world(4)
    seen = ids(first, 5)
    for loader in second:
        loader.restore(first[0].state())
    seen += ids(second, 100)
    assert sorted(seen) == list(range(120))


def test_a_missing_library_is_one_line_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for source, module in (("parquet:a", "pyarrow"), ("hf:a", "datasets"), ("images:a", "PIL")):
        with pytest.raises(ConfigError) as caught:
            check_data_path(source)
        assert str(caught.value) == (
            f"data.source = {source}: is read by {module}, which is not installed; "
            f"try: pip install 'shoal[data]'"
        )
