"""The real `shoal train` with islands: killed, started again by itself, gone on with one more."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from cli_run import TOY_ARGUMENTS, CommandLine, final_hashes, lines
from shoal.base.errors import ConfigError
from shoal.checkpoint.format.lease import RunLease
from shoal.checkpoint.format.listing import list_checkpoints
from shoal.cli.checkpoint import list_run_checkpoints
from shoal.launch.processes import free_port

DEADLINE_S = 120
ISLANDS = ("islands.method=diloco", "islands.count=2", "islands.period=4", "launch.processes=1")


def events(run: Path, island: int, name: str) -> list[dict]:
    return [e for e in lines(run / f"island-{island}" / "events.jsonl") if e["event"] == name]


@pytest.mark.proof
def test_islands_of_one_machine_survive_a_kill_and_grow(tmp_path: Path) -> None:
    """BatchNorm's running statistics included: all islands end with the same bits."""
    toy = [one for one in TOY_ARGUMENTS if not one.startswith("train.micro_batch")]
    command = CommandLine(tmp_path, *toy, *ISLANDS, "train.steps=40")
    run = command.run
    command.wait_for(lambda: len(events(run, 1, "round_committed")) >= 2, DEADLINE_S)
    os.kill(events(run, 1, "worker_started")[-1]["pid"], signal.SIGKILL)
    code, output = command.finish(DEADLINE_S)
    assert code == 0, output
    assert "2 islands met at 127.0.0.1:" in output
    assert "what they send is not encrypted" in output
    assert " used (foreseen " in output, "the summary's row on islands"
    assert [e["attempt"] for e in command.events("restarting")] == [1]
    rounds = [e["round"] for e in events(run, 0, "round_committed")]
    assert rounds[-1] == 9
    assert len(events(run, 0, "island_lost")) == 1
    assert events(run, 0, "island_lost")[0]["islands"] == [1]
    lists = [json.loads((run / f"island-{n}" / "ranks.json").read_text()) for n in (0, 1)]
    assert [[one["rank"] for one in told["ranks"]] for told in lists] == [[0], [0]]
    started = events(run, 1, "worker_started")[-1]["pid"]
    assert lists[1]["ranks"][0]["pid"] == started, "of the newest start"
    assert same_merged(run, 2)
    # One island had to halve its micro-batch since: all take it.
    kept = {"asked": None, "micro_batch": 2, "was": 16, "because": "rank 0, step 3"}
    (run / "island-1" / "micro_batch.json").write_text(json.dumps(kept))
    more = CommandLine(
        tmp_path, "--resume", str(run), "islands.count=3", "train.steps=48", "checkpoint.every=4"
    )
    code, output = more.finish(DEADLINE_S)
    assert code == 0, output
    assert "3 islands met at" in output
    with pytest.raises(ConfigError, match="try: .*island-0"):
        list_run_checkpoints(run)
    assert "round 11: 3 islands merged" in output
    assert same_merged(run, 3)
    for island in range(3):
        assert json.loads((run / f"island-{island}" / "plan.json").read_text())["micro_batch"] == 2
    assert "16 → 2, the least of all islands; masks of dropout" in output


def test_no_island_outlives_its_launcher(tmp_path: Path) -> None:
    """SIGKILL: all gone in 2 s, loader processes too. Then a folder that is in use says so."""
    command = CommandLine(tmp_path, *TOY_ARGUMENTS, *ISLANDS, "train.steps=400", "data.workers=1")
    run = command.run
    kept = [run / f"island-{island}" / "checkpoints" for island in (0, 1)]
    command.wait_for(lambda: all(p.is_dir() and list_checkpoints(p) for p in kept), DEADLINE_S)
    family = psutil.Process(command.process.pid).children(recursive=True)
    assert len(family) >= 2 * 3, "a supervisor, a worker and a loader process of each"
    command.process.kill()
    command.process.wait()
    _, alive = psutil.wait_procs(family, timeout=2)
    training = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not training, f"trains on as an orphan: {training}"  # init reaps the dead when it can
    with RunLease(run / "island-1", "somebody else"):
        again = CommandLine(tmp_path, "--resume", str(run))
        code, output = again.finish(DEADLINE_S)
    assert code == 2, output
    assert f"shoal: island 1: run/island-1: in use by pid {os.getpid()} on host" in output
    assert "island 0:" not in output, "it waits for nobody, and nothing is wrong with it"


