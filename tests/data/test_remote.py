"""Remote folders are copied once and then read as local ones; what changes there is copied anew."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from shoal.base.errors import ConfigError
from shoal.config.paths import check_data
from shoal.config.sections import DataSection
from shoal.data.sources import open_source

MORE: dict[str, Any] = {"tokenizer": "bpe:300", "sequence": 16, "validation": "0.2"}


def lines(word: str) -> str:
    return "".join(json.dumps({"text": f"{word} {n} is {n * n}"}) + "\n" for n in range(60))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/web/{name}/a.jsonl": lines(name).encode() for name in ("one", "two")})
    yield memory
    memory.rm("/web", recursive=True)


def samples(source: str, **more: Any) -> list[str]:
    opened = open_source(DataSection(source=source, **{**MORE, **more}), 0)
    return [str(side[n]) for side in (opened.train, opened.validation) for n in range(len(side))]


def test_a_remote_source_is_the_local_one(store: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "web" / name).mkdir(parents=True)
        (tmp_path / "web" / name / "a.jsonl").write_text(lines(name))
    here = samples(f"jsonl:{tmp_path}/web/*/a.jsonl")
    assert samples("jsonl:memory://web/*/a.jsonl") == here
    assert samples(f"jsonl:file://{tmp_path}/web/*/a.jsonl") == here
    mixed = samples("mix:0.5*jsonl:memory://web/one/*.jsonl+0.5*jsonl:memory://web/two/*.jsonl")
    assert len(mixed)
    second = samples("jsonl:memory://web/one/*.jsonl", validation="jsonl:memory://web/two/*.jsonl")
    assert len(second)


def test_it_is_copied_once_and_anew_where_it_changed(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    get = type(store).get
    monkeypatch.setattr(
        type(store), "get", lambda self, some, *to: (copied.extend(some), get(self, some, *to))
    )
    before = [samples("jsonl:memory://web/one/*.jsonl") for _ in range(2)]
    assert (before[0], copied) == (before[1], ["/web/one/a.jsonl"])
    store.pipe("/web/one/a.jsonl", lines("three").encode())
    assert samples("jsonl:memory://web/one/*.jsonl") != before[0]
    assert len(copied) == 2


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("jsonl:memory://web/none/*.jsonl", "no file there"),
        ("images:memory://nowhere", "is read by PIL|no file there"),
        ("text:memry://web/*", "Protocol not known: memry"),
    ],
)
@pytest.mark.usefixtures("store")
def test_what_is_not_there_is_one_line(source: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        open_source(DataSection(source=source), 0)


def test_nothing_is_written_outside_of_the_cache(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing is what a stranger says."""
    listed = {"/web/one/../../../out.jsonl": {"type": "file", "size": 1}}
    monkeypatch.setattr(type(store), "glob", lambda *_, **__: listed)
    with pytest.raises(ConfigError, match="would lie outside of the folder it is copied to"):
        samples("jsonl:memory://web/one/*.jsonl")


def test_nothing_remote_is_asked_before_a_run_starts() -> None:
    check_data(DataSection(source="jsonl:s3://no-such-bucket/*.jsonl"))


@pytest.mark.proof
def test_over_http(store: Any, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.jsonl").write_text(lines("one"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/one/*.jsonl"
        found = samples(f"jsonl:{address}")
        server.shutdown()
    assert found == samples("jsonl:memory://web/one/*.jsonl")
