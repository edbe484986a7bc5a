"""Checkpoints in a remote folder: copied beside training, never taken half, and gone on from."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from cli_run import TOY_ARGUMENTS, CommandLine, lines
from shoal.base.errors import ConfigError
from shoal.checkpoint.format.listing import verify
from shoal.checkpoint.remote.remote_folder import check_remote


def step(number: int) -> list[str]:
    names = ("manifest.json", "rank-0.safetensors", "rank-1.safetensors")
    return [f"checkpoints/step-{number}/{name}" for name in names]


def test_saves_go_there_and_a_fresh_folder_goes_on(worlds, tmp_path: Path) -> None:
    """Retention there as here; tags; each file is fetched once; on one process too."""
    here, store = tmp_path / "run", tmp_path / "store"
    paths = {"folder": str(here), "store": str(store)}
    world = worlds(2)
    before = world.call("remote_case:trained", words=["", "", ""], tags=True, **paths)
    last = before[0]["there"][-1]
    assert last == [*step(2), *step(3), *(f"tags/best/{name}" for name in step(3))]
    assert before[0]["heard"] == [f"remote = flaky://{store}: has checkpoints/step-3"]
    for path in store.rglob("step-*"):
        assert verify(path) == []
    for size, name in ((2, "other"), (1, "alone")):
        paths["folder"] = str(tmp_path / name)
        for rank, found in enumerate(worlds(size).call("remote_case:gone_on", **paths)):
            assert (found["found"], found["step"]) == (True, 3)
            assert found["sum"] == pytest.approx(before[rank]["sum"], rel=1e-12)
            told = [f"remote = flaky://{store}: step 3 was brought from there"]
            assert found["heard"][:1] == ([] if rank else told)
        log = store / "checkpoints" / "step-3" / "fetched"
        assert sorted(log.read_text().split()) == ["rank-0.safetensors", "rank-1.safetensors"]
        log.unlink()
        assert verify(tmp_path / name / "checkpoints" / "step-3") == []
    tagged = world.call("remote_case:gone_on", tag="best", **paths)
    assert [found["step"] for found in tagged] == [3, 3]
    older = world.call("remote_case:gone_on", step=2, **paths)
    assert [found["step"] for found in older] == [2, 2]


def test_a_copy_that_fails_is_one_line_and_never_whole(worlds, tmp_path: Path) -> None:
    """No space, a file cut short in silence, no manifest, no answer; the next save tries again."""
    store = tmp_path / "store"
    paths = {"folder": str(tmp_path / "run"), "store": str(store)}
    words = ["full", "short", "manifest", "away", ""]
    found = worlds(2).call("remote_case:trained", words=words, keep=2, **paths)[0]
    start = f"remote = flaky://{store}: "
    end = "checkpoints/step-{} was not copied there"
    assert found["heard"] == [
        f"{start}No space left on device; {end.format(1)}",
        f"{start}rank-1.safetensors is not there as it was sent; {end.format(2)}",
        f"{start}Permission denied; {end.format(3)}",
        f"{start}ConnectionError: the store does not answer; {end.format(4)}",
        f"{start}has checkpoints/step-5",
    ]
    for there in found["there"][:4]:
        assert not [name for name in there if name.endswith("manifest.json")]
    assert found["there"][4] == step(5)  # what was cut off is cleared away


def test_killed_between_files_and_manifest(worlds, tmp_path: Path) -> None:
    """A fresh folder goes on from the step before; the old one copies its own once more."""
    store, here = tmp_path / "store", tmp_path / "run"
    paths = {"folder": str(here), "store": str(store)}
    first = worlds(2)
    first.call("remote_case:trained", words=[""], **paths)
    first.ask("remote_case:trained", words=["hang"], **paths)
    until_s = time.monotonic() + 30
    while not (store / step(2)[2]).is_file():
        assert time.monotonic() < until_s
        time.sleep(0.05)
    first.kill()
    assert (store / "checkpoints" / "step-2").is_dir()
    assert (here / "checkpoints" / "step-2" / "manifest.json").is_file()
    (store / "WORD").write_text("")
    fresh = {"folder": str(tmp_path / "fresh"), "store": str(store)}
    assert [f["step"] for f in worlds(2).call("remote_case:gone_on", **fresh)] == [1, 1]
    shutil.rmtree(tmp_path / "fresh")
    assert [f["step"] for f in worlds(2).call("remote_case:gone_on", **paths)] == [2, 2]
    assert verify(store / "checkpoints" / "step-2") == []
    assert [f["step"] for f in worlds(2).call("remote_case:gone_on", **fresh)] == [2, 2]


def test_what_does_not_verify_is_not_taken(worlds, tmp_path: Path) -> None:
    store = tmp_path / "store"
    paths = {"folder": str(tmp_path / "run"), "store": str(store)}
    world = worlds(2)
    world.call("remote_case:trained", words=["", ""], **paths)
    one, two = (store / step(number)[2] for number in (1, 2))
    data = bytearray(two.read_bytes())
    data[-1] ^= 1
    two.write_bytes(data)
    fresh = {"folder": str(tmp_path / "fresh"), "store": str(store)}
    found = world.call("remote_case:gone_on", **fresh)
    assert [one["step"] for one in found] == [1, 1]
    start = f"remote = flaky://{store}: "
    assert "checkpoints/step-2/rank-1.safetensors: " in found[0]["heard"][0]
    assert found[0]["heard"][0].endswith("does not match its hash in manifest.json; not taken")
    assert found[0]["heard"][1] == f"{start}step 1 was brought from there"
    one.write_bytes(b"short")
    shutil.rmtree(tmp_path / "fresh")
    wanted = f"CheckpointError: {start}none of its 2 checkpoints is whole; to start over, choose another one"
    assert [one["found"] for one in world.call("remote_case:gone_on", **fresh)] == [wanted] * 2
    assert (
        world.call("remote_case:not_restored", **fresh)
        == [
            f"remote = flaky://{store}: holds checkpoints of an earlier run, up to step 2; call "
            f"run.restore() before the first step to go on with it, or choose another folder"
        ]
        * 2
    )
    (store / "WORD").write_text("away")
    wanted = f"ClusterError: rank 0: {start}ConnectionError: the store does not answer; start the run again"
    assert [one["found"] for one in world.call("remote_case:gone_on", **fresh)] == [wanted] * 2
    found = world.call("remote_case:gone_on", **paths)  # has its own
    assert [one["step"] for one in found] == [2, 2]
    assert found[0]["heard"][0] == (
        f"{start}ConnectionError: the store does not answer; going on from the newest checkpoint "
        f"that is here"
    )


@pytest.mark.proof  # the parts: above, and tests/cli/test_wrong_input.py
def test_the_command_goes_on_on_another_machine(tmp_path: Path) -> None:
    """On one process, after zero2 on two; its folder knows nothing of the first."""
    remote = f"checkpoint.remote=file://{tmp_path}/store"
    here, there = (tmp_path / name for name in ("here", "there"))
    here.mkdir()
    there.mkdir()
    code, said = CommandLine(
        here, *TOY_ARGUMENTS, remote, "layout.strategy=zero2", "launch.processes=2"
    ).finish()
    assert code == 0, said
    assert f"{remote.replace('=', ' = ', 1)}: has checkpoints/step-12" in said
    store = sorted((tmp_path / "store" / "checkpoints").iterdir())
    assert [path.name for path in store] == ["step-12", "step-6", "step-9"]
    assert [verify(path) for path in store] == [[], [], []]
    again = CommandLine(there, *TOY_ARGUMENTS, remote, "launch.processes=1", "train.steps=15")
    code, said = again.finish()
    assert code == 0, said
    assert "step 12 was brought from there" in said
    assert [row["step"] for row in lines(again.run / "metrics.jsonl")] == [13, 14, 15]
    assert (tmp_path / "store" / "checkpoints" / "step-15" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("backup/run", "an address is wanted, as s3://bucket/run; try: file:///"),
        ("s4://bucket/run", "Protocol not known: s4; try: s3://…"),
    ],
)
def test_an_address_that_nobody_serves(address: str, line: str) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.remote = {address}: .*{line}"):
        check_remote(address)
