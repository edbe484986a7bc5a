"""`shoal replay`: a step repeats to the bit, and two runs part at the planted step and tensor."""

from __future__ import annotations

import json
import logging
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import replay_run, replay_script, start
from shoal.cli.main import app
from shoal.cli.workers.replay_worker import repeat_steps
from shoal.fabric import start_world
from shoal.replay.replay_lines import Replay, replay_lines
from shoal.replay.step_marks import StepRecord
from shoal.trainer import main_job

MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
        self.drop = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(8, 3)
        self.scale, self.calls = scale, 0
    def forward(self, x):
        for at, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) * (self.scale if at == 1 else 1.0)
        return self.head(self.drop(x))
def build(scale=1.0):
    return Net(scale)
def rows(seed=0, bad=None):
    keys = torch.Generator().manual_seed(seed)
    found = [(torch.randn(8, generator=keys), torch.tensor(n % 3)) for n in range(48)]
    return found
def other_rows():
    found = rows()
    found[30] = (found[30][0] * 50, found[30][1])
    return found
"""
WORDS = ("model.build=replay_net:build", "data.source=replay_net:rows", "train.steps=9",
         "train.batch=8", "train.micro_batch=4", "data.validation=0.2", "checkpoint.every=3",
         "train.validate_every=2", "checkpoint.keep=9", "train.prove=off", "train.guards=off")  # fmt: skip


def train(name: str, *words: str, resume: str = "") -> Path:
    """Train a run in this process; return its folder."""
    settings = [*words] if resume else [*WORDS, f"run.name={name}", *words]
    prepared = start.prepare_run(settings, Path(resume) if resume else None, 1, force=True)
    prepared.folder.mkdir(parents=True, exist_ok=True)
    start.write_run_folder(prepared)
    assert main_job.train(prepared.folder, lambda *_: "", world=start_world({})) == 0
    return prepared.folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with a run of nine steps; replays train in this process."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "replay_net.py").write_text(MODEL)
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
    # A run records the sources of modules that are the user's, by name; pytest has many conftest.py.
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").name == "conftest.py":
            patch.delitem(sys.modules, name)
    # The replay of a script sets it, and it is not for the tests after these.
    patch.setenv("SHOAL_FOLDER", "")
    patch.delenv("SHOAL_FOLDER")
    patch.setattr(main_job, "measure_machine", lambda *_: None)
    save = main_job.Run.save
    patch.setattr(main_job.Run, "save", lambda run, **more: save(run, **{**more, "wait": True}))
    patch.setattr(replay_run, "_train", lambda prepared, *_, **__: in_process(prepared.folder))
    train("a")
    yield folder
    patch.undo()
    sys.modules.pop("replay_net", None)


def in_process(folder: Path) -> None:
    assert repeat_steps(folder.resolve(), start_world({})) == 0


def ask(*words: str, code: int = 0) -> str:
    """What `shoal replay` prints."""
    done = CliRunner().invoke(app, ["replay", *words])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([(2, 0), (4, 3), (6, 3), (9, 6)], marks=pytest.mark.proof),
        [(2, 0), (9, 6)],
    ],
    ids=["all", "first and last"],
)
def test_every_step_repeats_to_the_bit_and_nothing_is_written(steps: list[tuple[int, int]]) -> None:
    """With dropout, validations on the way, from checkpoints and from the start."""
    before = listing(Path("runs"))
    for step, began in steps:
        found = json.loads(ask("a", "--step", str(step), "--json"))
        assert found["repeats"], found
        assert (found["from_step"], found["compared_steps"]) == (began, step - began)
        assert found["same_layout"]
    assert listing(Path("runs")) == before, "the run is only read, and no folder stays"
    text = ask("runs/a", "--step", "5", "--statistics")
    assert "from its checkpoint of step 3: 2 steps, single on 1 process" in text
    assert text.count("same bits") == 2
    assert "repeated: 2 steps with the run's bits" in text
    assert re.search(r"\d +\S+ +\S+\d +layers\.2\.weight\n", text), text
    assert re.search(r"\d +\S+ +layers\.0\n", text), "rms of its outputs"


@pytest.mark.usefixtures("here")
def test_another_format_agrees_to_rounding_and_a_changed_setting_is_named() -> None:
    found = json.loads(ask("a", "--step", "4", "--precision", "fp64", "--json"))
    assert found["repeats"], found["difference"]
    assert (found["compute"], found["from_step"]) == ("fp64", 0), "checkpoints are fp32"
    assert not found["same_layout"]
    text = ask("a", "--step", "4", "optimizer.lr=0.5", code=3)
    assert "different from step 4: lr" in text, text


@pytest.mark.usefixtures("here")
def test_a_difference_is_measured_against_one_rounding_of_each_weight() -> None:
    """What rounding grows to is equal; a planted difference is found, also beside it."""
    text = ask("a", "--step", "4", "--precision", "fp64", "model.scale=1.01", code=3)
    assert "once more, with each weight moved by one rounding" in text, text
    assert re.search(
        r"different from step 1: .* one rounding of each weight moves .* by \S+e-\d\d", text
    )
    own, record, nudged = (
        {step: {"step": step, "loss": 1.0 + step * by, "grad_norm": 1.0} for step in (1, 2, 3)}
        for by in (0.0, 1e-3, 8e-4)
    )
    found = StepRecord("a", "single", 1, "fp32", rows=record)
    done = Replay(Path("a"), 0, found, own, False, "fp32")
    assert done.may_be_rounding()
    assert not done.repeats_run(), "as long as nothing is known of its rounding"
    assert not replace(done, nudged_rows=record).repeats_run(), "a weight's rounding moves nothing"
    equal = replace(done, nudged_rows=nudged)
    assert equal.repeats_run()
    assert "moves these numbers by 6.0e-04" in replay_lines(equal, 3)[-1]
    record[3]["lr"], own[3]["lr"] = 1e-3, 2e-3
    assert not equal.repeats_run(), "a rate has no rounding"
    same = replace(equal, is_same_layout=True)
    assert not same.repeats_run()
    assert not same.may_be_rounding()


@pytest.mark.usefixtures("here")
def test_notices_of_a_start_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """As that of train.guards=off: the run's own start printed them."""
    ask("a", "--step", "2")
    assert "train.guards" not in caplog.text
    assert not logging.getLogger("shoal").disabled


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "step", "kind", "tensor", "key"),
    [
        (["train.seed=1"], 1, "weights before", "layers.0.weight", "train.seed: 0 → 1"),
        pytest.param(  # a loop of one's own with another rate, below
            *(["optimizer.betas=0.9,0.999"], 1, "weights after", "layers.0.weight"),
            "optimizer.betas",
            marks=pytest.mark.proof,
        ),
        pytest.param(  # as a bad sample, a step and a layer later
            *(["model.scale=1.01"], 1, "forward", "layers.2", "model.scale"),
            marks=pytest.mark.proof,
        ),
        (["data.source=replay_net:other_rows"], 4, "forward", "layers.0", "data.source"),
    ],
    ids=["seed", "betas", "code of a layer", "a bad sample"],
)
def test_two_runs_part_at_the_planted_step_and_tensor(
    words: list[str], step: int, kind: str, tensor: str, key: str
) -> None:
    name = re.sub(r"\W", "-", words[0])
    other = train(name, *words)
    record = json.loads(ask("a", "--against", str(other), "--json", code=3))
    assert record["reproduced"]
    found = record["tensor"]
    if key == "data.source":
        step = found["step"]  # where the order of the samples brings the bad one
        assert record["number"]["step"] == step
        assert step > 1, "nothing parts before it"
    assert (found["step"], found["kind"], found["name"]) == (step, kind, tensor), record
    assert any(key in one for one in record["differing_keys"]), record


