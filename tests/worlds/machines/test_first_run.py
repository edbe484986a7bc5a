"""The main job as a new user meets it: what it prints, what it leaves behind, what comes next."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from cli_run import CommandLine, lines
from shoal.cli.main import app, main
from shoal.config.load import load_config

SMALL = [
    "model.layers=1", "model.dim=64", "data.sequence=64", "data.tokenizer=bpe:512",
    "data.validation=0.005", "train.steps=30", "train.batch=16", "optimizer.lr=1e-2",
]  # fmt: skip


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[CommandLine, str]:
    command = CommandLine(tmp_path_factory.mktemp("first"), *SMALL, cold=True)
    code, output = command.finish()
    assert code == 0, output
    return command, output


def test_it_says_what_was_chosen_and_how_it_ended(first: tuple[CommandLine, str]) -> None:
    command, output = first
    assert output.startswith("shoal ")
    opening = output.partition("\nstep=")[0].splitlines()  # the first line may be of step 2
    assert len([line for line in opening if not line.startswith("phase=")]) <= 5, opening
    assert "; to watch it: shoal watch runs/run" in opening[0]
    assert "data: Python standard library: " in output
    assert "files held out" in output
    assert re.search(r"auto: \w+ on 2 processes: [\d.]+ m?s per step foreseen\n", output)
    whole = " ".join(event["text"] for event in command.events("notice"))
    assert "one process may be as fast" in whole
    assert "also possible: " in whole
    assert "16 samples per step" in output
    assert "loss=" in output
    assert "tokens_per_s=" in output
    assert "matmul=" in output, "a share of this machine's rate, on a CPU"
    assert "left=" in output
    assert "unigram entropy" in output
    bounded = r"validation at the end: 72 of \d+ held-out samples, \d+ at a time"
    assert re.search(bounded, whole), "0.15 of what 30 steps of 16 read"
    assert "a sample of what it writes" in output
    assert "run folder: runs/run" in output
    assert "next: shoal checkpoint export runs/run" in output


def test_validation_loss_is_below_the_unigram_entropy(first: tuple[CommandLine, str]) -> None:
    (validated,) = first[0].events("validated")
    assert validated["loss"] < validated["unigram_entropy"] - 0.1


def test_the_run_folder_is_whole(first: tuple[CommandLine, str]) -> None:
    run = first[0].run
    assert load_config(run / "run.toml").config.train.steps == 30
    plan = json.loads((run / "plan.json").read_text())
    assert plan["sized"], "else a restart would choose the micro-batch once more"
    # As this machine was measured: zero1 and zero2 send as much as ddp, and a hair may decide.
    assert plan["strategy"] in ("single", "ddp", "zero1", "zero2")
    assert plan["buckets"]
    assert plan["flops_per_sample"] > 0
    assert [r["step"] for r in lines(run / "metrics.jsonl")] == list(range(1, 31))
    assert all(0 < r["mfu"] < 1 for r in lines(run / "metrics.jsonl")[2:])
    assert (run / "logs" / "rank-0.log").exists()
    text = (Path(__file__).parents[3] / "docs" / "reference" / "run-folder.md").read_text()
    keys = {key for row in lines(run / "metrics.jsonl") for key in row}
    assert [key for key in sorted(keys) if f"| `{key}` |" not in text] == []
    kinds = {re.sub(r"-\d+", "-N", path.name) for path in run.iterdir()}
    told = set(re.findall(r"`([^` ]+?)/?`", text.partition("## metrics.jsonl")[0]))
    told |= {one.partition("/")[0] for one in told}
    assert kinds <= told, "docs/reference/run-folder.md names every file"
    ranks = json.loads((run / "ranks.json").read_text())["ranks"]
    pids = {event["rank"]: event["pid"] for event in first[0].events("worker_started")}
    assert {one["rank"]: one["pid"] for one in ranks} == pids
    assert {row["timed_by"] for row in lines(run / "metrics.jsonl")} == {"host"}
    started = first[0].events("compute_started")[0]
    assert started["dtypes"]["stepped"] == "float32"
    assert started["compute"] == "fp32"


def test_it_writes_on_and_opens_as_transformers_llama(
    first: tuple[CommandLine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(first[0].folder)

    def shoal(*words: str) -> str:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        return str(done.stdout)

    written = shoal("sample", "runs/run", "--prompt", "def ", "--tokens", "24", "--seed", "3")
    assert written.startswith("def ")
    assert written == shoal(
        "sample", "runs/run", "--prompt", "def ", "--tokens", "24", "--seed", "3"
    )
    assert written != shoal(
        "sample", "runs/run", "--prompt", "def ", "--tokens", "24", "--seed", "4"
    )
    likeliest = shoal(
        "sample", "runs/run", "--prompt", "def ", "--tokens", "24", "--temperature", "0"
    )
    told = shoal("checkpoint", "export", "runs/run", "out")
    assert told.endswith("config.json, model.safetensors, tokenizer.json, tokenizer_config.json\n")
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        "out", output_loading_info=True
    )
    assert not any(loading.values())
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    begun = tokenizer("def ", return_tensors="pt")
    ids = model.generate(**begun, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    assert tokenizer.decode(ids[0]) == likeliest.removesuffix("\n")


def test_checkpoint_verbs(
    first: tuple[CommandLine, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(first[0].folder)

    def shoal(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["shoal", "checkpoint", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), "".join(capsys.readouterr())

    code, listed = shoal("list", "runs/run")
    assert code == 0
    assert "step 30" in listed
    assert shoal("verify", "runs/run")[0] == 0
    code, said = shoal("export", "runs/run", "model.safetensors")
    assert code == 0, said
    with safe_open(str(first[0].folder / "model.safetensors"), "pt") as file:
        names = set(file.keys())
        assert "blocks.0.attention.q.weight" in names
        assert len({"embedding.weight", "head.weight"} & names) == 1, "tied weights once"
    victim = next((first[0].run / "checkpoints").glob("step-30/rank-0.safetensors"))
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 4
    victim.write_bytes(raw)
    code, said = shoal("verify", "runs/run")
    assert code == 2
    assert "rank-0.safetensors" in said