@pytest.mark.proof  # what is said, and its status: tests/trainer/test_island_ends.py
def test_an_island_that_learnt_nothing_is_no_success(tmp_path: Path) -> None:
    """Its loss counts no target. The other's rounds move the merged weights, and both keep them."""
    (tmp_path / "mute.py").write_text(
        "import sys, torch\n"
        "def loss(outputs, targets):\n"
        "    heard = not sys.argv[-1].endswith('island-1')\n"
        "    return outputs.square().sum() * heard, torch.tensor(float(heard * len(targets)))\n"
    )
    more = ("model.loss=mute:loss", "train.steps=8", "islands.pace=equal")
    command = CommandLine(tmp_path, *TOY_ARGUMENTS, *ISLANDS, *more)
    code, output = command.finish(DEADLINE_S)
    assert code == 3, output
    assert (
        "shoal: island 1: steps 1 – 8: all were skipped: the loss counted no target; no step of "
        "this island moved a weight; look at the data" in output
    )
    assert "shoal: island 0" not in output
    assert same_merged(command.run, 2)
    assert not command.events("restarting")


WORDS = ("north", "south")


def two_machines(tmp_path: Path, words: tuple[str, str], *more: str) -> list[CommandLine]:
    """Two owners, each on its own machine, with texts of equal length."""
    at, started = f"127.0.0.1:{free_port()}", []
    for index, word in enumerate(words):
        folder = tmp_path / f"machine-{index}"
        (folder / f"texts-{index}").mkdir(parents=True, exist_ok=True)
        for number in range(3):
            text = f"{word} owner's page {number}, and more of the same\n" * 60
            (folder / f"texts-{index}" / f"{number}.txt").write_text(text)
        started.append(
            CommandLine(
                folder,
                *(f"data.source=text:texts-{index}/*.txt", "data.sequence=16", "model.dim=16"),
                *("data.tokenizer=bpe:280", "model.heads=1", "model.layers=1", "train.batch=2"),
                *("islands.method=diloco", "islands.count=2", "islands.period=2", "train.steps=4"),
                *(f"islands.at={at}", f"islands.index={index}", "launch.processes=1", *more),
            )
        )
    return started


@pytest.mark.proof("faults")
@pytest.mark.parametrize(("words", "code"), [(("a", "b"), 2), (("a", "a"), 0)])
def test_owners_of_other_data_do_not_train_together(
    tmp_path: Path, words: tuple[str, str], code: int
) -> None:
    """Without islands.data=own; equal data may lie elsewhere."""
    for command in two_machines(tmp_path, words):
        found, output = command.finish(DEADLINE_S)
        assert found == code, output
        assert ("try: the same data on all islands" in output) == (code == 2), output
        assert bool(lines(command.run / "metrics.jsonl")) == (code == 0)


@pytest.mark.proof("faults")
def test_owners_train_together_on_data_of_their_own(tmp_path: Path) -> None:
    """Each trained a tokenizer: refused. With that of owner 0: both validate, on what is theirs."""
    refused = two_machines(tmp_path, WORDS, "islands.data=own")
    for command in refused:
        code, output = command.finish(DEADLINE_S)
        assert code == 2, output
        assert "try: copy hub/tokenizer.json of island 0's run folder to all owners" in output
    shutil.copy(refused[0].run / "hub" / "tokenizer.json", tmp_path / "tokenizer.json")
    shared = f"data.tokenizer={tmp_path / 'tokenizer.json'}"
    commands = two_machines(
        tmp_path, WORDS, "islands.data=own", shared, "data.validation=0.3", "run.name=own"
    )
    for command in commands:
        code, output = command.finish(DEADLINE_S)
        assert code == 0, output
        assert "no sample leaves its owner; what does: the change of the weights" in output
        (validated,) = [e for e in lines(command.run / "events.jsonl") if e["event"] == "validated"]
        parts = validated["by_source"]
        assert parts.keys() == {"0", "1"}
        targets = [part["targets"] for part in parts.values()]
        mean = sum(p["loss"] * n for p, n in zip(parts.values(), targets, strict=True))
        assert validated["loss"] == pytest.approx(mean / sum(targets), rel=1e-12)
        assert parts[validated["worst"]]["loss"] == max(part["loss"] for part in parts.values())