@pytest.mark.usefixtures("here")
def test_a_record_is_compared_later_and_equal_runs_are_equal(tmp_path: Path) -> None:
    file = tmp_path / "step-5.json"
    ask("a", "--step", "5", "--record", str(file))
    assert "equal: 2 steps" in ask("a", "--against", str(file))
    found = json.loads(file.read_text())
    marks = found["steps"]["5"]["marks"]["gradients"]
    marks["layers.1.weight"]["digest"] = "0" * 16
    file.write_text(json.dumps(found))
    text = ask("a", "--against", str(file), code=3)
    assert (
        "first different tensor: step 5, gradients, layers.1.weight, apart by 0.0e+00 (1 of "
        in text
    )
    assert "outputs are equal and this gradient is not" in text
    train("twin")
    assert "equal: 9 steps of runs/a and twin" in ask("a", "--against", "twin")
    file.write_text("{}")
    done = CliRunner().invoke(app, ["replay", "a", "--against", str(file)])
    assert "is no record of steps; try: a file that shoal replay RUN" in str(done.exception)
    script = tmp_path / "train.py"
    script.write_text("precious")
    done = CliRunner().invoke(app, ["replay", "a", "--step", "5", "--record", str(script)])
    assert "exists and is no record; try: --record" in str(done.exception)
    assert script.read_text() == "precious"


