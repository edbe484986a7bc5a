"""The six pages for a task (docs/start): each is short, and its commands print what it shows."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
START = ROOT / "docs" / "start"
PAGES = ("script", "chat", "accelerate", "two-machines", "memory", "slow")
WORDS = 550
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LIMIT_S = 300


def page(name: str) -> str:
    """Return the text of docs/start/NAME.md."""
    return (START / f"{name}.md").read_text()


def blocks(name: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in one language; "": its outputs."""
    every = re.findall(r"^```(\w*)\n(.*?)^```$", page(name), re.MULTILINE | re.DOTALL)
    return [text for found, text in every if found == language]


def commands(name: str) -> list[list[str]]:
    """Return the words of every command of a page's bash blocks, in their order."""
    return [shlex.split(line) for block in blocks(name, "bash") for line in block.splitlines()]


def environment(**more: str) -> dict[str, str]:
    """Return this environment, with the commands of this installation first in PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_short(name: str) -> None:
    assert len(page(name).split()) <= WORDS


def test_readme_names_every_page_before_its_promises() -> None:
    table = (ROOT / "README.md").read_text().split("## You have")[1].split("## What it promises")[0]
    first = [
        row.split("docs/start/")[1].split(".md")[0]
        for row in table.splitlines()
        if "docs/start/" in row
    ]
    assert first[: len(PAGES)] == list(PAGES)


def test_a_readers_log_may_have_lines_of_other_output(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("three words here\nand two\n")
    log = tmp_path / "reader.log"
    log.write_text("python3 -m venv .venv\n17\n{broken\n")
    read = [sys.executable, str(ROOT / "tests" / "readers" / "read")]
    with_log = environment(READER_LOG=str(log))
    subprocess.run([*read, "page.md", "1-1"], cwd=tmp_path, env=with_log, check=True)
    done = subprocess.run(
        [*read, "--total"], cwd=tmp_path, env=with_log, capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"


# script.md


def script_folder(folder: Path, **changed: str) -> list[str]:
    """Write the page's train.py, and return the lines that it is shown to print."""
    code = blocks("script", "python")[0]
    for old, new in changed.items():
        code = code.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(code)
    return blocks("script", "")[0].splitlines()[1:]


