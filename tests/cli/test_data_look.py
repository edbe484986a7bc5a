"""`shoal data look`: its rows are the model's inputs, and what it prints of them and of a step."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import shoal
from shoal.cli import start
from shoal.cli.data import _find_step_row
from shoal.cli.main import app
from shoal.cli.sample_table import sample_table_lines
from shoal.data.sources import open_data
from shoal.fabric import start_world
from shoal.trainer import main_job

SPY = """
import torch
SEEN = []
class Spy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(300, 4)
        self.head = torch.nn.Linear(4, 300)
    def forward(self, input_ids, position_ids=None):
        if self.training and torch.is_grad_enabled():
            SEEN.append((input_ids.tolist(), None if position_ids is None else position_ids.tolist()))
        hidden = self.embedding(input_ids)
        if position_ids is not None:
            hidden = hidden + position_ids[..., None] * 1e-3
        return self.head(hidden)
def build():
    return Spy()
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for n in range(20):
            row = torch.arange(9) + n
            yield row[:-1], row[1:]
def stream():
    return Stream()
"""
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "ate", "fish", "while", "birds", "sang")


def sentence(number: int, words: int) -> str:
    """Words that follow from a number."""
    return " ".join(WORDS[(number * 7 + k * k) % len(WORDS)] for k in range(words))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with texts, chats, and runs of three steps on them with a spy as the model."""
    folder = tmp_path_factory.mktemp("look")
    for name in "ab":
        lines = [f"{name}{n}: {sentence(n, 9)}\n" for n in range(60)]
        (folder / f"{name}.txt").write_text("".join(lines))
    rows = []
    for n in range(40):
        answered = sentence(n + 1, 2 + n % 5 + 20 * (n % 10 == 9))
        turns = [("user", sentence(n, 3)), ("assistant", answered + " é")]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "look_spy.py").write_text(SPY)
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
    patch.setattr(main_job, "measure_machine", lambda *_: None)
    save = shoal.Run.save  # on a busy machine a save in the background may be left out
    patch.setattr(shoal.Run, "save", lambda run, **more: save(run, **{**more, "wait": True}))
    yield folder
    patch.undo()
    sys.modules.pop("look_spy", None)


def train(name: str, *words: str) -> list[tuple[Any, Any]]:
    """Train three steps in this process; return the inputs of each forward pass of training."""
    settings = ["model.build=look_spy:build", "train.steps=3", "train.batch=8", f"run.name={name}",
                "train.micro_batch=4", "data.sequence=24", "data.tokenizer=bpe:300",
                "data.validation=0", "train.prove=off", "train.guards=off", "checkpoint.every=2", *words]  # fmt: skip
    prepared = start.prepare_run(settings, None, 1)
    prepared.folder.mkdir(parents=True)
    start.write_run_folder(prepared)
    import look_spy

    look_spy.SEEN.clear()
    assert main_job.train(prepared.folder, lambda *_: "", world=start_world({})) == 0
    return list(look_spy.SEEN)


@pytest.fixture(scope="module")
def runs(here: Path) -> Path:
    """The working folder with the runs that most tests read."""
    for name in ("chat", "packed", "mixed"):
        inputs_of(name)
    return here


INPUTS: dict[str, list[tuple[Any, Any]]] = {}


def inputs_of(name: str) -> list[tuple[Any, Any]]:
    """The inputs of a run of three steps, which is trained once."""
    if name not in INPUTS:
        INPUTS[name] = train(name, *SOURCES[name])
    return INPUTS[name]


def lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def answer(*words: str) -> str:
    """What `shoal data look` prints; it must end well."""
    done = CliRunner().invoke(app, ["data", "look", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


SOURCES = {
    "text": ["data.source=text:a.txt"],
    "chat": ["data.source=jsonl:chat.jsonl"],
    "packed": ["data.source=jsonl:chat.jsonl", "data.packing=on"],
    "mixed": ["data.source=mix:0.7*text:a.txt+0.3*text:b.txt"],
    "stream": ["data.source=look_spy:stream"],
}


@pytest.mark.parametrize(
    "name", [pytest.param("text", marks=pytest.mark.proof), *list(SOURCES)[1:]]
)
def test_rows_are_what_the_model_got(here: Path, name: str) -> None:
    """Token by token, in order, with the positions of packed rows."""
    seen = inputs_of(name)
    rows = []
    steps = [json.loads(line) for line in lines_of(f"runs/{name}/metrics.jsonl")]
    for step in (1, 2, 3):
        document = json.loads(answer(f"runs/{name}", "--step", str(step), "--json"))
        first, end = steps[step - 1]["samples"]
        assert [row["position"] for row in document["rows"]] == list(range(first, end))
        assert document["step"]["loss"] == steps[step - 1]["loss"]
        rows += document["rows"]
    got = [row for ids, _ in seen for row in ids]
    assert [row["input_ids"] for row in rows] == got
    if name == "packed":
        places = [row for _, positions in seen for row in positions]
        assert [row["position_ids"] for row in rows] == places
        assert any(row["documents"] > 1 for row in rows)
    if name == "mixed":
        sources = [row["source"] for row in rows]
        assert set(sources) == {"text:a.txt", "text:b.txt"}
        assert [row["origin"] for row in rows] == [one.removeprefix("text:") for one in sources]


def test_losses_of_samples_are_the_loss_of_the_step(runs: Path) -> None:
    """Under the checkpoint of the step before, weighed by their targets."""
    document = json.loads(answer("runs/chat", "--step", "3", "--json"))
    step, rows = document["step"], document["rows"]
    assert step["checkpoint_step"] == 2
    assert step["checkpoint_loss"] == pytest.approx(step["loss"], rel=1e-6)
    total = sum(row["loss"] * row["targets"] for row in rows)
    assert total / sum(row["targets"] for row in rows) == pytest.approx(step["loss"], rel=1e-6)
    assert [row["targets"] for row in rows] == [row["learnt"] for row in rows]
    assert "grad_norm" not in rows[0], "a norm costs a backward pass"
    text = answer("runs/chat", "--step", "3", "--rows", "8")
    shown = re.findall(r"^loss (\S+) · sample (\d+)", text, re.M)
    ordered = sorted(rows, key=lambda row: -row["loss"])
    assert shown == [(f"{row['loss']:.4f}", str(row["sample"])) for row in ordered]
    assert re.findall(r"^ +(\d\.\d{4}) +(\d+) ", text, re.M) == shown, "the list before the texts"
    mean = f"computed with the weights of step 2; mean over their targets {step['checkpoint_loss']:.4g}\n"
    assert f"{mean}            runs/chat/checkpoints/step-2\n" in text
    assert re.search(r"^step +3: samples .* of the stream, rows of \d+ tokens, loss", text, re.M)
    assert text.count("position: its place in the stream") == 1
    assert len(re.findall(r"^loss ", answer("runs/chat", "--step", "3"), re.M)) == 3
    later = json.loads(answer("runs/chat", "--step", "1", "--json"))["step"]
    assert later["checkpoint_step"] == 2
    assert "have trained on the samples; no older ones" in answer("runs/chat", "--step", "1")


def test_chats_show_what_is_learnt(runs: Path) -> None:
    """Answers and their ends, with the line of the file."""
    text = answer("runs/packed", "--rows", "40")
    chats = [json.loads(line)["messages"] for line in lines_of("chat.jsonl")]
    found = 0
    for title, body in re.findall(r"^sample \d+ · (\S+) · [^\n]*\n((?: [^\n]*\n)+)", text, re.M):
        numbers = [int(one.rpartition(":")[2]) - 1 for one in title.split(", ")]
        plain = (
            re.sub(r"^ *[0-9]* *│ ", "", body, flags=re.M).replace("↵\n", "\n").replace("\n", "")
        )
        answers = [chats[n][1]["content"] for n in numbers]
        for one, learnt in zip(answers, re.findall(r"⟦(.*?)⟧", plain), strict=False):
            whole = f" {one}<|endoftext|>"
            found += learnt == whole
            assert whole.startswith(learnt), title
    assert found > 10


def test_the_head_says_sizes_and_shares(runs: Path) -> None:
    lines = answer("runs/packed", "--rows", "0").splitlines()
    names = [line[:12].rstrip() for line in lines]
    assert names == [
        "source",
        "samples",
        "step",
        "tokenizer",
        "sequence",
        "lengths",
        "cut",
        "learnt",
        "",
    ]
    assert lines[2] == "step        8 samples, in micro-batches of 4"
    data = json.loads(answer("runs/packed", "--rows", "0", "--json"))["data"]
    assert data["examples"] + data["left_out"] == 40
    assert data["lengths"]["most"] > 25 == data["sequence"] + 1, "lengths before the cut"
    mixed = json.loads(answer("runs/mixed", "--rows", "0", "--json"))["data"]
    assert [(one["source"], one["weight"]) for one in mixed["by_source"]] == [
        ("text:a.txt", 0.7), ("text:b.txt", 0.3)
    ]  # fmt: skip


def test_a_configuration_shows_the_first_samples_of_a_run(runs: Path) -> None:
    Path("mine.toml").write_text('[data]\nsource = "jsonl:chat.jsonl"\nsequence = 24\n')
    words = ["data.tokenizer=bpe:300", "data.validation=0", "train.micro_batch=4"]
    rows = json.loads(answer("mine.toml", *words, "--rows", "8", "--json"))["rows"]
    step = json.loads(answer("runs/chat", "--step", "1", "--json", "--no-loss"))["rows"]
    assert [row["input_ids"] for row in rows] == [row["input_ids"] for row in step]


def test_changed_data_is_refused(runs: Path) -> None:
    shutil.copy("chat.jsonl", "kept.jsonl")
    try:
        lines = Path("kept.jsonl").read_text().splitlines(keepends=True)
        Path("chat.jsonl").write_text("".join(lines[:30]))
        assert said("runs/chat", "--step", "2") == (
            "--step 2: the data has 30 samples now, and had 40 when the run was saved, so its "
            "samples are not those of this step; try: the data as it was, or --changed to see "
            "what lies there now"
        )
        Path("chat.jsonl").write_text("".join(lines[::-1]))
        assert said("runs/chat", "--step", "2").startswith(
            "--step 2: the data has changed since the run was saved: "
        )
        assert "notice: the data has changed" in answer("runs/chat", "--step", "2", "--changed")
    finally:
        shutil.move("kept.jsonl", "chat.jsonl")


def said(*words: str) -> str:
    """The one line of a command that is refused."""
    done = CliRunner().invoke(app, ["data", "look", *words])
    failure = done.exception
    assert getattr(failure, "exit_code", None) == 2, (done.output, failure)
    assert "\n" not in str(failure)
    return str(failure)


def test_what_is_refused(runs: Path) -> None:
    assert said("runs/chat", "--step", "9") == (
        "--step 9: runs/chat has no line of it; its newest step is 3; try: --step 3"
    )
    assert said("data.source=text:a.txt", "--step", "1") == (
        "--step 1: goes with a run folder; try: shoal data look RUN"
    )
    assert said("runs/chot", "--step", "1") == "runs/chot: no such folder; try: runs/chat"
    assert said("runs/chot") == "runs/chot: no such run.toml or run folder; try: runs/chat"
    Path("empty").mkdir(exist_ok=True)
    assert said("empty") == "empty: no run folder; try: shoal runs"
    assert said("empty", "--step", "1") == said("empty")
    for line, why in {
        "": "--step 2: empty has run no step yet",
        '{"step": 2, "loss": 1.0}\n': "--step 2: its line in empty/metrics.jsonl names no samples",
        '{"step": 2, "samples": [3, "x"]}\n': "--step 2: its line in empty/metrics.jsonl names no",
        '{"step": 2, "samples": [0, 9000000000000]}\n': "--step 2: its line in empty/metrics.jsonl "
        "names 9000000000000 samples, more than the 1048576 that are shown",
        '{"step": 5, "samples": [0, 4]}\n{"st': "--step 2: empty has no line of it; its newest",
    }.items():
        Path("empty/metrics.jsonl").write_text(line)
        assert said("empty", "--step", "2").startswith(why)


def test_a_step_is_found_among_many_lines(tmp_path: Path) -> None:
    """Most lines are not parsed; the newest line of a step counts, and torn ones are skipped."""
    rows = [f'{{"step":{n},"loss":0.5,"samples":[{n},{n + 1}]}}\n' for n in range(1, 900)]
    again = [row.replace("0.5", "0.25") for row in rows[99:600]]
    (tmp_path / "metrics.jsonl").write_text("".join([*rows[:700], *again, '{"step":601,"lo']))
    for step, loss in ((1, 0.5), (99, 0.5), (100, 0.25), (345, 0.25), (600, 0.25)):
        row = _find_step_row(tmp_path, step)
        assert (row["step"], row["loss"], row["samples"]) == (step, loss, [step, step + 1])
    with pytest.raises(shoal.ConfigError, match="its newest step is 600"):
        _find_step_row(tmp_path, 601)


def test_steps_beyond_the_data_are_refused(runs: Path) -> None:
    shutil.copytree("runs/chat", "runs/torn")
    row = {"step": 2, "loss": 1.0, "samples": [36, 44]}
    Path("runs/torn/metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert said("runs/torn", "--step", "2") == (
        "data.source: samples 36 … 43 of the stream lie in two epochs of the 40 samples that the "
        "data has, so no step had them; try: the data as it was"
    )


def test_a_loop_of_ones_own_names_its_data(here: Path) -> None:
    """Seed and batch come from its plan or its checkpoint, the source from the command line."""
    data = open_data("text:a.txt", tokenizer="bpe:300", sequence=16, validation=0)
    model = torch.nn.Sequential(torch.nn.Embedding(300, 4), torch.nn.Linear(4, 300))
    seen = []
    run = shoal.parallelize(
        model, lambda p: torch.optim.SGD(p, lr=0.1), batch=4, seed=5, folder="runs/own"
    )
    for number, batch in zip(range(2), run.loader(data.train), strict=False):
        seen += [row for value in batch.values for row in value[0].tolist()]
        run.step(batch)
        assert number < 2
    run.save()
    run.close()
    words = ["data.tokenizer=bpe:300", "data.sequence=16", "data.validation=0"]
    document = json.loads(
        answer("runs/own", "--step", "2", "--json", "data.source=text:a.txt", *words)
    )
    assert [row["input_ids"] for row in document["rows"]] == seen[4:]
    assert document["step"]["why_no_loss"] == "the model is built by your own script"
    shutil.rmtree("runs/own/checkpoints")
    Path("runs/own/plan.json").unlink()
    assert said("runs/own", "--step", "2", "data.source=text:a.txt", *words) == (
        "runs/own: has neither plan.json nor a checkpoint, so the order of its samples is not "
        "known; try: train.seed=SEED train.batch=BATCH, as in parallelize(seed=…, batch=…)"
    )


@pytest.mark.filterwarnings("error")
def test_gradient_norms_of_samples_are_those_of_their_parts_of_the_step(runs: Path) -> None:
    """The samples' parts sum to the step's gradient: its norm is no larger than theirs together."""
    document = json.loads(answer("runs/chat", "--step", "3", "--norms", "--json"))
    step, rows = document["step"], document["rows"]
    assert 0 < step["grad_norm"] <= sum(row["grad_norm"] for row in rows) * (1 + 1e-6)
    least = min(rows, key=lambda row: row["grad_norm"] / row["targets"])
    assert least["grad_norm"] < least["loss"], "of the sum it would be larger than the mean loss"
    text = answer("runs/chat", "--step", "3", "--norms", "--rows", "0")
    norms = [float(one) for one in re.findall(r"^ +\d\.\d{4} +(\d+\.\d{4}) +\d+ ", text, re.M)]
    assert norms == sorted([round(row["grad_norm"], 4) for row in rows], reverse=True)


def test_a_long_list_is_cut_and_other_rows_show_their_targets() -> None:
    """A row without a loss has a dash; a micro-batch that cannot be cut has its number."""
    fields = [{"name": "targets", "dtype": "int64", "shape": [], "values": [3], "class": "cat\x1b"}]
    rows: list[dict[str, Any]] = [
        {"kind": "array", "sample": n, "micro_batch": 0, "fields": fields, "loss": 30.0 - n}
        for n in range(24)
    ]
    rows[1] = {**rows[1], "whole_micro_batch": 4}
    del rows[2]["loss"]
    lines = [*sample_table_lines(rows, 80, is_mixture=False)]
    assert lines[:4] == [
        "      loss    sample  target",
        "   30.0000         0  cat\\x1b 3",
        "   29.0000      mb 0  cat\\x1b 3",
        "         –         2  cat\\x1b 3",
    ]
    assert lines[-1] == "4 more samples; try: --json"
    assert len(lines) == 22
