"""`shoal plan` as a user meets it: text, JSON, tables, files written, wrong input, no torch."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from forks import Forks

GUARD = """
import sys
class NoTorch:
    def find_spec(self, name, *rest):
        if name.partition('.')[0] == 'torch':
            raise ImportError('torch was imported')
assert 'torch' not in sys.modules
sys.meta_path.insert(0, NoTorch())
sys.argv = ['shoal', 'plan', *sys.argv[1:]]
from shoal.cli.main import main
main()
"""
BARE = {"PATH": "/usr/bin:/bin", "COLUMNS": "100", "HOME": "/"}


@functools.cache
def light() -> Forks:
    """What commands are forked from: it has imported this one, and no torch."""
    source = str(Path(shoal.__file__).parents[1])  # the source that is tested
    return Forks({**BARE, "PYTHONPATH": source}, ("shoal.cli.main", "shoal.cli.plan"))


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    light().close()


def plan(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command; no torch may be imported for a model known by name."""
    place = {"HOME": str(folder or "/")}
    return light().run("-c", GUARD, *words, cwd=folder or Path.cwd(), environ=place, timeout=300)


def test_a_plan_fits_one_screen(tmp_path: Path) -> None:
    done = plan("model.name=llama-3-8b", "--on", "8xH100-80GB", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    for word in ("MFU", "tokens/s", "memory of 1", "step of 1", "why 1", "guide", "next"):
        assert word in done.stdout, word


INSTANTS = ["building", "loading", "proving", "first step", "step", "saving", "exporting"]


def test_json_is_what_is_drawn(tmp_path: Path) -> None:
    done = plan("model.name=llama-3-70b", "--on", "16x8xH100-80GB", "--json", folder=tmp_path)
    record = json.loads(done.stdout)
    assert record["version"] == 1
    assert record["machine"]["devices"] == 128
    best = record["layouts"][0]
    assert (best["verdict"], best["starts"], best["after"]) == ("fits", True, "fits")
    for row in record["layouts"]:
        instants = {one["name"]: one for one in row["instants"]}
        checked = row["degrees"].get("tp", 1) * row["degrees"].get("cp", 1) > 1
        assert ("checking" in instants) == checked
        # A proof would take too long.
        assert [name for name in instants if name != "checking"] == [*INSTANTS[:2], *INSTANTS[3:]]
        assert instants["step"]["device_bytes"] == row["peak_bytes"]
        # What is built comes from the host unit by unit, under tp and pp too.
        assert instants["building"]["device_bytes"] < row["peak_bytes"]
        assert instants["building"]["files_bytes"] == 4 * record["model"]["parameters"]
        assert 0 < instants["saving"]["host_bytes"] < record["machine"]["node_memory_bytes"]
        assert instants["exporting"]["device_bytes"] == 0
    assert best["peak_bytes"] < record["machine"]["memory_bytes"]
    assert best["peak_low_bytes"] < best["peak_bytes"] < best["peak_high_bytes"]


@pytest.fixture(scope="module")
def too_large(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """What the command says of a layout that does not fit."""
    words = ("model.name=llama-3-8b", "--on", "8xA100-40GB", "layout.strategy=ddp")
    return plan(*words, folder=tmp_path_factory.mktemp("plan"))


def test_what_does_not_fit_says_what_would(too_large: subprocess.CompletedProcess[str]) -> None:
    done = too_large
    assert done.returncode == 1
    assert "no, lacks" in done.stdout
    assert "make it fit" in done.stdout
    assert "layout.strategy=fsdp" in done.stdout


def test_a_plan_says_what_every_instant_holds(tmp_path: Path) -> None:
    done = plan("model.name=llama-3-70b", "--on", "16x8xH100", "--top", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "on a device + a node's 1.8 TiB: checking" in text
    assert "each machine builds the model once, in files: 262.8 GiB, in TMPDIR unless twice" in text
    done = plan("model.name=llama-3-8b", "--on", "4xL40S", "--top", "1", folder=tmp_path)
    assert "on a device + a node's memory, not known: checking" in " ".join(done.stdout.split())


LLAMA_30B = {
    "model_type": "llama", "num_hidden_layers": 60, "hidden_size": 6656, "vocab_size": 32000,
    "num_attention_heads": 52, "intermediate_size": 17920, "max_position_embeddings": 4096,
}  # fmt: skip


def test_a_name_beside_degrees_is_heard(tmp_path: Path) -> None:
    words = ("model.name=llama-3-8b", "--on", "8xH100", "layout.tp=2", "layout.strategy=fsdp")
    record = json.loads(plan(*words, "--json", folder=tmp_path).stdout)
    assert {row["zero"] for row in record["layouts"]} == {3}
    assert {row["degrees"]["tp"] for row in record["layouts"]} == {2}


def test_a_cluster_has_the_batch_that_its_user_gave(tmp_path: Path) -> None:
    """What is left open (the micro-batch) is searched; the sequence is the model's own."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_30B))
    words = ("model.name=hf:config.json", "--on", "32x8xH100-80GB", "train.batch=512")
    done = plan(*words, "--write", "run.toml", folder=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    text = " ".join(done.stdout.split())
    assert "sequence 4096, bf16; 512 samples per step" in text
    assert "run.toml says stdlib, Python's own source text; nearest for 32.5B parameters" in text
    written = (tmp_path / "run.toml").read_text()
    assert "sequence = 4096" in written
    assert "batch = 512" in written


def test_a_run_on_several_machines_is_started_by_their_launcher(tmp_path: Path) -> None:
    words = ("model.name=gpt-2", "--on", "2x8xH100-80GB", "--write", "run.toml")
    text = " ".join(plan(*words, folder=tmp_path).stdout.split())
    assert "next srun --nodes=2 --ntasks-per-node=8 shoal train run.toml" in text
    assert "torchrun --nnodes=2 --nproc-per-node=8" in text


def test_what_fits_replaces_what_did_not(too_large: subprocess.CompletedProcess[str]) -> None:
    text = too_large.stdout
    next_line = " ".join(text[text.index("next ") :].split())
    assert "layout.strategy=ddp" not in next_line
    assert next_line.count("layout.strategy=") == 1


def test_the_plan_becomes_a_run(tmp_path: Path) -> None:
    from shoal.config.load import load_config

    words = ("model.name=llama-3-8b", "--on", "8xH200", "train.batch=64", "layout.strategy=fsdp")
    done = plan(*words, "--write", "run.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    config = load_config(tmp_path / "run.toml").config
    assert config.layout.dp_shard == 8
    assert config.layout.zero == 3
    assert config.train.batch == 64
    assert config.launch.processes == 8
    again = plan(*words, "--write", "run.toml", folder=tmp_path)
    assert again.returncode == 2
    assert "exists; try: another name" in again.stderr


def test_a_pipeline_becomes_a_run_too(tmp_path: Path) -> None:
    from shoal.config.load import load_config

    words = (
        "model.name=llama-3-8b",
        "--on",
        "8xH200",
        "train.batch=64",
        "layout.pp=2",
        "layout.tp=2",
    )
    words = (*words, "layout.schedule=interleaved", "layout.chunks=4", "train.micro_batch=2")
    done = plan(*words, "--write", "run.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    layout = load_config(tmp_path / "run.toml").config.layout
    assert (layout.pp, layout.tp, layout.schedule, layout.chunks) == (2, 2, "interleaved", 4)
    assert "next        shoal train run.toml" in done.stdout


def test_dealt_experts_become_a_run_too(tmp_path: Path) -> None:
    from shoal.config.load import load_config

    words = ("model.name=mixtral-8x7b", "--on", "8x8xH100-80GB", "--write", "run.toml")
    text = " ".join(plan(*words, folder=tmp_path).stdout.split())
    assert "1 fsdp + ep: dp 64 · ep 8" in text
    layout = load_config(tmp_path / "run.toml").config.layout
    assert (layout.dp_shard, layout.zero, layout.ep) == (64, 3, 8)


@pytest.mark.parametrize("words", [("layout.cp=2",), ("model.name=moe", "layout.ep=2")])
def test_what_auto_would_not_take_is_told_to_the_run(tmp_path: Path, words: tuple[str]) -> None:
    """The command that is proposed runs the layout that was planned, its stage included."""
    said = ("layout.dp_shard=2", "launch.processes=4")
    done = plan(*words, *said, "data.source=synthetic", folder=tmp_path)
    next_line = " ".join(done.stdout[done.stdout.index("next ") :].split())
    assert "layout.zero=" in next_line, done.stdout + done.stderr
    assert all(word in next_line for word in words)


def test_what_is_asked_for_here_is_searched(tmp_path: Path) -> None:
    done = plan("layout.tp=2", "layout.pp=2", folder=tmp_path)
    assert "3d: pp 2 · tp 2" in done.stdout, done.stderr
    next_line = " ".join(done.stdout[done.stdout.index("next ") :].split())
    assert next_line.startswith("next shoal train layout.tp=2 layout.pp=2")
    assert "is about the stages" in plan("layout.schedule=1f1b", folder=tmp_path).stderr


def test_tables(tmp_path: Path) -> None:
    done = plan("--table", "memory", "--models", "7b,70b", "--gpus", "8,64", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    states = next(line for line in done.stdout.splitlines() if line.startswith("llama-2-7b"))
    # 18, 6 + 12/8, 2 + 16/8, 16/8 bytes times 6.738e9 parameters
    assert states.split()[3:] == ["121.3", "50.5", "27.0", "13.5"]
    done = plan("--table", "speedup", "--gpus", "2,16", folder=tmp_path)
    assert "one node" in done.stdout
    assert "DDP" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on", "8xH1000"), '"H1000" is no device'),
        (("--on", "8x"), "then expected"),
        (("model.name=llama-3-80b",), "try: llama-3-8b"),
        (("--table", "speed"), "try: speedup"),
        (("--table", "memory", "--models", "7x"), "no published model"),
        (("--table", "memory", "--gpus", "2,x"), "--gpus x"),
        (
            ("layout.tp=3", "model.name=llama-3-8b", "--on", "8xH100"),
            "3 devices, but there are 8; try: layout.tp=2",
        ),
        (("model.name=hf:nowhere",), "nowhere"),
        (("layout.tp=-1", "model.name=llama-3-8b", "--on", "8xH100"), "at least 1"),
        (("layout.zero=7", "model.name=llama-3-8b", "--on", "8xH100"), "a stage is 0, 1, 2 or 3"),
        (("precision.compute=fp16",), "a CPU has no fast fp16"),
        (("--on", "8xH100 + 8xcpu", "model.name=llama-3-8b"), "cannot share one run"),
        (("model.dims=3",), "try: model.dim"),
        (("model.nam=gpt",), "try: model.name"),
        (("layout.tp=2", "layout.strategy=single"), "try: leave layout.strategy out"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = plan(*words, folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert said in done.stderr


def test_a_model_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 16,
                "hidden_size": 2048,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 8192,
                "vocab_size": 128256,
                "tie_word_embeddings": True,
            }
        )
    )
    done = plan("model.name=hf:.", "--on", "1xA10", folder=tmp_path)
    assert "1.2B parameters" in done.stdout, done.stderr
