"""What a killed compiler left in torch's cache is removed, and nothing else is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from shoal.parallel.compiling.compile_cache import remove_truncated_libraries

LIBRARY = Path(torch._C.__file__)
"""A shared library of a few KiB."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    for name in ("whole", "half", "empty", "zeros"):
        (tmp_path / name[:2]).mkdir()
        shutil.copy(LIBRARY, tmp_path / name[:2] / f"{name}.main.so")
    size = LIBRARY.stat().st_size
    with (tmp_path / "ha" / "half.main.so").open("r+b") as file:
        file.truncate(size // 2)
    (tmp_path / "em" / "empty.main.so").write_bytes(b"")
    (tmp_path / "ze" / "zeros.main.so").write_bytes(bytes(size))
    (tmp_path / "locks").mkdir()
    return tmp_path


def test_only_half_written_libraries_go(cache: Path) -> None:
    gone = {path.name for path in remove_truncated_libraries(cache)}
    assert gone == {"half.main.so", "empty.main.so", "zeros.main.so"}
    assert [path.name for path in cache.glob("*/*.so")] == ["whole.main.so"]
    assert remove_truncated_libraries(cache) == []


def test_one_that_is_being_written_is_left_to_its_writer(cache: Path) -> None:
    with FileLock(cache / "locks" / "half.lock"):
        gone = {path.name for path in remove_truncated_libraries(cache)}
    assert gone == {"empty.main.so", "zeros.main.so"}


def test_a_cache_that_is_not_there_yet_is_none(tmp_path: Path) -> None:
    assert remove_truncated_libraries(tmp_path / "never") == []
