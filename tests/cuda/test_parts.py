"""The checks of GPUs run on the CPU too: the driver, its cheapest part, and what happens to it."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def driver():
    found = importlib.util.spec_from_file_location("cuda_run", HERE / "run.py")
    module = importlib.util.module_from_spec(found)
    sys.modules["cuda_run"] = module
    found.loader.exec_module(module)
    return module


def call(tmp_path: Path, *words: str, limit_s: float) -> tuple[int, dict]:
    """(exit status, result) of the driver on the CPU."""
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(HERE / "run.py"), "--out", str(out), *words],
        env={**os.environ, "SHOAL_TEST_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    return done.returncode, json.loads(out.read_text()) if out.exists() else {"said": done.stderr}


def test_every_part_is_there_and_all_fit_in_the_time() -> None:
    run = driver()
    for on, most_s in ((run.ONE, 540), (run.SEVERAL, 600)):
        parts = [part for part in run.PARTS if on in part.on]
        assert len({part.name for part in parts}) == len(parts)
        assert run.TOTAL_S[on] < most_s
        for part in parts:
            module, function = part.work.split(":")
            assert f"\ndef {function}(sheet: Sheet)" in (HERE / f"{module}.py").read_text()
    first = run.PARTS[: len(run.FIRST) + 1]  # `speed` is there for one GPU and for several
    assert list(dict.fromkeys(part.name for part in first)) == list(run.FIRST)
    assert sum(part.limit_s for part in first if run.ONE in part.on) <= run.FIRST_S


def test_the_cheapest_part_passes_on_the_cpu(tmp_path: Path) -> None:
    code, result = call(tmp_path, "--patience", "10", "--parts", "kernels", limit_s=400)
    assert code == 0, result
    (part,) = result["parts"].values()
    assert [row["ok"] for row in part["rows"]] == [True] * 5
    own = json.loads((tmp_path / "result" / "kernels.json").read_text())
    assert own["parts"] == result["parts"]
    assert own["versions"] == result["versions"]
    assert part["state"] == "passed"
    assert len(result["source"]) == 16


def test_an_unknown_part_is_one_line_with_those_there_are(tmp_path: Path) -> None:
    code, result = call(tmp_path, "--parts", "kernel", limit_s=60)
    assert code == 2
    assert (
        "--parts kernel: no such part; there are: speed, where the time goes, memory"
        in result["said"]
    )


def test_rows_before_the_time_limit_are_kept(tmp_path: Path, monkeypatch) -> None:
    run = driver()
    script = "import time\ndef work(sheet):\n    with sheet.row('one') as told: told['a'] = 1\n"
    slow = script + "    with sheet.row('two'): raise ValueError('broke')\n    time.sleep(60)\n"
    (tmp_path / "slow_part.py").write_text(slow)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{HERE}"}
    part = run.Part("slow", "slow_part:work", 25)
    monkeypatch.setattr(run, "KEEP_EVERY_S", 0.5)
    kept: list[dict] = []
    told = run.one_part(run.replace(part, limit_s=3), tmp_path, environ, 100, kept.append)
    assert kept[-1]["state"] == "cut off while it ran"
    assert kept[-1]["rows"] == told["rows"]
    assert told["state"] == "over its 3 s"
    assert [(row["row"], row["ok"]) for row in told["rows"][1:]] == [("one", True), ("two", False)]
    assert "ValueError: broke" in told["rows"][2]["error"]
    assert run.one_part(part, tmp_path, environ, 5, print)["state"] == "not run: no time left"


def test_a_row_that_was_cut_in_two_costs_no_other(tmp_path: Path) -> None:
    kept = tmp_path / "rows.jsonl"
    kept.write_text('{"row": "one", "ok": true}\n{"row": "two", "o')
    assert [row["row"] for row in driver().rows_of(kept)] == ["one"]
    assert driver().rows_of(tmp_path / "none") == []


def test_what_no_json_can_hold_is_kept_as_text(tmp_path: Path) -> None:
    found = importlib.util.spec_from_file_location("cuda_child", HERE / "child.py")
    child = importlib.util.module_from_spec(found)
    found.loader.exec_module(child)
    sheet = child.Sheet(tmp_path / "rows.jsonl")
    with sheet.row("one") as told:
        told["where"] = tmp_path
    (row,) = driver().rows_of(sheet.path)
    assert row["where"] == str(tmp_path)


def test_no_cache_outlives_a_run(tmp_path: Path) -> None:
    """A compiler killed by a time limit left half a file, and every later compile was refused."""
    inherited = driver().environment(tmp_path)
    for name in ("SHOAL_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert Path(inherited[name]).is_relative_to(tmp_path)
        # Parts run in this folder: `import triton` found the empty one of the compiler's kernels.
        assert not Path(inherited[name]).name.isidentifier() or name == "SHOAL_CACHE"


def test_a_rank_finds_what_it_imports(tmp_path: Path) -> None:
    """Ranks are programs: nothing of pytest's paths is theirs, and no world started for want of one."""
    paths = driver().environment(tmp_path)["PYTHONPATH"].split(os.pathsep)
    tests = HERE.parent
    program = ast.parse((tests / "worlds" / "member.py").read_text())
    wanted = {
        alias.name for one in program.body if isinstance(one, ast.Import) for alias in one.names
    }
    own = {name for name in wanted if list(tests.rglob(f"{name}.py"))}
    assert own
    assert all(PathFinder.find_spec(name, paths) for name in own), own


def test_no_part_has_the_name_of_a_package_that_libraries_look_for() -> None:
    """The parts' folder comes first on the path: `kernels`, say, is one that transformers takes."""
    names = {path.stem for path in HERE.glob("*.py")}
    assert not names & {
        "kernels",
        "accelerate",
        "peft",
        "flash_attn",
        "triton",
        "apex",
        "deepspeed",
    }


def test_ranks_that_share_a_device_sum_and_average(monkeypatch) -> None:
    """FSDP2 asks for means; a group that sums instead is hidden by Adam and by clipping."""
    import torch
    import torch.distributed as dist

    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("SHOAL_TEST_DEVICE", "cpu")
    shared = importlib.import_module("host_group")
    store = dist.HashStore()
    options = {name: dist.ReduceScatterOptions() for name in ("SUM", "AVG")}
    for name, option in options.items():
        option.reduceOp = getattr(dist.ReduceOp, name)

    def rank(number: int) -> list[list[float]]:
        group = shared.HostGroup(store, number, 2, shared.LIMIT)
        whole = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (number + 1)
        told = []
        for option in options.values():
            group._reduce_scatter_base(part := torch.empty(2), whole, option)
            group.allreduce([every := whole.clone()], option)
            told.append([*part.tolist(), *every.tolist()])
        return told

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rank, range(2))
    for name in ("device", "host_group"):
        sys.modules.pop(name, None)
    assert first == [[3.0, 6.0, 3.0, 6.0, 9.0, 12.0], [1.5, 3.0, 1.5, 3.0, 4.5, 6.0]]
    assert [told[:2] for told in second] == [[9.0, 12.0], [4.5, 6.0]]


@pytest.mark.proof
@pytest.mark.parametrize("on", ["one", "several"])
def test_all_parts_pass_on_the_cpu(tmp_path: Path, on: str) -> None:
    code, result = call(tmp_path, "--on", on, "--patience", "4", limit_s=2400)
    wrong = {n: p["state"] for n, p in result["parts"].items() if p["state"] != "passed"}
    assert code == 0, wrong
    if on == "several":
        assert result["parts"]["speed"]["rows"][1]["group"] == "host"
