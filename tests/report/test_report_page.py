"""The page of a run: what stands in it, that nothing of the folder becomes an element, its size."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shoal.report.report_page import make_page, write_report
from shoal.report.run_contents import read_run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "run_folders" / "runs"


class Elements(HTMLParser):
    """Every element with its attributes, and the text of the page outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.inside: dict[str, str] = {}
        self._open = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            kind = self.elements[-1][1].get("type") or self.cdata_elem
            self.inside[kind] = self.inside.get(kind, "") + data
        else:
            self.text.append(data)


def write_folder(path: Path, steps: int = 60, **row: object) -> Path:
    """A small run folder."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record = {
                "step": step,
                "loss": 8 - step / 100,
                "grad_norm": 1.0,
                "lr": 1e-3,
                "tokens": 64,
            }
            record |= {
                "step_s": 0.1,
                "tokens_per_s": 640.0,
                "samples": [8 * step, 8 * step + 8],
                **row,
            }
            file.write(json.dumps(record) + "\n")
    events = [{"time_s": 1.8e9, "event": "run_started", "processes": 2, "layout": "ddp"}]
    (path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    return path


def test_a_page_has_the_verdict_first_the_loss_and_the_tables(tmp_path: Path) -> None:
    page = make_page(read_run(write_folder(tmp_path / "mine")))
    found = Elements(page)
    text = " ".join(found.text)
    assert text.index("mine") < text.index("Nothing to gain") < text.index("training loss")
    assert "7.4000" in text
    charts = [a for tag, a in found.elements if tag == "polyline"]
    assert len(charts) >= 4
    assert charts[0]["points"].count(" ") == 59


def test_the_policy_allows_the_page_its_own_script_and_style(tmp_path: Path) -> None:
    found = Elements(make_page(read_run(write_folder(tmp_path / "mine"))))
    policy = next(a["content"] for tag, a in found.elements if a.get("http-equiv"))
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(found.inside[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert json.loads(found.inside["application/json"])["curves"][0]["key"] == "loss"


def test_nothing_is_loaded_and_no_element_has_a_style_or_a_handler(tmp_path: Path) -> None:
    for tag, attributes in Elements(make_page(read_run(write_folder(tmp_path / "mine")))).elements:
        assert not {"style", "srcset"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "action"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)


@pytest.mark.parametrize("folder", sorted(FIXTURES.iterdir()), ids=lambda path: path.name)
def test_folders_of_older_versions_have_a_page(folder: Path) -> None:
    text = " ".join(Elements(make_page(read_run(folder))).text)
    assert folder.name in text
    assert re.search("no verdict|[Nn]othing|killed|no end", text)


def test_a_folder_that_cannot_be_written_gets_its_page_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shoal.report.report_page as module

    folder, write = write_folder(tmp_path / "mine"), module.write_atomically

    def refuse(path: Path, text: str) -> None:
        if path.parent == folder:
            raise PermissionError(13, "Permission denied")
        write(path, text)

    monkeypatch.setattr(module, "write_atomically", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = write_report(folder)
    assert path.name == "mine.html"
    assert tmp_path in path.parents
    assert "<!doctype html>" in path.read_text()