def best_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Load best.pt as a user does, into a plain model, and return its weights."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(576, 10),
    )  # fmt: skip
    weights = torch.load(folder / "best.pt", weights_only=True)
    model.load_state_dict(weights)
    return {name: tensor.double() for name, tensor in weights.items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two state dicts."""
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_the_script_prints_what_its_page_says(tmp_path: Path, programs: Any) -> None:
    shown = script_folder(tmp_path)
    assert programs.run("train.py", cwd=tmp_path).stdout.splitlines() == shown
    assert len(best_weights(tmp_path)) == 9
    again = programs.run("train.py", cwd=tmp_path)
    assert not again.stdout
    assert "runs/photos: resumed from step 96" in again.stderr
    assert "trained already, so nothing is left" in again.stderr


@pytest.mark.proof
def test_the_killed_script_ends_as_the_other_on_two_processes(
    tmp_path: Path, programs: Any
) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    shown = script_folder(alone)
    assert programs.run("train.py", cwd=alone).stdout.splitlines() == shown
    script_folder(both)
    killed = subprocess.Popen(
        [sys.executable, *TORCHRUN, "train.py"], cwd=both, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + LIMIT_S
    while not (both / "runs/photos/checkpoints/step-48").is_dir() and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    before = killed.communicate()[0].splitlines()
    after = programs.run(*TORCHRUN, "train.py", cwd=both)
    assert "runs/photos: resumed from step" in after.stderr
    lines = after.stdout.splitlines()
    assert before[: len(shown) - len(lines)] + lines == shown
    assert largest_difference(best_weights(alone), best_weights(both)) < 1e-6


@pytest.mark.proof
def test_the_script_in_float64_is_one_result(tmp_path: Path, programs: Any) -> None:
    found = []
    for name, words in (("alone", ()), ("both", TORCHRUN)):
        script_folder(tmp_path / name, **{"clip=1.0": 'clip=1.0, precision="fp64"'})
        assert programs.run(*words, "train.py", cwd=tmp_path / name).returncode == 0
        found.append(best_weights(tmp_path / name))
    assert largest_difference(*found) < 1e-12


# chat.md

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chat_folder(folder: Path) -> None:
    """Write chats.jsonl and my-model/: a tiny Llama with a tokenizer and a template of its own."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rng = random.Random(0)
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(200):
            thing = rng.choice(["shop", "library", "museum"])
            day = rng.choice(["Monday", "Friday"])
            turns = [
                {"role": "user", "content": f"When does the {thing} open on {day}?"},
                {"role": "assistant", "content": f"The {thing} opens at nine on {day}."},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(folder / "chats.jsonl")], 400, 1, show_progress=False, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "my-model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "my-model")


def losses(line: str) -> list[float]:
    """Return the losses of the summary's line: after training, and before."""
    return [float(number) for number in re.findall(r"(?:loss |\()(\d\.\d+)", line)]


def check_chat(output: str) -> tuple[float, float]:
    """Hold the lines of a training against those of the page; return (its loss, the page's)."""
    *start, _, shown = blocks("chat", "")[0].splitlines()
    lines = output.splitlines()
    for line in start:
        assert line in lines
    found = next(line for line in lines if line.startswith("  validation "))
    assert losses(found)[1] == losses(shown)[1], "before training"
    return losses(found)[0], losses(shown)[0]


def test_a_chat_file_trains_by_the_pages_commands(tmp_path: Path, programs: Any) -> None:
    """Three epochs of its twenty; `make proof` trains all of them, on two processes."""
    make_chat_folder(tmp_path)
    train, sample, export = commands("chat")
    few = ["launch.processes=1", "train.epochs=3"]
    trained = programs.run("-m", *train, *few, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    after, _ = check_chat(trained.stdout + trained.stderr)
    assert after < 4, "of 5.8 before training"
    asked = programs.run("-m", *sample, cwd=tmp_path)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()
    assert programs.run("-m", *export, cwd=tmp_path).returncode == 0
    ours, theirs = tmp_path / "my-model", tmp_path / "chat-model"
    assert json.loads((theirs / "tokenizer.json").read_text()) == json.loads(
        (ours / "tokenizer.json").read_text()
    )
    assert (theirs / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.proof
def test_a_chat_file_trains_on_two_processes(tmp_path: Path) -> None:
    make_chat_folder(tmp_path)
    output = ""
    for command in commands("chat"):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        output += done.stdout + done.stderr
    after, shown = check_chat(output)
    assert after == pytest.approx(shown, rel=0.1)
    assert blocks("chat", "")[1].strip() in output.splitlines()
    from transformers import AutoModelForCausalLM

    _, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "chat-model", output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


# accelerate.md


def write_accelerate_script(folder: Path) -> None:
    """Write the Accelerate script of `tests/moving` as train.py, with a seed."""
    old = (ROOT / "tests" / "moving" / "before_accelerate.py").read_text()
    assert "from accelerate import Accelerator" in old
    (folder / "train.py").write_text(
        old.replace("def main():", "def main():\n    torch.manual_seed(0)")
    )


def test_a_script_of_accelerate_runs_as_it_is(tmp_path: Path, programs: Any) -> None:
    write_accelerate_script(tmp_path)
    first = commands("accelerate")[0]
    assert first[:6] == ["shoal", "run", "--as", "accelerate", "--processes", "2"]
    ranks = programs.world(2, "-m", *first[:4], *first[6:], cwd=tmp_path)
    assert ranks[0].returncode == 0, ranks[0].stderr
    assert ranks[0].stdout == blocks("accelerate", "")[0]


@pytest.mark.proof
def test_the_three_ways_to_start_it_print_the_same(tmp_path: Path) -> None:
    write_accelerate_script(tmp_path)
    script = (tmp_path / "train.py").read_text()
    line = blocks("accelerate", "python")[0].split("  #")[0]
    (tmp_path / "line.py").write_text(f"{line}\n{script}")
    starts = (
        commands("accelerate")[0],
        shlex.split("torchrun --standalone --nproc-per-node 2 --no-python"
                    " shoal run --as accelerate -- train.py"),
        shlex.split("torchrun --standalone --nproc-per-node 2 line.py"),
    )  # fmt: skip
    for words in starts:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment(), capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.stdout == blocks("accelerate", "")[0], done.stderr


# two-machines.md


def node_folders(folder: Path) -> list[Path]:
    """Write the page's train.py into two folders, one for each node's disk."""
    nodes = [folder / "node0", folder / "node1"]
    for node in nodes:
        node.mkdir()
        (node / "train.py").write_text(blocks("two-machines", "python")[0])
    return nodes


def test_two_nodes_are_one_run(tmp_path: Path, programs: Any) -> None:
    nodes = node_folders(tmp_path)
    first, second = programs.world(2, "train.py", nodes=nodes)
    assert first.stdout == blocks("two-machines", "")[0], first.stderr + second.stderr
    assert not second.stdout
    for node in nodes:
        assert (node / "runs/two/checkpoints/step-87").is_dir(), "each disk keeps whole checkpoints"
    program = (nodes[1] / "train.py").read_text()
    (nodes[1] / "train.py").write_text(program.replace("x / 16", "x / 15"))
    for node in nodes:
        (node / "runs").rename(node / "runs-before")
    ranks = programs.world(2, "train.py", nodes=nodes)
    shown = re.search(r"run\.loader: [^,]* samples", blocks("two-machines", "")[1])
    assert shown, "the page's first line"
    assert all(rank.returncode == 2 for rank in ranks)
    assert shown[0] in ranks[0].stderr


@pytest.mark.proof
def test_two_terminals_are_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("two-machines", "python")[0])
    from torch.distributed import TCPStore

    port = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    both = [
        subprocess.Popen(
            [str(port) if word == "29400" else word for word in words], cwd=tmp_path,
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for words in commands("two-machines")[:2]
    ]  # fmt: skip
    (out, said), (other, _) = (one.communicate(timeout=LIMIT_S) for one in both)
    assert out == blocks("two-machines", "")[0], said
    assert not other


# memory.md


def test_plans_print_what_the_page_shows(tmp_path: Path, programs: Any) -> None:
    (tmp_path / "mine.py").write_text(blocks("memory", "python")[0])
    found, status = "", []
    for words in commands("memory"):
        done = programs.run("-m", *words, cwd=tmp_path, environ={"COLUMNS": "100"})
        found += done.stdout
        status.append(done.returncode)
    lines = found.splitlines()
    missing = [
        line
        for block in blocks("memory", "")
        for line in block.splitlines()
        if line != "…" and line not in lines
    ]
    assert not missing
    assert status == [0, 0, 1, 1, 0]


# slow.md

RUNS = ROOT / "docs" / "pictures" / "runs"


def test_the_slow_run_is_diagnosed_as_its_page_shows(tmp_path: Path, programs: Any) -> None:
    for name in ("slow-data", "fast-data"):
        shutil.copytree(RUNS / name, tmp_path / "runs" / name)
    diagnosed = next(words for words in commands("slow") if words[1] == "diagnose")
    done = programs.run("-m", *diagnosed, cwd=tmp_path)
    assert done.stdout == blocks("slow", "")[0]
    listed = programs.run("-m", *commands("slow")[0], cwd=tmp_path).stdout.splitlines()
    assert sorted(line.split()[:2] for line in listed[1:]) == [
        ["fast-data", "ended"],
        ["slow-data", "ended"],
    ]
