"""The page of a run: what stands in it, that nothing of the folder becomes an element, its size."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
from html import escape
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hostile_folders import hostile_strings, plain_strings, write_hostile_folder

from shoal.base.runlog.rank_records import encode_header
from shoal.report.report_page import make_page, write_report
from shoal.report.run_contents import read_run
from shoal.report.verdict.step_seconds import ROW_FIELDS

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
    page = make_page(read_run(write_folder(tmp_path / "mine", data_wait_s=0.001)))
    found = Elements(page)
    text = " ".join(found.text)
    assert text.index("mine") < text.index("Nothing to gain") < text.index("training loss")
    assert "7.4000" in text
    assert "waits of rank 0, s" in text, "of a run without times by rank"
    assert "No times by rank were recorded" in text
    charts = [a for tag, a in found.elements if tag == "polyline"]
    assert len(charts) >= 4
    assert charts[0]["points"].count(" ") == 59


def test_a_pipeline_is_drawn_as_it_ran_in_the_newest_recorded_step(tmp_path: Path) -> None:
    """Each box stands at its own times; a run without records gets its plan at mean seconds."""
    folder = write_folder(tmp_path / "mine")
    plan = {"layout": {"pp": 2, "schedule": "gpipe"}, "batch": 8, "micro_batch": 8, "steps": 60}
    (folder / "plan.json").write_text(json.dumps(plan))
    assert "no times by rank were recorded" in make_page(read_run(folder))
    ranks = [
        {"began_s": 0.0, "actions": [["F0@0", 0.0, 0.0, 0.1], ["B0@0", 0.1, 0.4, 0.6]]},
        {"began_s": 0.0, "actions": [["F0@1", 0.0, 0.1, 0.2], ["B0@1", 0.2, 0.2, 0.4]]},
    ]
    lines = [{"step": 32, "timed_by": "host", "ranks": ranks}, {"step": 64, "ranks": [7, {}]}]
    (folder / "pipeline.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    page = make_page(read_run(folder))
    assert "as run: step 32, 2 ranks, ms" in page
    assert "backward of micro-batch 0, stage 0: 400 to 600, after a wait of 300" in page
    assert "600.0 ms, of which a rank idles 50% in the mean." in page
    assert "its records" not in page


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


def test_no_element_or_attribute_comes_from_the_folder(tmp_path: Path) -> None:
    """A page of hostile texts has the elements of the same page with plain ones, and no others."""
    pages = {}
    for kind, strings in (("hostile", hostile_strings()), ("plain", plain_strings())):
        folder = write_hostile_folder(tmp_path / kind, strings)
        run = read_run(folder)
        run.label = strings[0]
        pages[kind] = Elements(make_page(run))
    shapes = {
        kind: [(tag, tuple(attributes)) for tag, attributes in page.elements]
        for kind, page in pages.items()
    }
    assert shapes["hostile"] == shapes["plain"]
    text = "".join(pages["hostile"].text)
    assert "left out: its records" not in text
    assert text.count("onerror=") > 20, "the texts stand in the page, as texts"
    for letter in "\x00\x1b\u202e\u2066\x85":
        assert letter not in text
    data = json.loads(pages["hostile"].inside["application/json"])
    assert {curve["key"] for curve in data["curves"]} > {"loss", "sources"}


def test_every_place_of_a_folder_is_tried(tmp_path: Path) -> None:
    """All hostile strings reach the page: a place that drops its text would test nothing."""
    strings = [f"<i>{number}</i>" for number in range(200)]
    page = make_page(read_run(write_hostile_folder(tmp_path / "run", strings)))
    assert [one for one in strings if escape(one) not in page] == []
    assert "<i>" not in page


DAMAGE = {
    "empty": {"metrics.jsonl": b"", "events.jsonl": b""},
    "torn": {
        "metrics.jsonl": b'{"step":1,"loss":2.0,"lr":0.1}\n{"step":2,"lo',
        "events.jsonl": b"{",
    },
    "binary": {"metrics.jsonl": bytes(range(256)) * 40, "events.jsonl": bytes(range(256)) * 40},
    "other types": {
        "metrics.jsonl": b'{"step":1,"loss":"x","lr":[],"tokens":{},"step_s":true,"samples":"ab"}\n'
        b'{"step":2,"loss":1e999,"grad_norm":null,"metrics":[1],"comm_bytes_by_axis":{"a":3}}\n',
        "events.jsonl": b'{"event":"spike","step":"x","culprits":{"a":1}}\n'
        b'{"event":"validated","step":[],"loss":"y","by_source":[1]}\n{"event":"resumed"}\n',
        "plan.json": b'{"layout":{"dp_replicate":"x"},"placements":[3],"steps":"y","predicted":7}',
        "ranks.json": b'{"ranks":{"a":1}}',
        "experts.jsonl": b'{"step":1,"layers":{"a":[1,"x"],"b":[0,0],"c":7}}\n[]\n',
        "statistics.jsonl": b'{"step":1,"weight_norm":[1],"gradient_norm":{"a":null,"b":"x"}}\n'
        b'{"step":"x","update_ratio":{"a":1}}\n{"step":2,"update_ratio":{"a":1e999,"b":1e308}}\n',
        "devices.jsonl": b'{"devices":[1,{"index":{}}]}\n',
        "rank_steps/node-0.bin": b"SHOALRS1" + b"\xff" * 200,
    },
    "huge numbers": {
        "metrics.jsonl": b'{"step":9007199254740993,"loss":1}\n{"step":1,"loss":1e308,"tokens":1e308}\n'
        b'{"step":2,"loss":-1e308,"tokens":1e308,"step_s":1e308}\n{"step":3,"loss":5e-324}\n',
        "events.jsonl": b'{"event":"run_started","time_s":1e300}\n{"event":"validated","step":1e308,'
        b'"loss":1e308}\n',
        "plan.json": b'{"layout":{"dp_replicate":1000000000,"pp":1000},"batch":1e9,"accumulate":9}',
    },
    "deep": {"metrics.jsonl": b"[" * 100_000 + b"\n", "events.jsonl": b'{"event":"notice"}\n'},
    "out of order": {
        "metrics.jsonl": b'{"step":3,"loss":1}\n{"step":1,"loss":2}\n{"step":3,"loss":4}\n',
        "events.jsonl": b"",
    },
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_has_a_page(name: str, tmp_path: Path) -> None:
    for file, content in DAMAGE[name].items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(content)
    found = Elements(make_page(read_run(tmp_path)))
    assert tmp_path.name in "".join(found.text)
    data = json.loads(found.inside["application/json"])
    if name == "out of order":
        [series] = data["curves"][0]["series"]
        assert (series["x"], series["y"]) == ([1, 3], [2, 4])


def test_a_run_of_islands_shows_a_curve_of_each() -> None:
    found = Elements(make_page(read_run(FIXTURES / "islands")))
    data = json.loads(found.inside["application/json"])
    assert [one["label"] for one in data["curves"][0]["series"]] == ["island-0", "island-1"]
    assert "shoal report" in "".join(found.text)


PUBLISHED = {
    "uplot.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""Files of uPlot 1.6.32 in npm's package (decision 39)."""