OWN = """
import sys
import torch, shoal
from replay_net import Net, rows
torch.manual_seed(0)
model = Net()
folder = next((word for word in sys.argv[1:] if word.startswith("runs/")), "runs/own")
rate = 2e-2 if "--faster" in sys.argv else 1e-2
run = shoal.parallelize(model, torch.optim.AdamW(model.parameters(), lr=rate), batch=8, folder=folder)
if "--fresh" not in sys.argv:
    run.restore()
open("log.txt", "a").write("x")
for epoch in run.epochs(2):
    for batch in run.loader(rows()):
        if "--written-out" in sys.argv:
            for micro in run.micro_batches(batch):
                loss = torch.nn.functional.cross_entropy(model(micro.inputs), micro.targets, reduction="sum")
                run.backward(loss, len(micro.targets))
            run.update()
        else:
            run.step(batch)
        if run.step_count == 4:
            run.save()
run.close()
"""


@pytest.mark.usefixtures("here")
def test_a_loop_of_ones_own_repeats_with_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        replay_script, "_run_processes", lambda folder, *_, **__: in_process(folder)
    )
    Path("own.py").write_text(OWN)
    monkeypatch.setattr(sys, "argv", ["own.py", "--fresh"])
    runpy.run_path("own.py", run_name="__main__")
    before = listing(Path("runs/own/checkpoints")), Path("runs/own/metrics.jsonl").read_bytes()
    for words, step, steps in ((["own.py"], 7, 3), (["own.py", "--written-out"], 6, 2)):
        found = json.loads(ask("own", "--step", str(step), "--json", "--", *words))
        assert (found["from_step"], found["compared_steps"]) == (4, steps), found
        if len(words) == 1:
            assert found["repeats"], found["difference"]
            assert found["same_layout"]
    assert "layers.2.weight" in ask("own", "--step", "7", "--statistics", "--", "own.py")
    text = ask("own", "--step", "7", "--", "own.py", "--fresh")
    assert "the script restored no checkpoint, so it began at its first step" in text
    assert "repeated: 7 steps with the run's bits" in text
    monkeypatch.setattr(sys, "argv", ["own.py", "--fresh", "--faster", "runs/fast"])
    runpy.run_path("own.py", run_name="__main__")
    pair = "own", "--against", "runs/fast", "--json", "--", "own.py"
    found = json.loads(ask(*pair, "--", "own.py", "--faster", "runs/fast", code=3))
    assert found["reproduced"], found
    assert (found["tensor"]["step"], found["tensor"]["kind"]) == (1, "weights after"), found
    after = listing(Path("runs/own/checkpoints")), Path("runs/own/metrics.jsonl").read_bytes()
    assert after == before
    assert Path("log.txt").read_text() == "xx", "the script runs in a copy of its folder"
    done = CliRunner().invoke(app, ["replay", "own", "--step", "7"])
    assert "try: shoal replay runs/own --step N -- train.py" in str(done.exception)
    done = CliRunner().invoke(app, ["replay", "own", "--step", "7", "--", "owm.py"])
    assert "owm.py: there is no such script; try: own.py" in str(done.exception)
    Path("else.py").write_text("import shoal")
    done = CliRunner().invoke(app, ["replay", "own", "--step", "7", "--", "else.py"])
    assert "else.py: never made this run; try: the script" in str(done.exception)


