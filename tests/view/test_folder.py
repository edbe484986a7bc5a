"""Reading files while they are written: half lines, torn lines, files that were cut back."""

from __future__ import annotations

from pathlib import Path

from shoal.view import RunFolder
from shoal.view.run_folder_reader import JsonLinesTail


def steps(found: tuple[list[dict[str, int]], bool]) -> list[int]:
    return [record["step"] for record in found[0]]


def line(step: int) -> str:
    return f'{{"step":{step}}}\n'


def test_only_what_is_new_is_given(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = JsonLinesTail(path)
    assert tail.read() == ([], False)  # not there yet
    path.write_text(line(1))
    assert steps(tail.read()) == [1]
    assert tail.read() == ([], False)
    with path.open("a") as file:
        file.write(line(2) + line(3))
    assert tail.read() == ([{"step": 2}, {"step": 3}], False)


def test_half_a_line_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = JsonLinesTail(path)
    path.write_text(line(1) + '{"ste')
    assert steps(tail.read()) == [1]
    assert tail.read() == ([], False)
    with path.open("a") as file:
        file.write('p":2}\n')
    assert steps(tail.read()) == [2]


def test_a_torn_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(line(1) + '{"step":{"step":2}\n' + "[3]\n" + "\x00\x00\n" + line(4))
    tail = JsonLinesTail(path)
    assert steps(tail.read()) == [1, 4]


def test_a_file_that_was_cut_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(line(1) + line(2) + line(3))
    tail = JsonLinesTail(path)
    tail.read()
    path.write_text(line(1))
    assert tail.read() == ([{"step": 1}], True)
    with path.open("a") as file:
        file.write(line(2))
    assert tail.read() == ([{"step": 2}], False)


def test_a_file_that_was_cut_and_has_grown_beyond_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(line(1) + line(2) + line(3))
    tail = JsonLinesTail(path)
    tail.read()
    path.write_text(line(1) + '{"step":2,"again":1}\n' + line(3) + line(4))
    records, cut_back = tail.read()
    assert cut_back
    assert [record["step"] for record in records] == [1, 2, 3, 4]


def test_a_file_cut_to_nothing_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(line(1))
    tail = JsonLinesTail(path)
    tail.read()
    path.write_text("")
    assert tail.read() == ([], True)


def test_plan_and_checkpoints(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.plan() == {}
    assert run.checkpoints() == []
    (tmp_path / "plan.json").write_text('{"steps": 3}')
    for name in ("step-9", "step-10", "step-11.tmp", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in ("step-9", "step-10", "step-x"):
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    assert run.plan() == {"steps": 3}
    assert run.checkpoints() == [9, 10]
    (tmp_path / "plan.json").write_text("{half")
    assert run.plan() == {}