def test_uplot_is_as_it_was_published() -> None:
    assets = resources.files("shoal.report") / "assets"
    found = {name: hashlib.sha256((assets / name).read_bytes()).hexdigest() for name in PUBLISHED}
    assert found == PUBLISHED
    assert "Leon Sorokin" in (assets / "uplot-license.txt").read_text()


def test_a_long_run_of_eight_ranks_stays_below_400_kb(tmp_path: Path) -> None:
    """From 1,200 rows on, a page has as many points as one of 100,000 steps."""
    rng, steps = np.random.default_rng(3), 1_600
    folder = tmp_path / "long"
    (folder / "rank_steps").mkdir(parents=True)
    loss = rng.normal(3, 1, steps)
    loss[777] = 31.5
    with (folder / "metrics.jsonl").open("w") as file:
        for at, values in enumerate(rng.gamma(9, 0.123, (steps, 6)).tolist()):
            names = ("grad_norm", "lr", "tokens", "step_s", "peak_memory_bytes", "mfu")
            row = {"step": at + 1, "loss": loss[at], **dict(zip(names, values, strict=True))}
            file.write(json.dumps(row) + "\n")
    spike = {"event": "spike", "step": 778, "reason": "high", "culprits": [
        {"rank": 3, "micro_batches": [1, 2], "samples": [5]}]}  # fmt: skip
    (folder / "events.jsonl").write_text(json.dumps(spike) + "\n")
    rows = np.zeros((steps, 8), np.dtype(ROW_FIELDS))
    rows["step"], rows["rank"], rows["steps"] = np.arange(1, steps + 1)[:, None], range(8), 1
    rows["seconds"] = rng.gamma(4, 0.01, (steps, 8, 8))
    (folder / "rank_steps" / "node-0.bin").write_bytes(encode_header(0) + rows.tobytes())
    page = make_page(read_run(folder))
    assert len(page.encode()) < 400_000
    found = Elements(page)
    data = json.loads(found.inside["application/json"])
    [series] = data["curves"][0]["series"]
    assert series["x"][series["y"].index(31.5)] == 778
    assert len(series["x"]) < 801
    assert data["marks"] == [[778]]
    text = "".join(found.text)
    assert "rank 3 micro-batches 1–2 samples 5" in text
    assert f"shoal data look {folder} --step 778" in text
    images = [a["src"] for tag, a in found.elements if tag == "img"]
    assert struct.unpack_from(">II", base64.b64decode(images[0].partition(",")[2]), 16) == (640, 8)
    curves = [a["points"] for tag, a in found.elements if tag == "polyline"]
    assert curves[0].count(" ") == len(series["x"]) - 1, "no point of a long curve is cut off"
