"""The examples are real programs: they run as their headers say, alone and on two processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from forks import Forks

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 180


def run(name: str, folder: Path, *arguments: str, before: tuple[str, ...] = ()) -> str:
    """What an example prints; it must end well, and alone say nothing on standard error."""
    process = subprocess.Popen(
        [sys.executable, *before, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, err[-2000:]
    assert before or not err
    return out


def torchrun() -> tuple[str, ...]:
    """`python -m torch.distributed.run` as the headers have it, on a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short_and_say_how_to_start_them(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 60
    header = path.read_text().split('"""')[1]
    assert f"python examples/{path.name}" in header
    assert f"--nproc-per-node 2 examples/{path.name}" in header


WORDS = {
    "digits_cnn": (),
    "gan": ("a", "--short"),
    "ppo": ("a", "--short"),
    "digits_best": ("a", "--short"),
    "sft": ("a", "--short"),
    "lora": ("pretrain", "a"),
}
"""What an example is started with, if not with a folder alone."""


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_examples_take_their_first_step_on_two_processes(
    tmp_path: Path, programs: Forks, name: str
) -> None:
    """As a user starts them; `make proof` runs the whole of them, in float64."""
    for module in {"sft": ("transformers",), "lora": ("transformers", "peft")}.get(name, ()):
        pytest.importorskip(module)
    script = (str(EXAMPLES.parent / "tests" / "first_steps.py"), str(EXAMPLES / f"{name}.py"))
    ranks = programs.world(2, *script, *WORDS.get(name, ("a",)), cwd=tmp_path, timeout=DEADLINE_S)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    assert ranks[0].stdout.endswith("took a step\n")


@pytest.mark.proof
def test_own_loop_goes_on_where_it_stopped_on_other_processes(tmp_path: Path) -> None:
    first = run("own_loop.py", tmp_path, "mine")
    assert re.fullmatch(r"step 150: loss 0\.\d+, \d+ counted\n", first)
    assert (tmp_path / "mine" / "checkpoints" / "step-150").is_dir()
    second = run("own_loop.py", tmp_path, "mine", before=torchrun())
    lines = second.splitlines()
    assert lines[0] == "goes on from step 150"
    assert lines[1].startswith("step 300: loss 0.0")
    assert len(lines) == 2, "only rank 0 speaks"


@pytest.mark.proof
def test_digits_are_learnt(tmp_path: Path) -> None:
    last = run("digits_cnn.py", tmp_path).splitlines()[-1]
    right = float(re.search(r"held out ([\d.]+)% right", last)[1])
    assert right > 95


@pytest.mark.proof  # two losses of unlike counts: tests/worlds/own_loops/test_own_passes.py
def test_distillation_is_the_same_on_two_processes(tmp_path: Path, programs: Forks) -> None:
    """Two losses of unlike counts, in float64, to the last digits."""
    pattern = r"loss ([\d.]+), right ([\d.]+)%"
    words = [(str(EXAMPLES / "distillation.py"), folder, "--float64") for folder in "ab"]
    one = programs.run(*words[0], cwd=tmp_path, timeout=DEADLINE_S)
    assert (one.returncode, one.stderr) == (0, "")
    ranks = programs.world(2, *words[1], cwd=tmp_path, timeout=DEADLINE_S)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    assert not ranks[1].stdout, "only rank 0 speaks"
    alone, two = (re.search(pattern, done.stdout) for done in (one, ranks[0]))
    assert float(alone[1]) == pytest.approx(float(two[1]), rel=1e-12)
    assert alone[2] == two[2]
    assert float(alone[2]) > 88, "82 without the teacher"


@pytest.mark.proof
def test_the_best_is_the_same_alone_on_two_processes_and_resumed(tmp_path: Path) -> None:
    """Plateau, patience and the best value survive; what was written of steps stays."""
    pattern = r"step (\d+), best ([\d.]+), [\d.]+% of images right that it never saw\n"
    alone, short, resumed = (
        re.fullmatch(pattern, run("digits_best.py", tmp_path, folder, "--float64", *more, before=b))
        for folder, more, b in (("a", (), ()), ("b", ("--short",), ()), ("b", (), torchrun()))
    )
    assert float(short[2]) > float(alone[2])
    assert resumed[1] == alone[1]
    assert float(resumed[2]) == pytest.approx(float(alone[2]), rel=1e-12)
    for folder in "ab":
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [*range(1, len(lines) + 1)]
        assert len(lines) > int(alone[1]), "the best was not the last"


NUMBER = re.compile(r"\d+\.\d{4,}(?:e-\d+)?")
"""Of a line: what is printed to its last digit, not what is rounded for people."""


@pytest.mark.proof
@pytest.mark.parametrize("name", ["gan", "distillation", "gradient_penalty", "ppo", "sft"])
def test_it_is_the_same_alone_on_two_processes_and_resumed(tmp_path: Path, name: str) -> None:
    """What is printed at the end, in float64; the resumed run began alone."""
    if name == "sft":
        pytest.importorskip("transformers")
    told = [
        run(f"{name}.py", tmp_path, folder, "--float64", *more, before=before).replace(
            f"{folder}/",
            "FOLDER/",  # sft names its data
        )
        for folder, more, before in (
            ("a", (), ()),
            ("b", (), torchrun()),
            ("c", ("--short",), ()),
            ("c", (), torchrun()),
        )
    ]
    alone, two, short, resumed = ([float(n) for n in NUMBER.findall(one)] for one in told)
    assert alone
    # Of ppo the advantages' mean is 0, and so nearly is the loss: terms of order 1 cancel.
    near = {"abs": 1e-11} if name == "ppo" else {"rel": 1e-12}
    assert two == pytest.approx(alone, **near)
    assert resumed == pytest.approx(alone, **near)
    assert short != pytest.approx(alone, rel=1e-3)
    assert NUMBER.sub("", told[1]) == NUMBER.sub("", told[0]), "what is rounded is equal"


@pytest.mark.proof
def test_the_gan_finds_the_ring_also_when_killed_between_its_two_saves(tmp_path: Path) -> None:
    """The judge is saved first: what the maker goes on from, the judge has."""
    whole = run("gan.py", tmp_path, "a")
    assert 0.8 < float(re.search(r"radius of what it makes: ([\d.]+)", whole)[1]) < 1.2
    run("gan.py", tmp_path, "b", "--short")
    saved = sorted((tmp_path / "b" / "maker" / "checkpoints").glob("step-*"), key=step_of)
    assert len(saved) > 1
    shutil.rmtree(saved[-1])
    assert run("gan.py", tmp_path, "b") == whole


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


@pytest.mark.proof
def test_a_penalty_helps_against_noise(tmp_path: Path) -> None:
    right = [
        float(re.search(r"right ([\d.]+)%", run("gradient_penalty.py", tmp_path, folder, *more))[1])
        for folder, more in (("with", ()), ("without", ("--plain",)))
    ]
    assert right[0] > right[1] + 5


@pytest.mark.proof
def test_ppo_learns(tmp_path: Path) -> None:
    fell = [
        float(re.search(r"falls ([\d.]+) times", run("ppo.py", tmp_path, *more))[1])
        for more in (("a", "--short"), ("b",))
    ]
    assert fell[1] < 0.5 * fell[0]


@pytest.mark.proof
def test_lora_is_the_same_alone_and_resumed_on_two_processes(tmp_path: Path) -> None:
    """Pretrain, export, tune, export, sample; transformers shows bars on standard error."""
    pytest.importorskip("peft")
    plain = ("-W", "ignore")

    def export(source: str, *words: str) -> None:
        command = ["-m", "shoal", "checkpoint", "export", source, *words]
        subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, timeout=DEADLINE_S)

    run("lora.py", tmp_path, "pretrain", "a", "--float64", before=plain)
    export("a/pretrained", "a/base")
    shutil.copytree(tmp_path / "a" / "base", tmp_path / "b" / "base")
    alone, short, resumed = (
        re.fullmatch(
            r"step (\d+): loss ([\d.]+)\n",
            run("lora.py", tmp_path, "tune", folder, "--float64", *more, before=before),
        )
        for folder, more, before in (
            ("a", (), plain),
            ("b", ("--short",), torchrun()),
            ("b", (), plain),
        )
    )
    assert float(short[2]) > 2 * float(alone[2])
    assert resumed[1] == alone[1]
    assert float(resumed[2]) == pytest.approx(float(alone[2]), rel=1e-12)
    export("b/tuned", "b/adapter", "--adapter")
    assert re.match(r"3 \* 4 =", run("lora.py", tmp_path, "sample", "b", before=plain))


def test_the_toml_example_is_accepted() -> None:
    """`shoal train examples/digits.toml` itself takes 15 s; here its keys and values are checked."""
    from shoal.config.load import load_config
    from shoal.forecast.models.model_facts import resolve_model

    config = load_config(EXAMPLES / "digits.toml").config
    assert config.data.source == "digits"
    assert resolve_model(config.model.name, config.model.arguments).family == "resnet"
