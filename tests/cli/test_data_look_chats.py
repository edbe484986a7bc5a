"""`shoal data look` of small chats: counts, cuts, padding, and rows worth a look."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shoal.base.errors import ConfigError
from shoal.cli.data import check_relative_source
from shoal.cli.data_lines import data_lines, id_lines, row_title
from shoal.cli.main import app
from shoal.cli.row_style import RowStyle
from shoal.data.inspection.sample_fields import describe_sample
from shoal.data.inspection.source_facts import _label_shares

SETTINGS = ["data.source=jsonl:chats.jsonl", "data.tokenizer=bpe:300", "data.sequence=64"]


def chat(*texts: str) -> dict[str, Any]:
    """One chat of a user and an assistant in turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": t} for n, t in enumerate(texts)]}


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with chats: most alike, one of two answers, one long."""
    folder = tmp_path_factory.mktemp("chats")
    rows = [chat(f"say {n % 10}", f"number {n % 10} {n // 10}") for n in range(20)]
    rows += [chat("2+2?", "4", "3+3?", "6"), chat("count " * 9, "one two three " * 3)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    yield folder
    patch.undo()


def document_of(*words: str) -> dict[str, Any]:
    """The JSON document of a command."""
    done = CliRunner().invoke(app, ["data", "look", *SETTINGS, *words, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def lines_of(document: dict[str, Any], **style: Any) -> list[str]:
    return list(data_lines(document, RowStyle(width=100, **style), 3))


def fact(document: dict[str, Any], name: str) -> str:
    """The line of a name in the head."""
    return next(line[12:] for line in lines_of(document) if line[:12].rstrip() == name)


@pytest.fixture(scope="module")
def padded(here: Path) -> dict[str, Any]:
    """The document of padded rows, with the rows of a first look."""
    return document_of()


@pytest.fixture(scope="module")
def packed(here: Path) -> dict[str, Any]:
    return document_of("data.packing=on", "--rows", "3")


def test_counts_are_of_all_examples_without_padding(
    padded: dict[str, Any], packed: dict[str, Any]
) -> None:
    data = padded["data"]
    assert fact(padded, "samples") == "22 examples: 21 to train on, 1 held out"
    assert fact(packed, "samples").endswith(f"; {packed['data']['samples']} + 1 rows")
    rows = document_of("--rows", "21")["rows"]
    assert len(rows) == data["samples"] == 21
    learnt = sum(row["learnt"] for row in rows)
    targets = sum(len(row["input_ids"]) - row["padding"] for row in rows)
    share = f"{100 * learnt / targets:.0f} %"
    assert fact(padded, "learnt") == f"{learnt:,} of {targets:,} tokens, {share}"
    assert fact(packed, "learnt").startswith(f"{learnt:,} of {targets:,} tokens, {share}; ")
    assert "of 256 samples" not in "".join(lines_of(padded))
    assert fact(padded, "sequence").endswith("; try: data.packing=on")
    assert "try: " not in fact(packed, "sequence")
    assert any(line.startswith(" " * 12 + "held out: 1 example of ") for line in lines_of(padded))


def test_a_cut_says_how_many_learnt_tokens_it_takes(padded: dict[str, Any]) -> None:
    assert fact(padded, "cut") == "none"
    shown = document_of("data.sequence=24", "--rows", "40")
    cut = shown["data"]
    longest = next(row for row in shown["rows"] if "cut" in row)
    assert f", {longest['cut']} more cut off" in row_title(longest, of_step=False, is_mixture=False)
    lost = padded["data"]["learnt_tokens"] - cut["learnt_tokens"]
    text = fact({"data": cut, "rows": []}, "cut")
    if not cut["left_out"]:
        assert cut["cut_learnt"] == lost
    assert cut["cut"] > 0
    assert f" at token 25, {cut['cut_learnt']:,} learnt token" in text


def test_a_first_look_has_the_longest_example_and_one_of_two_answers(
    padded: dict[str, Any],
) -> None:
    notes = {row["origin"]: row.get("note") for row in padded["rows"]}
    assert len(notes) == 3
    most = padded["data"]["lengths"]["most"]
    assert notes["chats.jsonl:22"] == f"the longest example, {most} tokens"
    assert notes["chats.jsonl:21"] == "2 answers"
    assert any(line.endswith(" · 2 answers") for line in lines_of(padded))
    assert all("note" not in row for row in document_of("--rows", "3")["rows"])


def test_padding_has_a_name_and_is_no_document(
    padded: dict[str, Any], packed: dict[str, Any]
) -> None:
    for document in (padded, packed):
        text = lines_of(document)
        for row in document["rows"]:
            assert row["padding"] > 1
            assert len(row["input_ids"]) == 64
            assert f"│ <pad>×{row['padding']}" in "\n".join(text)
            title = next(line for line in text if line.startswith(f"sample {row['sample']} "))
            inputs = 64 - row["padding"]
            assert f"{inputs + row['documents']} tokens ({inputs} inputs)" in title
        assert not any("<|endoftext|>×" in line for line in text)
    row = packed["rows"][0]
    assert row["documents"] == len(row["origin"].split(", ")) > 1
    assert all(line.count("<|endoftext|>⟧↵") <= 1 for line in lines_of(packed))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_line_of_ids_is_one_prediction(
    padded: dict[str, Any], packed: dict[str, Any], is_packed: bool
) -> None:
    """Position, id, target and mark are those of the model's batch at this place."""
    row = (packed if is_packed else padded)["rows"][0]
    used = len(row["input_ids"]) - row["padding"]
    lines = list(id_lines(row))[2:]
    assert len(lines) == used + 1, "padding is one line"
    assert f"<pad>×{row['padding']}" in lines[-1]
    positions = row["position_ids"] or range(len(row["input_ids"]))
    for n, line in enumerate(lines[:-1]):
        words = line.split()
        assert words[1:3] == [str(positions[n]), str(row["input_ids"][n])]
        assert ("✓" in words) == (row["labels"][n] != -100)
        assert str(row["labels"][n]) in words[3:]


