"""`shoal simulate islands`: keys of [islands] as in run.toml, facts beside them, one line for errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal.base.errors import ShoalError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.cli import simulate as command
from shoal.forecast.time.island_costs import IslandsFacts, islands_cost

app = typer.Typer(pretty_exceptions_enable=False)
app.command("simulate")(command.simulate)


def simulate(*arguments: str) -> tuple[int, str]:
    """Exit status and what is said: standard output, or the one line of an error."""
    result = CliRunner().invoke(app, ["islands", *arguments])
    if isinstance(result.exception, ShoalError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


def results(*arguments: str) -> dict[str, Any]:
    code, text = simulate(*arguments, "--json")
    assert code == 0, text
    return dict(json.loads(text))


def test_keys_of_the_section_and_facts_reach_the_prediction() -> None:
    found = results(
        "islands.method=streaming-diloco", "islands.count=3", "islands.period=100",
        "islands.fragments=5", "islands.overlap=2", "islands.codec=int8", "parameters=20m",
        "step_s=0.5", "mbit_per_s=50", "latency_ms=10", "processes=2", "tokens_per_step=1k",
        "slowest=0.5",
    )  # fmt: skip
    policy = IslandsPolicy(
        "streaming-diloco", count=3, period=100, fragments=5, overlap=2, codec="int8"
    )
    facts = IslandsFacts(
        20e6, 0.5, 50e6 / 8, 0.01, near_bytes_per_s=125e6, speeds=(1, 1, 0.5), tokens=1000, ranks=2
    )
    cost = islands_cost(policy, facts)
    for key, value in cost.record().items():
        assert found["results"][key] == value, key
    assert found["results"]["steps"] == [100, 100, 50]
    assert found["results"]["settled"]["outer_lr"] == 0.7
    assert found["given"]["islands"]["codec"] == "int8"


def test_the_table_is_over_link_rates_and_the_given_one() -> None:
    links = results("mbit_per_s=50")["results"]["links"]
    assert [link["mbit_per_s"] for link in links] == [10, 50, 200, 1000]
    links = results("mbit_per_s=64")["results"]["links"]
    assert [link["mbit_per_s"] for link in links] == [10, 50, 64, 200, 1000]
    code, text = simulate("mbit_per_s=64")
    assert code == 0
    lines = text.splitlines()
    for rate in ("10.0 Mbit/s", "50.0 Mbit/s", "64.0 Mbit/s ←", "200 Mbit/s", "1.00 Gbit/s"):
        assert any(line.startswith(f"  {rate}") for line in lines), rate
    for word in ("utilisation", "a round", "waited", "mean", "sending", "H for 95.0 %"):
        assert any(word in line for line in lines), word


@pytest.mark.parametrize(
    "method",
    ["local-sgd", "diloco", "streaming-diloco", "fedavg", "fedprox", "fedopt",
     "branch-train-merge", "sparse-loco", "noloco"],
)  # fmt: skip
@pytest.mark.parametrize("mbit", ["0.1", "200", "1e6"])
def test_every_method_is_one_screen(method: str, mbit: str) -> None:
    code, text = simulate(f"islands.method={method}", f"mbit_per_s={mbit}", "islands.count=4")
    assert code == 0, text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert 20 <= len(lines) <= 45
    assert "nan" not in text


def test_more_cases_are_one_screen() -> None:
    for words in (
        ["islands.count=1"],
        ["islands.regions=2", "islands.far_period=4", "near_mbit_per_s=10k"],
        ["islands.method=streaming-diloco", "islands.fragments=10", "islands.overlap=4"],
        ["slowest=0.1"],
        ["model=llama-3-8b", "processes=64"],
        ["islands.at=10.0.0.1:29400", "islands.index=1", "islands.connections=4"],
    ):
        code, text = simulate(*words)
        assert code == 0, text
        assert max(map(len, text.splitlines())) <= 100
        assert len(text.splitlines()) <= 45


def test_a_model_has_its_parameters() -> None:
    assert "8.0B parameters" in simulate("model=llama-3-8b")[1]
    assert "124.4M parameters" in simulate("model=gpt-2")[1]
    assert " parameters: diloco" in simulate("model=llama")[1]


def test_it_says_what_would_be_enough() -> None:
    found = results("parameters=20m", "step_s=0.5", "mbit_per_s=50", "processes=1")
    last = found["results"]["ways"][-1]
    assert last["utilisation"] >= 0.95
    again = results(
        "parameters=20m", "step_s=0.5", "mbit_per_s=50", "processes=1", *last["typed"].split()
    )
    assert again["results"]["utilisation"] == last["utilisation"]
    assert "nothing to do" in again["meaning"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("islands.perido=3", "islands.perido: no such key; try: islands.period"),
        ("period=3", "period is not an option, there are parameters, model"),
        ("period=3", "try: islands.period"),
        ("islands=3", "islands is not an option"),
        ("latency=3", "latency is not an option"),
        ("islands.method=dilco", "islands.method = dilco: not one of local-sgd"),
        ("islands.method=none", "try: islands.method=diloco"),
        ("islands.codec=int9", "try: int8"),
        ("islands.count=1.5", "a whole number is wanted"),
        ("islands.overlap=99", "try: islands.overlap=49"),
        ("islands.fragments=2", "try: islands.method=streaming-diloco"),
        ("model=gpt-9", "model = gpt-9: no published shape of that name; try: gpt-2"),
        ("model=gpt-2 parameters=3b", "one of them says how many; try: model=gpt-2"),
        ("slowest=2", "slowest = 2: a share of the other islands' speed; try: slowest=1"),
        ("target=1", "try: target=0.95"),
        ("train.steps=3", "train.steps is not an option"),
    ],
)
def test_mistakes_are_one_line(typed: str, said: str) -> None:
    code, text = simulate(*typed.split())
    assert code == 2
    assert said in text
    assert "\n" not in text
