"""Branch-train-merge: branches are saved, mixed by the text so far, averaged, and grown anew."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from shoal.base.errors import ConfigError
from shoal.checkpoint.format.weighted_paths import find_weighted_checkpoints, parse_weighted_paths
from shoal.cli.main import app
from shoal.cli.start import prepare_run, write_run_folder
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.trainer import main_job
from shoal.trainer.jobs.branch_ensemble import BranchEnsemble, list_branches

WORDS = {"east": "cough fever monday", "north": "class return import", "south": "eins zwei drei"}
MODEL = [
    *("model.name=gpt", "model.dim=16", "model.heads=2", "model.layers=1", "data.sequence=8"),
    *("data.tokenizer=tokenizer.json", "data.validation=0.2", "optimizer.lr=0.01"),
    *("train.prove=off", "launch.processes=1", "layout.strategy=single", "train.batch=16"),
]


def train(name: str, *words: str) -> tuple[Path, list[dict[str, Any]]]:
    """Train a run in this process; return its folder and its notices."""
    prepared = prepare_run([*MODEL, *words, f"run.name={name}"], None)
    prepared.folder.mkdir(parents=True)
    write_run_folder(prepared)
    alone = World(ProcessInfo(), torch.device("cpu"), None)
    assert main_job.train(prepared.folder, lambda *_: "", world=alone) == 0
    lines = (prepared.folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return prepared.folder, [one for one in events if one["event"] == "notice"]


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of three domains of three words each, after one merge; all tests work beside it."""
    folder = tmp_path_factory.mktemp("branches")
    drawn = random.Random(0)
    (folder / "domains").mkdir()
    ids = {word: k for k, word in enumerate(" ".join(WORDS.values()).split())}
    tokenizer = Tokenizer(models.WordLevel({**ids, "?": len(ids)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    for count, (name, words) in zip((30, 20, 40), WORDS.items(), strict=True):
        rows = [" ".join(drawn.choices(words.split(), k=16)) for _ in range(count)]
        text = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (folder / "domains" / f"{name}.jsonl").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run, notices = train(
            "btm", "data.source=jsonl:domains/{owner}.jsonl", "islands.data=own",
            "islands.method=branch-train-merge", "islands.period=4 epochs", "train.epochs=4",
            "islands.concurrent=1",
        )  # fmt: skip
        yield run, {one["text"].split()[1][:-1]: one for one in notices if "weights" in one}


def test_the_text_so_far_chooses_the_expert(branches: Any) -> None:
    """Bayes' rule token by token, written out; one wrong word is enough to leave a domain."""
    ensemble = BranchEnsemble(branches[0])
    assert ensemble.names == ["east", "north", "south"]
    text, shares = ensemble.generate("zwei drei eins", 5, temperature=0)
    assert set(text.split()) <= set(WORDS["south"].split())
    assert shares["south"] > 0.9

    ids = torch.tensor([ensemble.tokenizer.encode("fever class cough monday").ids])
    odds = [torch.softmax(one(ids).logits()[0].float(), -1) for one in ensemble.models]
    posterior, loss = [1 / 3] * 3, 0.0
    for t in range(ids.shape[1] - 1):
        each = [one[t, ids[0, t + 1]].item() for one in odds]
        mixed = sum(p * q for p, q in zip(posterior, each, strict=True))
        loss -= math.log(mixed)
        posterior = [p * q / mixed for p, q in zip(posterior, each, strict=True)]
    _, told = ensemble.generate("fever class cough monday", 0)
    assert [*told.values()] == pytest.approx(posterior, abs=1e-6)
    found, _ = ensemble._log_odds(ensemble.models, [(ids[:, :-1], ids[:, 1:])])
    assert float(torch.logsumexp(found, 0)) - math.log(3) == pytest.approx(-loss, rel=1e-6)


def test_the_ensemble_is_no_worse_than_the_merge(branches: Any) -> None:
    """Each domain, each branch and the best one are in the table; JSON has the same."""
    scores = BranchEnsemble(branches[0]).score()
    for domain, row in scores.losses.items():
        assert min(row, key=row.__getitem__) in (domain, "ensemble")
        best = min(row[name] for name in WORDS)
        assert best <= row["ensemble"] + 1e-9 or row["ensemble"] < best
        assert row["ensemble"] <= best + math.log(3) / 8 + 1e-9, "the bound of the mean"
    assert scores.mean("ensemble") <= min(scores.mean("merge"), scores.mean("even"))
    assert sum(scores.weights.values()) == pytest.approx(1.0)
    done = CliRunner().invoke(app, ["sample", str(branches[0]), "--ensemble"])
    assert "best branch: " in done.output
    assert f"0.5*{scores.checkpoints['east']}" not in done.output
    assert "checkpoint.initial_load_path='" in done.output
    as_json = CliRunner().invoke(app, ["sample", str(branches[0]), "--ensemble", "--json"])
    assert json.loads(as_json.stdout)["losses"] == scores.losses


def test_a_branch_grows_from_a_branch_and_from_a_mean_to_the_bit(branches: Any) -> None:
    """The first weights have their parent's digest; a mean is that of float64, rounded once."""
    run, saved = branches
    found = list_branches(run)
    source = ["data.source=jsonl:domains/east.jsonl", "train.steps=1", "optimizer.lr=0"]
    path = f"checkpoint.initial_load_path={run}/tags/branch-south"
    _, notices = train("grown", *source, path, "optimizer.weight_decay=0")
    assert [one["weights"] for one in notices if "weights" in one] == [saved["south"]["weights"]]

    mean = f"checkpoint.initial_load_path=3*{found['east']}+1*{found['north']}"
    grown, _ = train("mean", *source, mean, "optimizer.weight_decay=0")
    ensemble = BranchEnsemble(run)
    parents = [ensemble._build(found[name]).state_dict() for name in ("east", "north")]
    here = ensemble._build(find_weighted_checkpoints(str(grown))[0][1]).state_dict()
    for name, tensor in here.items():
        a, b = (parent[name].double() for parent in parents)
        assert torch.equal(tensor, (0.75 * a + 0.25 * b).float())
    even = ensemble._merge({"east": 0.75, "north": 0.25, "south": 0.0}).state_dict()
    assert all(torch.equal(even[name], tensor) for name, tensor in here.items())


def test_one_line_for_a_parent_that_is_none(branches: Any, tmp_path: Path) -> None:
    run = branches[0]
    with pytest.raises(ConfigError, match=r"no such folder; try: .*btm$"):
        find_weighted_checkpoints(f"{run}m")
    with pytest.raises(ConfigError, match="runs/b has no share of the mean above 0; try: "):
        parse_weighted_paths("runs/b+0.5*runs/a")
    with pytest.raises(ConfigError, match="no complete checkpoint there; try: "):
        find_weighted_checkpoints(str(tmp_path))
    with pytest.raises(ConfigError, match="no such folder"):
        prepare_run([*MODEL, "data.source=jsonl:domains/east.jsonl",
                     "checkpoint.initial_load_path=runs/none"], None)  # fmt: skip
    with pytest.raises(ConfigError, match="has no branches for an ensemble; try: a run with"):
        list_branches(tmp_path)
    failure = CliRunner().invoke(app, ["sample", str(run)]).exception
    assert str(failure) == f"--prompt: is missing; try: shoal sample {run} --prompt 'The'"
    failure = CliRunner().invoke(app, ["sample", str(run), "--ensemble", "--chat"]).exception
    assert "--chat: is of one model, and --ensemble of all branches" in str(failure)