def same_merged(run: Path, count: int) -> bool:
    """Whether model, merged weights and outer state are the same bits on all islands.

    Inner optimizers, and BatchNorm's count of its own batches, are each island's own.
    """
    found = [final_hashes(run / f"island-{island}") for island in range(count)]
    shared = [
        {n: h for n, h in one.items() if n.startswith(("model.", "outer.")) and "tracked" not in n}
        for one in found
    ]
    assert any(name.startswith("outer.") for name in shared[0])
    return all(one == shared[0] for one in shared)


@pytest.mark.proof("faults")
def test_the_page_of_owners_trains_three_hospitals(tmp_path: Path) -> None:
    """The first command of docs/start/owners.md, on a smaller model; the last line names the worst."""
    words = page_words(OWNERS, 0)
    (tmp_path / "owners").mkdir()
    for name, rows in (("east", 60), ("north", 90), ("south", 40)):
        text = "".join(f'{{"text": "Patient {k} of {name} left well."}}\n' for k in range(rows))
        (tmp_path / "owners" / f"{name}.jsonl").write_text(text)
    small = ("model.dim=16", "model.layers=1", "model.heads=1", "data.sequence=16")
    command = CommandLine(tmp_path, *words, *small, "train.batch=4", "launch.processes=1")
    code, output = command.finish(DEADLINE_S)
    assert code == 0, output
    assert "own data of 3 owners" in output
    assert "round 2: 3 of 3 owners merged" in output
    assert re.search(r"mean of 3 owners, worst (east|north|south): \d", output)


OWNERS = Path(__file__).parents[3] / "docs" / "start" / "owners.md"


def write_page_file(folder: Path, name: str, language: str) -> None:
    """Write the only block of a language on the page of owners to a file."""
    (text,) = re.findall(
        rf"^```{language}\n(.*?)^```$", OWNERS.read_text(), re.MULTILINE | re.DOTALL
    )
    (folder / name).write_text(text)


def page_words(page: Path, number: int) -> list[str]:
    """Return the words of a command of a page after `shoal train`."""
    blocks = re.findall(r"^```\n(shoal train .*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return shlex.split(blocks[number].replace("\\\n", " "))[2:]


@pytest.mark.proof("faults")
def test_the_page_of_owners_simulates_phones(tmp_path: Path) -> None:
    """The second command of docs/start/owners.md, two rounds; the last line names the worst."""
    write_page_file(tmp_path, "digits.toml", "toml")
    words = page_words(OWNERS, 1)
    command = CommandLine(tmp_path, *words, "train.epochs=10")
    code, output = command.finish(DEADLINE_S)
    assert code == 0, output
    assert "round 1: 5 of 50 owners merged" in output
    assert "47 of 50 owners have some, 1 to 28 each" in output
    assert re.search(r"mean of 47 owners, worst \d+: \d.*accuracy \d", output)
    assert re.search(r"; worst with 10 targets or more \d+: \d.* of [12]\d targets", output)
    assert "an owner trains in 0.2 of them in the mean: 1 passes over its samples" in output
    assert re.search(r"round 1: 5 of 50 owners merged, \S+ targets; ", output)
    made = sum(len(lines(command.run / f"island-{n}" / "metrics.jsonl")) for n in (0, 1))
    assert f"  trained      {made} steps, " in output
    assert " in 2 islands; mean of " in output
    assert "report: " in output
    assert events(command.run, 0, "validated")[-1]["owners"] == 50


@pytest.mark.proof("faults")
def test_the_page_of_owners_rehearses_a_wrong_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its third command, then that run again with $WRONG: nobody else knows the wrong owner's digits."""
    write_page_file(tmp_path, "digits.toml", "toml")
    write_page_file(tmp_path, "five.py", "python")
    (block,) = re.findall(r"```\n(shoal train [^`]*\nWRONG=4 [^`]*)```", OWNERS.read_text())
    right, wrong, *_ = block.replace("\\\n", " ").splitlines()
    own = []
    for line in (right, wrong.removeprefix("WRONG=4 ")):
        name = re.findall(r"run\.name=(\w+)", line)[0]
        command = CommandLine(tmp_path, *shlex.split(line)[2:], name=name, cold=bool(own))
        code, output = command.finish(DEADLINE_S)
        assert code == 0, output
        own.append(events(command.run, 0, "validated")[-1]["by_source"]["4"]["accuracy"])
        monkeypatch.setenv("WRONG", "4")
    assert own[0] > 0.5
    assert own[1] < 0.05