DRAWS = """
import torch, shoal
from replay_net import Net
torch.manual_seed(0)
model = Net()
run = shoal.parallelize(
    model, torch.optim.AdamW(model.parameters(), lr=1e-2), batch=8, folder="runs/draws"
)
run.restore()
keys = torch.Generator().manual_seed(1)
while run.step_count < 6:
    x = torch.randn(8, 8, generator=keys)
    run.step((x, x.argmax(1) % 3))
    if run.step_count == 4:
        run.save()
run.close()
"""


@pytest.mark.usefixtures("here")
def test_a_loop_that_draws_its_own_batches_repeats_from_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restore sets no generator back that the run does not know."""
    monkeypatch.setattr(
        replay_script, "_run_processes", lambda folder, *_, **__: in_process(folder)
    )
    Path("draws.py").write_text(DRAWS)
    monkeypatch.setattr(sys, "argv", ["draws.py"])
    runpy.run_path("draws.py", run_name="__main__")
    text = ask("draws", "--step", "6", "--", "draws.py")
    assert "different from step 5, and the script may hold state that its restore" in text
    assert "repeated: 6 steps with the run's bits" in text
    Path("draws.py").write_text(DRAWS.replace("lr=1e-2", "lr=2e-2"))
    text = ask("draws", "--step", "6", "--", "draws.py", code=3)
    assert "may hold state" not in text, "a changed script is named, and nothing is tried"
    assert "differs: source of draws.py: changed" in text


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "3"], "replay: no run is named; try: shoal replay runs/NAME --step N"),
        (["a", "--step", "12"], "--step 12: runs/a has steps 1 to 9; try: --step 9"),
        (["a"], "runs/a: which step? try: --step 9"),
        (["a", "--step", "2", "--", "train.py"], "so `shoal train` made it; leave out the script"),
        (["runs/none", "--step", "1"], "does not exist"),
        (["a", "--step", "3", "--layout", "fdsp"], "--layout = fdsp"),
        (["a", "--step", "3", "layout.tp=3"], "tp"),
    ],
    ids=["no run", "late step", "no step", "script", "no folder", "layout", "degree"],
)
def test_what_a_user_gets_wrong_is_one_line(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["replay", *words])
    told = done.output + str(done.exception)
    assert done.exit_code
    assert said in told, told


def test_islands_servers_and_own_loops_are_refused_by_name(tmp_path: Path) -> None:
    for key, said in (
        ('[islands]\ncount = 2\nmethod = "diloco"\n', "island-0 --step N"),
        ('[layout]\nstrategy = "parameter-server"\nupdates = "asynchronous"\n', "layout.updates"),
    ):
        (tmp_path / "run.toml").write_text(key)
        (tmp_path / "island-0").mkdir(exist_ok=True)
        done = CliRunner().invoke(app, ["replay", str(tmp_path), "--step", "1"])
        assert said in str(done.exception), (done.output, done.exception)
    (tmp_path / "run.toml").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"loss":1.0}\n')
    (tmp_path / "plan.json").write_text("{}")
    done = CliRunner().invoke(app, ["replay", str(tmp_path), "--step", "1"])
    assert "a script of your own made it" in str(done.exception), done.exception
    (tmp_path / "ranks.json").write_text('{"ranks": [{"rank": 0}, {"rank": 1}]}')
    (tmp_path / "events.jsonl").write_text('{"event":"library_run","library":"deepspeed"}\n')
    (tmp_path / "train.py").touch()
    words = ["--step", "1", "--layout", "single", "--", f"{tmp_path}/train.py"]
    done = CliRunner().invoke(app, ["replay", str(tmp_path), *words])
    assert "loaders of deepspeed deal each process its own samples" in str(done.exception)
