"""Every calculator prints one screen of 100 columns, gives plain JSON, and refuses what it cannot use."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from shoal.base.errors import PlanError
from shoal.teach.calculate import MAY_BE_ZERO, SCREENS, calculate
from shoal.teach.calculators import collectives_costs, goodput
from shoal.teach.drawings.screen import table_lines

WORDS = tuple(
    [
        "amdahl",
        "scaling",
        "collectives",
        "bubble",
        "mfu",
        "checkpoints",
        "goodput",
        "failures",
        "stragglers",
        "servers",
        "diloco",
        "islands",
    ]
)


def record_of(capsys: pytest.CaptureFixture[str], word: str, *arguments: str) -> dict[str, object]:
    calculate(word, arguments, json=True)
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_the_words_are_these() -> None:
    assert tuple(SCREENS) == WORDS


@pytest.mark.parametrize("word", WORDS)
def test_one_screen_of_100_columns(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    what, _ = SCREENS[word]
    calculate(word)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert 20 <= len(lines) <= 45
    assert len(what) <= 60
    text = "\n".join(lines)
    assert "Source: " in text
    assert "└" in text, "no plot"


@pytest.mark.parametrize("word", WORDS)
def test_json_is_plain_and_has_what_was_asked(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_of(capsys, word)
    assert {"calculator", "given", "results", "curves", "meaning", "source"} <= set(record)
    defaults = {k: p.default for k, p in inspect.signature(SCREENS[word][1]).parameters.items()}
    assert set(record["given"]) == set(defaults)
    assert record["results"]
    assert all(len(points) > 1 for points in record["curves"].values())


def test_options_reach_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("gpus=16384", "mtbf_hours=3.1", "stall_s=5", "restart_s=600", "interval_s=336")
    found = record_of(capsys, "goodput", *given)["results"]
    assert found["goodput"] == goodput.goodput(336, 5, 600, 11160)
    assert found["first_order"] == pytest.approx(0.92, abs=0.005)
    found = record_of(capsys, "collectives", "ranks=16", "mib=1", "alpha_us=10", "gb_per_s=1")
    assert found["results"]["seconds"]["ring"] == collectives_costs.ring_all_reduce_s(
        16, 2**20, 10e-6, 1e-9
    )


def test_a_measured_speed_up_gives_the_serial_share(capsys: pytest.CaptureFixture[str]) -> None:
    found = record_of(capsys, "amdahl", "gpus=2", "speedup=1.8")["results"]
    assert found["serial"] == pytest.approx(0.111, abs=5e-4)
    assert found["speedup"] == pytest.approx(1.8)


def test_the_speed_up_table_shows_what_is_passed_on_and_its_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calculate("scaling", ["gpus=2,16"])
    text = capsys.readouterr().out
    for piece in ("1.8× q 11.1 %", "8× q 6.7 %", "1.9× q 5.3 %", "13× q 1.5 %", "14× q 0.95 %"):
        assert piece in text


def test_infinite_figures_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    assert record_of(capsys, "islands")["results"]["hiding_bytes_per_s"] is None
    assert record_of(capsys, "amdahl", "serial=0")["results"]["limit"] is None


def test_svg_is_kept_where_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    calculate("goodput", [f"svg={path}"])
    assert str(path) in capsys.readouterr().out
    assert ElementTree.fromstring(path.read_text()).tag.endswith("svg")


WRONG = {
    ("goodputt", ()): "try: shoal simulate goodput",
    ("goodput", ("mtbf_hour=3",)): "try: mtbf_hours",
    ("goodput", ("gpus=many",)): "gpus = many: not a number; try: gpus=16384",
    ("goodput", ("gpus=1.5",)): "gpus = 1.5: a whole number; try: gpus=2",
    ("goodput", ("gpus=0",)): "gpus = 0: must be more than 0",
    ("goodput", ("stall_s=-3",)): "stall_s = -3: must be more than 0",
    ("goodput", ("stall_s=nan",)): "stall_s = nan: not a number",
    ("goodput", ("stall_s=1e999",)): "stall_s = 1e999: not a number",
    ("goodput", ("gpus=",)): "gpus= has no value",
    ("goodput", ("gpus",)): "gpus has no value",
    ("goodput", ("gpus=1", "gpus=2")): "gpus is given twice",
    ("goodput", ("interval_s=60", "write_s=90")): "try: write_s=60",
    ("stragglers", ("distribution=gauss",)): "normal, lognormal, exponential",
    ("mfu", ("recompute=all",)): "none, selective, full",
    ("collectives", ("ranks=12",)): "try: ranks=16",
    ("amdahl", ("serial=2",)): "try: serial=1",
    ("amdahl", ("gpus=4", "speedup=9")): "try: speedup=4",
    ("islands", ("target=1",)): "try: target=0.95",
    ("failures", ("days=1e9",)): "try: days=1938",
    ("failures", ("runs=9000",)): "try: runs=717",
    ("scaling", ("gpus=2,x",)): "gpus = x: not a number",
    ("scaling", ("parameters=1e300",)): "parameters = 1e300: at most 1e+18",
    ("diloco", ("parameters=1e300",)): "parameters = 1e300: at most 1e+18",
    ("goodput", ("gpus=1e300",)): "gpus = 1e300: at most 1e+18",
    ("bubble", ("ranks=1e18",)): "too far apart",
    ("stragglers", ("steps=1e9",)): "try: steps=1000000",
    ("failures", ("spares=1e7",)): "try: spares=10000",
    ("failures", ("repair_hours=1e9",)): "try: repair_hours=39743.6",
}


@pytest.mark.parametrize("asked", WRONG, ids=lambda asked: " ".join((asked[0], *asked[1])))
def test_wrong_input_is_one_line_with_the_nearest(asked: tuple[str, tuple[str, ...]]) -> None:
    with pytest.raises(PlanError) as told:
        calculate(asked[0], asked[1])
    assert WRONG[asked] in str(told.value)
    assert "\n" not in str(told.value)


def screen_fits(word: str, key: str, value: str, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether a screen was shown; where it was refused, that must be allowed and explained."""
    refused = ""
    try:
        calculate(word, [f"{key}={value}"])
    except PlanError as told:
        refused = str(told)
    lines = capsys.readouterr().out.splitlines()
    if refused:
        assert "try: " in refused, (key, value)
        assert value != "0" or key not in MAY_BE_ZERO, refused
        return False
    assert max(map(len, lines)) <= 100, (key, value)
    assert "nan" not in "\n".join(lines), (key, value)
    return True


