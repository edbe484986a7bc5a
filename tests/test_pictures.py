"""Pictures of the documentation show what Shoal draws today: their data are compared, no pixels."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import pictures
from shoal.report.verdict import find_verdict
from svg_pictures import read_digest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", pictures.DRAWINGS)
def test_a_picture_has_the_data_of_today(name: str) -> None:
    drawn = pictures.DRAWINGS[name]()
    kept = (pictures.PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    assert read_digest(drawn), "no digest"
    assert read_digest(kept) == read_digest(drawn), "try: make pictures"


def test_another_number_of_a_run_is_another_digest(
    tmp_path: Path,
) -> None:
    run = tmp_path / "slow-data"
    shutil.copytree(pictures.SLOW, run)
    rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    row = json.loads(rows[40])
    rows[40] = json.dumps({**row, "loss": row["loss"] + 0.5})
    (run / "metrics.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    drawn, other = pictures.draw_report(pictures.SLOW), pictures.draw_report(run)
    assert read_digest(drawn) != read_digest(other)


def test_every_picture_stands_on_a_page_and_loads_nothing() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    shown = {
        name for page in pages for name in re.findall(r"pictures/(\S+\.svg)", page.read_text())
    }
    kept = {path.name for path in pictures.PICTURES.glob("*.svg")}
    assert kept == shown == {f"{name}.svg" for name in pictures.DRAWINGS}
    for name in kept:
        path = pictures.PICTURES / name
        assert path.stat().st_size <= 150_000
        links = [
            value
            for element in ET.parse(path).iter()
            for key, value in element.attrib.items()
            if key.rpartition("}")[2] in ("href", "src")
        ]
        assert not links
        assert "url(" not in path.read_text(encoding="utf-8")


def test_committed_runs_are_small_and_name_no_machine() -> None:
    files = [path for path in pictures.RUNS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 450_000
    for path in files:
        text = path.read_bytes().decode("utf-8", "replace")
        assert not re.search(r"/tmp/|/work/|/root/|/home/", text), path
        if path.name == "ranks.json":
            assert {rank["host"] for rank in json.loads(text)["ranks"]} == {"node-0"}


def test_the_verdicts_say_what_was_planted() -> None:
    slow, fast = find_verdict(pictures.SLOW), find_verdict(pictures.FAST)
    assert (slow.kind, slow.command) == ("slow_rank", "data.workers=2")
    assert slow.cause == "rank 1's data"
    assert "rank 1" not in fast.line()
