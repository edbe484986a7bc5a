"""A run.toml is code: functions of a stranger's are called after --trust only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import stranger
from forks import Forks
from shoal.base.errors import ConfigError
from shoal.config.trust import load_trusted

CANARY = """
[model]
build = "subprocess:check_output"
args = "touch {canary}"
shell = true
"""
NAMES = {
    "model.build": '[model]\nbuild = "my.module:build"\n',
    "model.loss": '[model]\nloss = "my.module:loss"\n',
    "data.source": '[data]\nsource = "my.module:data"\n',
    "data.source mix": '[data]\nsource = "mix:0.5*stdlib+0.5*my.module:data"\n',
    "data.validation": '[data]\nsource = "digits"\nvalidation = "my.module:data"\n',
    "data.collate": '[data]\ncollate = "my.module:join"\n',
    "optimizer.name": '[optimizer]\nname = "my.module:Steps"\n',
    "train.on": '[train]\non = ["my.module:hook"]\n',
}


def given_away(path: Path) -> Path:
    """A file or folder that belongs to another user from now on."""
    os.chown(path, stranger.NOBODY, stranger.NOBODY)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of this user, as common umasks make it."""
    stranger.needed("who owns a run.toml")
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("key", NAMES)
def test_every_key_that_names_a_function_is_refused(folder: Path, key: str) -> None:
    path = folder / "run.toml"
    path.write_text(NAMES[key])
    load_trusted(path, [], trust=False)  # ours
    given_away(path)
    with pytest.raises(
        ConfigError, match=rf"run\.toml: is nobody's, .*{key.split()[0]} = .*--trust"
    ):
        load_trusted(path, [], trust=False)
    load_trusted(path, [], trust=True)


def test_what_names_no_function_is_nobodys_code(folder: Path) -> None:
    path = folder / "run.toml"
    path.write_text('[train]\nsteps = 3\n[data]\nsource = "text:books/*.txt"\n')
    given_away(path)
    given_away(folder)
    found = load_trusted(path, ["model.build=mine:build"], trust=False)  # said by this user
    assert found.config.train.steps == 3


def test_a_strangers_folder_or_one_open_to_all_is_refused(folder: Path) -> None:
    path = folder / "run.toml"
    path.write_text(NAMES["model.build"])
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="may be written by everybody"):
        load_trusted(path, [], trust=False)
    path.chmod(0o644)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="its folder .* may be written by everybody"):
        load_trusted(path, [], trust=False)
    folder.chmod(0o1777)  # as /tmp: nobody replaces another one's file
    load_trusted(path, [], trust=False)
    folder.chmod(0o755)
    given_away(folder)
    with pytest.raises(ConfigError, match="its folder .* is nobody's"):
        load_trusted(path, [], trust=False)


def test_roots_file_is_everybodys_to_run(folder: Path) -> None:
    path = folder / "run.toml"
    path.write_text(NAMES["model.build"])
    for parent in (folder, *list(folder.parents)[:2]):
        parent.chmod(0o755)

    def loads() -> str:
        return load_trusted(path, [], trust=False).config.model.build

    assert stranger.as_nobody(loads) == "my.module:build"


COMMANDS = {
    "train": ["train"],
    "resume": ["train", "--resume"],
    "prove": ["prove"],
    "compare": ["compare"],
    "plan": ["plan"],
    "plan --explain": ["plan", "--explain"],
    "find lr": ["find", "lr"],
    "find micro-batch": ["find", "micro-batch"],
    "sample": ["sample", "--prompt=x"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_calls_it(folder: Path, command: str, programs: Forks) -> None:
    """The canary of faults_measured.md: a builder that runs a shell command."""
    run, canary = folder / "run", folder / "canary"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "checkpoints" / "step-1" / "manifest.json").write_text("{}")
    path = run / "run.toml"
    path.write_text(CANARY.format(canary=canary))
    given_away(path)
    on_folder = command in ("resume", "sample")
    words = (*COMMANDS[command], str(run if on_folder else path))
    done = programs.run("-m", "shoal", *words, cwd=folder, timeout=300)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "run.toml: is nobody's, and it names functions" in done.stderr
    assert "--trust" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not canary.exists()


def test_with_trust_it_is_called(folder: Path, programs: Forks) -> None:
    path, canary = folder / "run.toml", folder / "canary"
    path.write_text(CANARY.format(canary=canary))
    given_away(path)
    words = ("plan", "--explain", "--trust", str(path))
    done = programs.run("-m", "shoal", *words, cwd=folder, timeout=300)
    assert canary.exists(), (done.stdout, done.stderr)