@pytest.mark.parametrize("word", WORDS)
def test_zero_works_where_it_is_allowed_and_large_numbers_too(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option at 0, 1 and far beyond its default: a screen, or one line that says why not."""
    shown = 0
    for key, parameter in inspect.signature(SCREENS[word][1]).parameters.items():
        other = isinstance(parameter.default, str | tuple)
        if other or dataclasses.is_dataclass(parameter.default) or key in ("runs", "steps"):
            continue
        for value in ("0", "1", str(int(parameter.default * 100 + 100)), "1e18"):
            shown += screen_fits(word, key, value, capsys)
    assert shown > 4


def test_what_one_device_or_few_ranks_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert record_of(capsys, "stragglers", "gpus=1")["results"]["waiting_share"] == 0  # type: ignore[index]
    calculate("stragglers", ["every=10"])
    assert "spread 3.0 %/√10" in capsys.readouterr().out
    calculate("collectives", ["ranks=4"])
    assert "G = 1 nodes of g = 4" in capsys.readouterr().out
    calculate("bubble", ["ranks=5", "micro_batches=3"])
    shown = capsys.readouterr().out
    assert "no formula below 5" in shown
    assert "needs" not in shown
    calculate("scaling", ["gb_per_s=1"])
    assert capsys.readouterr().out.count("—") == 4, "slower than one device: no serial share"


def test_drawn_failures_stand_beside_the_expected_ones(capsys: pytest.CaptureFixture[str]) -> None:
    calculate("failures", ["spares=0"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    expected, drawn = (line[-1] for line in lines if line[:1] in (["failures"], ["failures,"]))
    assert expected == "418"
    assert float(drawn) < 100


def test_columns_without_room_are_left_out_whole_and_named() -> None:
    table = (("name", "first", "second"), ("a", "12345", "123456"))
    lines = table_lines(table, 18)
    assert max(map(len, lines)) <= 24
    assert lines[-1] == "  (no room for: second)"
    assert lines[2] == "  a      12345"


def test_no_torch_and_no_rich_are_loaded() -> None:
    code = (
        "import sys; from shoal.teach.calculate import calculate; calculate('goodput');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plain_terminals_get_plain_signs() -> None:
    code = "from shoal.teach.calculate import calculate; calculate('diloco')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        env={"PYTHONIOENCODING": "ascii:replace", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert "●" not in done.stdout.decode("ascii")
    assert "*" in done.stdout.decode("ascii")