def test_labels_at_their_own_token_are_targets_of_the_line_before() -> None:
    tokens = [
        {"id": n, "learnt": n > 5, "document": 0, "position": at, "label": n if n > 5 else -100}
        for at, n in enumerate((5, 6, 7))
    ]
    row = {"tokens": tokens, "padding": 0, "shifted": False}
    found = [line.split() for line in list(id_lines(row))[2:]]
    assert found == [["0", "0", "5", "6", "✓"], ["0", "1", "6", "7", "✓"], ["0", "2", "7", "–"]]


def test_labels_of_an_own_dataset_are_counted_without_padding() -> None:
    """Rows without labels have no targets."""
    inputs = torch.tensor([5, 6, 7, 0, 0, 0])
    row = describe_sample(inputs, torch.tensor([-100, 7, 0, -100, -100, -100]))
    one = {"input_ids": inputs}
    found = _label_shares([row, describe_sample(one, one)])
    assert (found["targets"], found["learnt_tokens"]) == (4, 2)


def test_equal_percentiles_are_left_out() -> None:
    lengths = {"of": "texts", "count": 9, "least": 3, "most": 3000, "p10": 7, "p50": 7, "p90": 7}
    data = {"source": "text:a", "kind": "tokens", "batch": 1, "micro_batch": 1, "sequence": 8}
    data |= {"packing": "off", "tokenizer": "", "vocabulary": 9, "lengths": lengths}
    document = {"data": data, "rows": []}
    assert fact(document, "lengths") == "9 texts of 3 … 3,000 tokens, median 7"
    lengths["p90"] = 800
    assert fact(document, "lengths").endswith(", median 7; 10th percentile 7, 90th 800")


def test_data_of_a_run_begin_where_the_run_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = tmp_path / "runs" / "a", tmp_path / "other"
    for folder in (run, other, tmp_path / "books"):
        folder.mkdir(parents=True)
    (tmp_path / "books" / "a.txt").write_text("a")
    (other / "z.txt").write_text("z")
    monkeypatch.chdir(other)
    with pytest.raises(ConfigError) as caught:
        check_relative_source(run, "text:books/*.txt", "shoal data look", 4)
    assert str(caught.value) == (
        f"{run}: its data.source = text:books/*.txt is relative to the folder where the run "
        f"started, and has no files as seen from {other}; try: cd {tmp_path}; shoal data look "
        f"runs/a --step 4"
    )
    with pytest.raises(ConfigError, match="try: this command in that folder$"):
        check_relative_source(
            run, "mix:0.5*text:books/*.txt+0.5*text:none/*.txt", "shoal data look", None
        )
    check_relative_source(run, f"text:{tmp_path}/none/*.txt", "shoal data look", None)
    check_relative_source(run, "stdlib", "shoal data look", None)
    (tmp_path / "zzqx_rows.py").touch()
    with pytest.raises(ConfigError, match=f"try: cd {tmp_path}, which has it, and the same"):
        check_relative_source(run, "zzqx_rows:make", "shoal data look", None)
    monkeypatch.chdir(tmp_path)
    check_relative_source(run, "text:books/*.txt", "shoal data look", None)
