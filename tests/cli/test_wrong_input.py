"""What a user can get wrong: one clear line, exit status 2, and no process was started."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from shoal.checkpoint.format.lease import RunLease
from shoal.cli import main
from shoal.cli.usage_errors import SYNONYMS
from shoal.config.load import load_config


def shoal(*arguments: str) -> tuple[int, str]:
    """Run the command in this process; gives the exit status and what stands on standard error."""
    result: Result = CliRunner().invoke(main.app, arguments)
    failure = result.exception
    if failure is not None and not isinstance(failure, SystemExit):
        assert hasattr(failure, "exit_code"), f"not one of ours: {failure!r}"
        return failure.exit_code, str(failure)
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("train.micro_bach=3", "train.micro_bach: no such key; try: train.micro_batch"),
        ("trian.batch=3", "trian.batch: no such section; try: train.batch"),
        ("train.lr=3", "train.lr: no such key; try: optimizer.lr"),
        ("train.steps", "train.steps: has no value; try: train.steps=…"),
        ("train.seed=99999999999999999999", "more than 2^63 − 1; try: train.seed=0"),
        ("optimizer.lr=inf", "optimizer.lr = inf: a finite number is wanted; try: optimizer.lr=0.001"),
        ("run.name=../../evil", "run.name = ../../evil: leads out of run.folder = runs; try: "
                                "run.name=evil, or another run.folder"),
        ("run.name=/evil", "run.name = /evil: leads out of run.folder"),
        ("train.batch=abc", "train.batch = 'abc': a whole number is wanted, got text"),
        ("train.batch=2.5", "train.batch = 2.5: a whole number is wanted, got a number"),
        ("optimizer.betas=[1]", "optimizer.betas = [1]: a list of two numbers is wanted"),
        ("batch=3", "batch=3: overrides are written section.key=value; try: train.batch=3"),
        ("precision.compute=fp23", "precision.compute = fp23: not one of auto, fp64, fp32, bf16, fp16"),
        ("optimizer.schedule=cosin", "try: cosine"),
        ("layout.strategy=dpp", "layout.strategy = dpp: not one of auto, single, dp, ddp, zero1"),
        ("layout.strategy=dualpipe launch.processes=3",
         "so layout.pp is even, got 3; try: layout.pp=2, or layout.pp=4"),
        ("layout.pp=2 layout.schedule=zbv memory.recompute=full launch.processes=2",
         "try: memory.recompute=none, or layout.schedule=1f1b"),
        ("train.compile=blocks memory.recompute=selective",
         "which a compiled block no longer has; try: memory.recompute=full"),
        ("layout.strategy=fsdp optimizer.name=lamb launch.processes=2",
         "layout.strategy = fsdp: cuts every parameter by rows, and optimizer.name = lamb scales a "
         "parameter's step by norms of all of it; try: layout.strategy=zero2, or "),
        ("layout.tp=2 optimizer.name=muon launch.processes=2",
         "layout.tp = 2: cuts weights inside, and optimizer.name = muon turns whole matrices"),
        ("layout.ep=2 layout.dp_replicate=2 optimizer.name=Adafactor launch.processes=2",
         "layout.ep = 2: cuts stacks of experts by rows, and optimizer.name = Adafactor keeps sums"),
        ("layout.strategy=diloco", "try: islands.method=diloco islands.count=2"),
        ("checkpoint.remote=backup", "checkpoint.remote = backup: an address is wanted, as s3://bucket/run; "
         "try: file:///"),
        ("checkpoint.remote=memory://far islands.method=diloco islands.count=2",
         "checkpoint.remote = memory://far: is one run's, and each island has checkpoints of its own; "
         "try: leave checkpoint.remote out"),
        ("layout.strategy=3d launch.processes=2", "try: launch.processes=4"),
        ("layout.strategy=tp layout.zero=1", "try: degrees, layout.tp=2 layout.dp_shard=2"),
        ("layout.zero=1 layout.dp_replicate=2", "layout.zero = 1: splits over layout.dp_shard"),
        ("layout.strategy=hsdp", "layout.strategy = hsdp: is at least 2 × 2 processes"),
        ("layout.strategy=ddp layout.threads=2", "only layout.strategy=dp runs replicas in threads"),
        ("layout.cp=2 layout.context=rings", "layout.context = rings: not one of auto, ring, ulysses"),
        ("layout.tp=2 layout.context=ring", "says how attention is computed over layout.cp"),
        ("layout.ep=2", "layout.ep = 2: deals experts to data-parallel ranks, of which there are "
         "dp_replicate 1 × dp_shard 1, whole shards or whole groups of them; try: "
         "layout.dp_replicate=2, or layout.ep=1"),
        ("layout.dp_replicate=2 layout.dp_shard=3 layout.ep=2", "try: layout.ep=1"),
        ("layout.dp_shard=4 layout.ep=3", "try: layout.ep=2"),
        ("layout.ep=2 layout.tp=2 launch.processes=4", "layout: tp 2 = 2 processes (ep "
         "multiplies nothing), but launch.processes = 4; try: layout.dp_replicate=2"),
        ("layout.ep=2 launch.processes=2", "try: layout.dp_replicate=2"),
        ("layout.tp=3 launch.processes=4", "try: layout.tp=2 layout.dp_replicate=2"),
        ("layout.tp=2 launch.processes=4", "try: layout.dp_replicate=2"),
        ("layout.schedule=1f1", "layout.schedule = 1f1: not one of gpipe, 1f1b, interleaved"),
        ("layout.schedule=1f1b launch.processes=2", "layout.schedule = 1f1b: is about the stages of a "
         "pipeline, and layout.pp is 1; try: layout.pp=2"),
        ("layout.pp=2 layout.dp_shard=2 layout.schedule=zbv", "try: layout.schedule=1f1b, or "
         "layout.zero=2"),
        ("layout.strategy=interleaved launch.processes=2 train.batch=6 train.micro_batch=2",
         "try: train.micro_batch=3, or train.batch=8, or layout.schedule=1f1b"),
        ("layout.split=*.q.weight=whole launch.processes=2", "try: layout.tp=2, or leave "
         "layout.split out"),
        ("layout.sequence_parallel=on launch.processes=2", "layout.tp, which is 1"),
        ("layout.chunks=-1", "layout.chunks = -1: at least 0 is wanted"),
        ("layout.split=*.q.weight=colum", "layout.split: *.q.weight = colum: not one of whole, "
         "column, row; try: column"),
        ("layout.split=*.q.weight", "try: layout.split=*.q.weight=column"),
        ("layout.sequence_parallel=of", "layout.sequence_parallel = of: not one of auto, on, off"),
        ("layout.strict=yes", "layout.strict = 'yes': true or false is wanted"),
        ("layout.dp_replicate=3 launch.processes=4", "try: layout.dp_replicate=4"),
        ("layout.strategy=single launch.processes=2", "try: launch.processes=1"),
        ("train.batch=10 train.micro_batch=4 launch.processes=2", "try: train.batch=8"),
        ("train.batch=10 train.accumulate=3 launch.processes=2", "try: train.batch=12"),
        ("memory.recompute=some", "memory.recompute = some: not one of none, selective, full"),
        ("memory.offload=disk", "memory.offload = disk: not one of none, optimizer, parameters"),
        ("optimizer.average=1.5", "less than 1 is wanted; try: optimizer.average=0.999"),
        ("train.prove=slow", "train.prove = slow: not one of quick, off"),
        ("precision.reduce=int8", "precision.reduce = int8: not one of auto, fp32, bf16"),
        ("precision.loss_scale=128", "only fp16 has a loss scale"),
        ("precision.residual=bf16", "only bf16 products have a bf16 residual stream"),
        ("model.dmi=3", "model.dmi: no such argument of llama; try: model.dim"),
        ("model.name=lama", "try: model.name=llama"),
        ("model.dim=250 model.heads=4", "try: model.dim=2"),
        ("model.name=llama-3-8b", "8.0B parameters take"),
        ("model.name=llama-3-70b", "the guide says 3d"),
        ("model.build=nowhere:build", "model.build = nowhere:build: there is no module nowhere"),
        ("model.build=my_modle:build", "there is no module my_modle; try: my_model"),
        ("model.build=json", "model.build = json: must be pkg.mod:function"),
        ("model.loss=json.nowhere:f", "model.loss = json.nowhere:f: there is no module json.no"),
        ("train.on=[\"nowhere:f\"]", "train.on = nowhere:f: there is no module nowhere"),
        ("model.seq_len=128", "model.seq_len: no such argument of llama"),
        ("data.source=digits", "model.name = llama: reads tokens, data.source = digits gives "
         "images; try: model.name=resnet"),
        ("data.source=digits model.name=llama-3-8b", "try: model.name=resnet"),
        ("model.name=resnet", "model.name = resnet: reads images, data.source = stdlib gives "
         "tokens; try: model.name=llama, or data.source=digits"),
        ("model.name=mlp", "model.name = mlp: reads numbers"),
        ("data.source=text:missing/*.txt", "text:missing/*.txt"),
        ("data.source=tokens:missing", "tokens:missing"),
        ("data.source=stdlb", "try: stdlib"),
        ("data.source=nowhere:make", "nowhere"),
        ("train.steps=-1", "train.steps = -1: at least 0 is wanted"),
        ("train.steps=5 train.epochs=1", "one of them decides the length"),
        ("optimizer.learnrate=3", "optimizer.learnrate: no such key; try: optimizer.lr"),
        ("precision.compute=fp8", "not one of auto, fp64, fp32, bf16, fp16; try: bf16"),
        ("train.batch=-4", "train.batch = -4: at least 0 is wanted; try: train.batch=16"),
        ("train.batch=9223372036854775806", "no number that a run could have; try: "
         "train.batch=16"),
        ("train.batch=45 launch.processes=2", "train.batch = 45: does not divide over 2 "
         "data-parallel ranks; try: train.batch=44"),
        ("train.batch=13 launch.processes=3", "train.batch = 13: does not divide over 3 "
         "data-parallel ranks; try: train.batch=12"),
        ("train.batch=1073741789 launch.processes=2", "try: train.batch=1073741788"),
        ("launch.processes=3000", "launch.processes = 3000: this machine has"),
        ("launch.processes=3", "3 data-parallel ranks do not divide the default of 16 samples per "
         "step; try: train.batch=24"),
        ("layout.zero=4", "layout.zero = 4: a stage is 0, 1, 2 or 3; try: layout.zero=3"),
        ("layout.threads=2 layout.zero=1", "layout.zero = 1: layout.strategy = dp is stage 0"),
        ("optimizer.name=" + "x" * 5000 + " optimizer.lr=" + "y" * 5000, "y… (5002 characters)"),
        ("launch.nodes=2", "torchrun"),
        ("missing.toml", "missing.toml: no such file; without one the defaults count"),
        ("llama-3.1-8b", "llama-3.1-8b: no such file; a model is named by model.name=llama-3.1-8b"),
        ("Qwen/Qwen2.5-0.5B", "no such file; a model of Hugging Face is a folder here: model.name="),
        ("train.py", "train.py: no such file"),
    ],
)  # fmt: skip
def test_one_line_and_two(argument: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("raise RuntimeError('the check imports nothing')")
    code, text = shoal("train", *argument.split())
    assert code == 2
    line = text.strip().splitlines()[-1]
    assert said in line
    assert len(text.strip().splitlines()) <= 2, text  # the first line of train, then the error
    assert not (tmp_path / "runs").exists(), "nothing was started or written"


@pytest.mark.parametrize(
    ("verb", "name", "said"),
    [
        ("train", "chats.jsonl", "holds data, and a run.toml is wanted; try: data.source=jsonl:"),
        ("data look", "rows.txt", "holds data, and a run.toml is wanted; try: data.source=text:"),
        ("prove", "train.py", "to prove it: shoal prove -- train.py"),
        (
            "plan",
            "config.json",
            "describes a model, and a run.toml is wanted; try: model.name=hf:.",
        ),
        ("compare", "run.yaml", "keys of a command are written section.key=value"),
    ],
)
def test_a_file_that_is_no_run_toml_is_told_where_it_belongs(
    verb: str, name: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n')
    code, text = shoal(*verb.split(), name)
    assert code == 2
    line = text.strip().splitlines()[-1]
    assert line.startswith(f"{name}: "), text
    assert said in line


def test_resume_of_nothing(tmp_path: Path) -> None:
    code, text = shoal("train", "--resume", "runs/none")
    assert code == 2
    assert "--resume runs/none: does not exist; try: shoal runs" in text
    folder = tmp_path / "runs" / "empty"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text("")
    code, text = shoal("train", "--resume", "runs/empty")
    assert code == 2
    assert "holds no complete checkpoint" in text


@pytest.mark.parametrize("run_toml", ["", '[islands]\ncount = 2\nmethod = "diloco"\n'])
def test_resume_of_a_run_before_its_first_save(run_toml: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "young"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(run_toml)
    lease = RunLease(folder, "young")
    lease.acquire()
    code, text = shoal("train", "--resume", "runs/young")
    assert code == 2
    assert re.search(r"runs/young: in use by pid \d+ on host", text), text
    assert "start anew" not in text, "two runs in one folder"
    lease.release()
    code, text = shoal("train", "--resume", "runs/young")
    assert code == 2
    assert "checkpoint; start anew with" in text


def saved_run(tmp_path: Path, name: str, run_toml: str) -> Path:
    """A run folder with something that counts as a complete checkpoint."""
    step = tmp_path / "runs" / name / "checkpoints" / "step-5"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    (tmp_path / "runs" / name / "run.toml").write_text(run_toml)
    return tmp_path / "runs" / name


@pytest.mark.parametrize(
    ("run_toml", "said"),
    [("", "--resume runs/mine: its run.toml is empty"),
     ("\0\0\0", "runs/mine/run.toml: is not TOML")],
)  # fmt: skip
def test_resume_without_a_configuration(tmp_path: Path, run_toml: str, said: str) -> None:
    saved_run(tmp_path, "mine", run_toml)
    code, text = shoal("train", "--resume", "runs/mine")
    assert code == 2
    assert said in text.strip().splitlines()[-1]


def test_a_used_name_is_refused(tmp_path: Path) -> None:
    saved_run(tmp_path, "mine", "")
    code, text = shoal("train", "run.name=mine")
    assert code == 2
    assert "shoal train --resume runs/mine" in text


def test_a_name_without_a_checkpoint_is_free_again(tmp_path: Path) -> None:
    from shoal.cli.start import prepare_run, write_run_folder

    def start(name: str) -> None:
        write_run_folder(
            prepare_run(["model.name=mlp", "data.source=digits", f"run.name={name}"], None)
        )

    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    start("mine")
    (folder / "plan.json").write_text('{"flops_per_sample": 1}')
    (folder / "checkpoints" / "step-5").mkdir(parents=True)  # without a manifest: not complete
    start("mine")
    kept = json.loads((folder / "plan.json").read_text())
    assert "flops_per_sample" not in kept, "the old attempt's model may have been another"


def test_a_run_toml_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.base.runlog import atomic_files
    from shoal.cli.start import prepare_run, write_run_folder

    def crash(*_: object) -> None:
        raise OSError("disk full")

    prepared = prepare_run(["model.name=mlp", "data.source=digits", "run.name=mine"], None)
    prepared.folder.mkdir(parents=True)
    (prepared.folder / "run.toml").write_text("# as it was")
    monkeypatch.setattr(atomic_files.os, "replace", crash)
    with pytest.raises(OSError, match="disk full"):
        write_run_folder(prepared)
    assert (prepared.folder / "run.toml").read_text() == "# as it was"


def test_origins_survive_a_resume(tmp_path: Path) -> None:
    from shoal.cli.start import prepare_run, write_run_folder

    (tmp_path / "my.toml").write_text("[model]\nname = 'mlp'\n[data]\nsource = 'digits'\n")
    arguments = ["my.toml", "optimizer.lr=1e-2", "run.name=mine", 'data.validation="0.1"']
    folder = saved_run(tmp_path, "mine", "")
    (folder / "checkpoints").rename(tmp_path / "later")
    write_run_folder(prepare_run(arguments, None))
    (tmp_path / "later").rename(folder / "checkpoints")
    before = (folder / "run.toml").read_text()
    assert "# my.toml" in before
    assert "# derived" in before
    write_run_folder(prepare_run([], Path("runs/mine")))
    assert (folder / "run.toml").read_text() == before
    edited = before.replace("seed = 0 ", "seed = 7 ")
    (folder / "run.toml").write_text(edited)
    write_run_folder(prepare_run(["train.steps=9"], Path("runs/mine")))
    lines = {line.split(" = ")[0]: line for line in (folder / "run.toml").read_text().splitlines()}
    assert lines["steps"].endswith("# command line")
    assert lines["seed"].endswith("# runs/mine/run.toml"), "an edited line is no default"
    assert lines["lr"].endswith("# command line")
    assert lines["name"].endswith("# command line")


def test_the_systems_refusals_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"run.name={'a' * 300}"
    monkeypatch.setattr(
        sys, "argv", ["shoal", "train", "model.name=mlp", "data.source=digits", name]
    )
    with pytest.raises(SystemExit) as exit_:
        main.main()
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shoal: runs/aaa")
    assert line.endswith("File name too long")


@pytest.mark.parametrize(("key", "where"), [("folder", "afile"), ("name", "runs/taken")])
def test_a_file_where_the_run_folder_should_be_is_named_by_its_key(key: str, where: str) -> None:
    Path("runs").mkdir()
    Path(where).touch()
    value = where.removeprefix("runs/")
    code, text = shoal("train", "model.name=mlp", "data.source=digits", f"run.{key}={value}")
    assert (code, text.split(": ", 1)[0]) == (2, f"run.{key} = {value}")
    assert text.endswith(f"{where if key == 'name' else 'afile'} is a file, not a folder")


def test_a_run_of_ones_own_script_is_not_resumed_from_the_command_line() -> None:
    folder = Path("runs/mine/checkpoints/step-3")
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    code, text = shoal("train", "--resume", "runs/mine")
    assert code == 2
    assert text.endswith(
        "made it with shoal.parallelize; start that again: its run.restore() goes on"
    )


def test_a_file_is_not_a_module() -> None:
    Path("pkg").mkdir()
    Path("pkg/mine.py").touch()
    code, text = shoal("train", "model.build=./pkg/mine.py:build")
    assert code == 2
    assert text.endswith("is a file, a module is wanted; try: pkg.mine:build")


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("best.pt", "best.pt: a safetensors file is written, which torch.load does not open; "
                    "try: best.safetensors, for safetensors.torch.load_file"),
        ("pytorch_model.bin", "try: pytorch_model.safetensors"),
        ("exported", "exported: holds README.md, which no export wrote, and would be replaced whole; "
                     "try: a folder that is new, empty or an earlier export"),
        ("exported/README.md", "exported/README.md: is a file; try: exported/README.md.safetensors"),
        ("my out/model.safetensors", "model.safetensors: there is no folder my out; try: mkdir -p 'my out'"),
    ],
)  # fmt: skip
def test_an_export_is_not_written_where_it_would_mislead(out: str, said: str) -> None:
    Path("exported").mkdir()
    Path("exported/README.md").touch()
    folder = Path("runs/mine/checkpoints/step-3")
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    code, text = shoal("checkpoint", "export", "runs/mine", out)
    assert code == 2
    assert said in text


def test_aliases_are_answered_with_our_names() -> None:
    loaded = load_config(None, ["train.train_batch_size=8", "optimizer.gradient_clipping=0.5"])
    assert loaded.config.train.batch == 8
    assert loaded.config.optimizer.clip == 0.5
    assert "train.train_batch_size is called train.batch here" in loaded.notices[0]
    loaded = load_config(None, ["model.seq_len=128", "model.learning_rate=3"])
    assert loaded.config.model.arguments == {"seq_len": 128, "learning_rate": 3}
    assert not loaded.notices, "a builder's own arguments may have any name"


def test_a_list_of_texts_may_be_written_plainly(tmp_path: Path) -> None:
    from shoal.config.save import to_toml

    loaded = load_config(None, ["layout.split=*.gate.weight=column, head.*=whole", "layout.tp=2"])
    assert loaded.config.layout.overrides == {"*.gate.weight": "column", "head.*": "whole"}
    (tmp_path / "run.toml").write_text(to_toml(loaded))
    assert load_config(tmp_path / "run.toml").config.layout == loaded.config.layout
    in_toml = load_config(None, ['layout.split=["*.gate.weight=column", "head.*=whole"]'])
    assert in_toml.config.layout.split == loaded.config.layout.split


def test_a_file_with_a_mistake_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nbatch = 'x'\n")
    code, text = shoal("train", "run.toml")
    assert code == 2
    assert "run.toml: train.batch = 'x': a whole number is wanted" in text
    (tmp_path / "run.toml").write_text("[train\n")
    assert "run.toml: is not TOML" in shoal("train", "run.toml")[1]


@pytest.mark.parametrize("verb", ["list", "verify", "export"])
def test_checkpoint_verbs_on_nothing(verb: str) -> None:
    extra = ["out.safetensors"] if verb == "export" else []
    code, text = shoal("checkpoint", verb, "nowhere", *extra)
    assert code == 2
    assert "nowhere: does not exist; try: shoal runs" in text


def test_the_real_program_prints_one_line_on_standard_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal", "train", "train.micro_bach=3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2
    assert done.stderr == (
        "shoal: command line: train.micro_bach: no such key; try: train.micro_batch\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "--nosuch"), "shoal: train: No such option: --nosuch; help: shoal train"),
        (("plan", "--top"), "shoal: plan: Option '--top' requires an argument; help: shoal plan"),
        (("trian",), "shoal: No such command 'trian'; try: shoal train; help: shoal --help\n"),
    ],
)
def test_wrong_options_are_one_line_too(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(said), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("run s", "run: Missing option '--as'; try: shoal runs; help: shoal run --help"),
        (
            "run my.py",
            "run: Missing option '--as'; try: shoal run --as accelerate my.py, or --as deepspeed; help: shoal run --help",
        ),
        ("run --as deepspeed", "run: Missing argument 'words'; help: shoal run --help"),
        ("runz", "No such command 'runz'; try: shoal run, or shoal runs; help: shoal --help"),
        ("Runs", "No such command 'Runs'; try: shoal runs; help: shoal --help"),
        (
            "islands kye",
            "islands: No such command 'kye'; try: shoal islands key; help: shoal islands --help",
        ),
        ("trace nope", "nope: does not exist; try: shoal runs"),
        ("check point list", "No such command 'check'; try: shoal checkpoint; help: shoal --help"),
        ("help runs", "No such command 'help'; try: shoal runs --help; help: shoal --help"),
        ("ls", "No such command 'ls'; try: shoal runs; help: shoal --help"),
        (
            "checkpoint lst x",
            "checkpoint: No such command 'lst'; try: shoal checkpoint list; help: shoal checkpoint --help",
        ),
        (
            "checkpoint verify",
            "checkpoint verify: Missing argument 'PATH'; help: shoal checkpoint verify --help",
        ),
        ("runs --jsno", "runs: No such option: --jsno; try: --json; help: shoal runs --help"),
        ("runs --alive=3", "runs: Option '--alive' does not take a value; help: shoal runs --help"),
        ("--versoin", "No such option: --versoin; try: --version; help: shoal --help"),
        (
            "data runs/a",
            "data: No such command 'runs/a'; try: shoal data look runs/a; help: shoal data --help",
        ),
        (
            "islands runs/a",
            "islands: No such command 'runs/a'; try: shoal islands show runs/a; "
            "help: shoal islands --help",
        ),
        ("qqq\x1b[31m", "No such command 'qqq\\x1b[31m'; help: shoal --help"),
    ],
)
def test_a_wrong_verb_or_option_names_the_nearest(
    line: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shoal", *line.split()])
    assert main._run_command_line() == 2
    assert capsys.readouterr().err == f"shoal: {hint}\n"


def test_every_synonym_is_a_command() -> None:
    verbs = {verb for group in main.HEADINGS.values() for verb in group} | {"--help", "--version"}
    for word, meant in SYNONYMS.items():
        first = meant.format(word=word).split()[0]
        assert first in verbs, word
        assert word not in verbs


def test_a_strategy_takes_the_place_of_a_files_degrees(tmp_path: Path) -> None:
    """A run of tp 2 × pp 2 goes on as fsdp by one word."""
    file = tmp_path / "run.toml"
    file.write_text("[layout]\ntp = 2\npp = 2\nschedule = 'gpipe'\n")
    loaded = load_config(file, ["layout.strategy=fsdp"])
    assert loaded.config.layout.degrees() == {}
    assert loaded.config.layout.schedule == ""
    assert loaded.notices == [
        "layout.strategy = fsdp: takes the place of layout.pp, layout.tp, layout.schedule in the file"
    ]
    kept = load_config(file, ["layout.strategy=fsdp", "layout.tp=2"])
    assert kept.config.layout.degrees() == {"tp": 2}, "what the command line says counts"
    assert load_config(file, ["layout.dp_shard=2"]).config.layout.degrees()["pp"] == 2


def test_a_degree_of_one_leaves_a_name_alone() -> None:
    loaded = load_config(None, ["layout.strategy=fsdp", "layout.tp=1", "layout.pp=1"])
    assert loaded.config.layout.degrees() == {}
