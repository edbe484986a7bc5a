"""Every mistake of the table is named in one line, or computed right; none ends well and is wrong."""

from __future__ import annotations

import pytest

from mistakes import RIGHT, TABLE
from worlds import Failed

DERIVED = ("tp", "pp")  # seconds each, so they are left to `make proof`
UNLIKE_OTHERS = ("unseeded_batches", "pp")  # but for this one, which no other test stands for


def left_to_proof(name: str, layout: str) -> bool:
    """Whether another row says the same: under fsdp what is expected under ddp too."""
    expected = TABLE[name].expected
    return (layout in DERIVED and (name, layout) != UNLIKE_OTHERS) or (
        layout == "fsdp" and expected.get("ddp") == expected["fsdp"]
    )


STAY = [
    pytest.param(n, layout, marks=[pytest.mark.proof] if left_to_proof(n, layout) else [])
    for n, m in TABLE.items()
    for layout in m.expected
    if not m.hangs
]
HANG = [(n, layout) for n, m in TABLE.items() for layout in m.expected if m.hangs]
FAST_HANG = ("forward_on_rank_0", "fsdp")


def test_the_table_has_forty() -> None:
    assert len(TABLE) >= 40


@pytest.mark.parametrize(("name", "layout"), STAY, ids=lambda v: str(v))
def test_named_or_right(worlds, name: str, layout: str) -> None:
    answers = worlds(2).call("mistakes:attempt", name=name, layout=layout)
    expected = TABLE[name].expected[layout]
    if expected == RIGHT:
        assert [a["error"] for a in answers] == ["", ""]
        assert all(a["value"] <= 1e-6 for a in answers), answers
        return
    assert any(expected in line for line in [answers[0]["error"], *answers[0]["lines"]]), answers
    assert bool(answers[0]["error"]) == bool(answers[1]["error"]), "all ranks or none"
    assert "\n" not in answers[0]["error"]


def hang(worlds, name: str, layout: str) -> None:
    """The processes end by themselves, within seconds, and one of them says why."""
    world = worlds(2)
    earlier = [len(path.read_text()) for path in world.log_paths]
    with pytest.raises(Failed, match="ended"):
        world.call("mistakes:attempt", deadline_s=40, name=name, layout=layout)
    world.kill()  # one that lost its peer may wait for the next check
    codes = [process.wait(20) for process in world.processes]
    texts = [p.read_text()[n:] for p, n in zip(world.log_paths, earlier, strict=True)]
    told = [line for text in texts for line in text.splitlines()]
    named = [line for line in told if line.startswith("shoal: ")]
    assert len(named) == 1, told
    assert TABLE[name].expected[layout] in named[0]
    assert 2 in codes


def test_a_forward_pass_on_rank_0_is_named_under_fsdp(worlds) -> None:
    hang(worlds, *FAST_HANG)


@pytest.mark.proof
@pytest.mark.parametrize(("name", "layout"), [h for h in HANG if h != FAST_HANG])
def test_hangs_are_named(worlds, name: str, layout: str) -> None:
    hang(worlds, name, layout)
