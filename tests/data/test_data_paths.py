"""The check before any process starts: one line for a path that is not there, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.base.errors import ConfigError
from shoal.config.paths import check_data, check_data_path, load_function
from shoal.config.sections import DataSection


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("books/old").mkdir(parents=True)
    Path("books/a.txt").write_text("a")
    Path("tokens").mkdir()
    Path("tokens/train.bin").write_bytes(b"\0\0")
    Path("empty").mkdir()
    Path("my_package").mkdir()
    Path("my_package/__init__.py").write_text("raise RuntimeError('must not be imported')")
    Path("my_package/data.py").write_text("raise RuntimeError('must not be imported')")


@pytest.mark.parametrize(
    "source",
    [
        "stdlib",
        "digits",
        "synthetic",
        "text:books/*.txt",
        "text:books/**/*.txt",
        "text:books/a.txt",
        "tokens:tokens",
        "my_package.data:make",
        "json.decoder:make",
        "sys:exit",
        "__main__:make",
    ],
)
def test_what_is_there_passes(source: str) -> None:
    check_data_path(source)
    assert "my_package" not in sys.modules


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("stdlb", "data.source = stdlb: not one of stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB, "
         "hf:FOLDER, tokens:FOLDER, images:FOLDER, wds:GLOB, digits, synthetic, mix:0.7*SOURCE+0.3*SOURCE, pkg.mod:function; try: stdlib"),
        ("digit:3", "data.source = digit:3: not one of stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB, "
         "hf:FOLDER, tokens:FOLDER, images:FOLDER, wds:GLOB, digits, synthetic, mix:0.7*SOURCE+0.3*SOURCE, pkg.mod:function; try: digits"),
        ("txt:books/*.txt", "data.source = txt:books/*.txt: not one of stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB, "
         "hf:FOLDER, tokens:FOLDER, images:FOLDER, wds:GLOB, digits, synthetic, mix:0.7*SOURCE+0.3*SOURCE, pkg.mod:function; try: text:books/*.txt"),
        ("text:", "data.source = text:: names no files; try: text:GLOB"),
        ("tokens", "data.source = tokens: names no files; try: tokens:FOLDER"),
        ("chats.jsonl", "data.source = chats.jsonl: names no kind; try: jsonl:chats.jsonl"),
        ("chat:a/chats.JSONL", "data.source = chat:a/chats.JSONL: names no kind; try: jsonl:a/chats.JSONL"),
        ("jsonl:", "data.source = jsonl:: names no files; try: jsonl:GLOB"),
        ("jsnl:a.jsonl", "data.source = jsnl:a.jsonl: not one of stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB, "
         "hf:FOLDER, tokens:FOLDER, images:FOLDER, wds:GLOB, digits, synthetic, mix:0.7*SOURCE+0.3*SOURCE, pkg.mod:function; try: jsonl:a.jsonl"),
        ("jsonl:books", "data.source = jsonl:books: no file matches; it is a folder without *.jsonl; try: "
         "jsonl:books/**/*.*"),
        ("jsonl:books/*.jsonl", "data.source = jsonl:books/*.jsonl: no file matches; nearest "
         "existing folder: books (has a.txt, old); try: jsonl:PATH of an existing file, as seen from CWD"),
        ("text:boks/*.txt", "data.source = text:boks/*.txt: no file matches; try: text:books/*.txt"),
        ("text:books/*.tex", "data.source = text:books/*.tex: no file matches; "
         "try: text:books/a.txt"),
        ("text:books", "data.source = text:books: no file matches; it is a folder; try: "
         "text:books/**/*.txt"),
        ("text:empty/deep/er/*.md", "data.source = text:empty/deep/er/*.md: no file matches; "
         "nearest existing folder: empty (empty); try: text:PATH of an existing file, as seen from CWD"),
        ("text:missing.txt", "data.source = text:missing.txt: no file matches; nearest existing "
         "folder: . (has books, empty, my_package, …); try: text:PATH of an existing file, as seen "
         "from CWD"),
        ("jsonl:empty", "data.source = jsonl:empty: no file matches; it is a folder without "
         "*.jsonl; try: jsonl:empty/**/*.*"),
        ("text:/dev/null", "data.source = text:/dev/null: no file matches; it is no regular file; "
         "try: text:FILE"),
        ("tokens:token", "data.source = tokens:token: no such folder; try: tokens:tokens"),
        ("tokens:empty", "data.source = tokens:empty: no train*.npy or train*.bin there (empty); "
         "try: train.npy or train.bin as the names of the training files"),
        ("tokens:books", "data.source = tokens:books: no train*.npy or train*.bin there (has "
         "a.txt, old); try: train.npy or train.bin as the names of the training files"),
        ("tokens:tokens/train.bin", "data.source = tokens:tokens/train.bin: is a file; try: "
         "tokens:tokens (holding train*.npy or train*.bin)"),
        ("my_package.dta:make", "data.source = my_package.dta:make: there is no module "
         "my_package.dta; try: my_package.data"),
        ("my_pakage.data:make", "data.source = my_pakage.data:make: there is no module my_pakage; "
         "try: my_package"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_one_line(source: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_data_path(source)
    assert str(caught.value) == text.replace("CWD", str(Path.cwd()))
    assert "my_package" not in sys.modules


def test_a_module_nowhere_near(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is looked for in .* and in installed packages"):
        check_data_path("zzqx:make")


def test_a_module_above_a_run_toml_is_suggested(tmp_path: Path) -> None:
    """A run is opened from another folder than the one in which it was started."""
    run_toml = tmp_path / "project" / "runs" / "a" / "run.toml"
    run_toml.parent.mkdir(parents=True)
    (tmp_path / "project" / "zzqx.py").touch()
    with pytest.raises(
        ConfigError, match=f"try: cd {tmp_path}/project, which has it, and the same"
    ):
        check_data_path("zzqx:make", near=run_toml)
    with pytest.raises(ConfigError, match="it is looked for in"):
        check_data_path("zzqy:make", near=run_toml)


def test_a_folder_without_modules_is_not_suggested() -> None:
    Path("zzqx-runs").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match="it is looked for in"):
        check_data_path("zzqx_run:make")


def test_missing_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_data_path("digits")
    assert str(caught.value) == (
        "data.source = digits: comes with scikit-learn, which is not installed; "
        "try: pip install 'shoal[digits]'"
    )


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (DataSection(tokenizer="bpe:100"), "data.tokenizer = bpe:100: the vocabulary is a whole "
         "number of at least 257 (256 bytes, end of text); try: bpe:257"),
        (DataSection(tokenizer="bpe:many"), "data.tokenizer = bpe:many: the vocabulary is a whole "
         "number of at least 257 (256 bytes, end of text); try: bpe:257"),
        (DataSection(tokenizer="books/b.txt"), "data.tokenizer = books/b.txt: no such file, and "
         "not bpe:VOCABULARY; try: books/a.txt"),
        (DataSection(validation="text:nowhere*"), "data.validation = text:nowhere*: no file "
         "matches; nearest existing folder: . (has books, empty, my_package, …); try: text:PATH of an "
         "existing file, as seen from CWD"),
        (DataSection(sequence=0), "data.sequence = 0: must be at least 1 token"),
        (DataSection(workers=-1), "data.workers = -1: must be at least 0 processes"),
        (DataSection(collate="my_package"), "data.collate = my_package: must be pkg.mod:function"),
    ],
)  # fmt: skip
def test_the_whole_section(section: DataSection, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_data(section)
    assert str(caught.value) == text.replace("CWD", str(Path.cwd()))


def test_load_function_gives_the_function() -> None:
    import json

    assert load_function("json:loads", "data.collate") is json.loads


def test_the_check_needs_no_torch() -> None:
    code = (
        "import sys; from shoal.config.paths import check_data_path as c; "
        "c('digits'); c('torch.nn:Linear'); "
        "assert not {'torch', 'sklearn', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
