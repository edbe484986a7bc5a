"""Models as people bring them train as in one process, whatever they keep or cannot be cut into."""

from __future__ import annotations

from typing import Any

import pytest


def long(*row: Any) -> Any:
    """A row that `make proof` runs: others hold most of it."""
    return pytest.param(*row, marks=pytest.mark.proof)


WHOLE = {
    "written": ["it is handed a Kept, and a graph does not follow the tensors in it"],
    "read": ["it is handed a Told, and a graph does not follow the tensors in it"],
    "noted": ["its mixer.noted is set from outside in every pass, which a graph does not follow"],
    "another's": ["it computes with a parameter that is not its own"],
    "left": ["it leaves a tensor in its mixer.last, which a graph does not follow"],
}
"""What keeps a layer from being split as one, of those in `brought_case.Handing`."""
HOW = [*WHOLE, "counted", "number"]
SHORT = ["written", "another's", "left", "number"]
"""`read` is handed as `written` is, `noted` is set as `left` is, and `counted` is a row of cp."""


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, {"tp": 2}), long(2, {"pp": 2}), (2, "fsdp"), long(4, {"tp": 2, "pp": 2})],
    ids=str,
)
def test_a_cache_that_was_left_on(worlds, ranks: int, layout: Any) -> None:
    """Under tp its layers were run again with what they had kept, and died in a traceback."""
    (alone,) = worlds(1).call("brought_case:of_transformers", layout="single")
    for found in worlds(ranks).call("brought_case:of_transformers", layout=layout):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert found["cache"], "it is the user's, for generating"


@pytest.mark.parametrize(
    ("unit", "ranks"), [("plain", 2), ("computed", 2), long("plain", 4), long("computed", 4)]
)
def test_a_layer_that_divides_by_norms_of_its_weights(worlds, ranks: int, unit: str) -> None:
    """As DoRA does: it was whole, because of its unit matrix and of norms over what ranks cut.

    A unit matrix that is not known as one is as wide as what ranks would cut: its parts do not run.
    """
    (alone,) = worlds(1).call("brought_case:adapted", layout="single", unit=unit)
    for found in worlds(ranks).call("brought_case:adapted", layout={"tp": ranks}, unit=unit):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        whole = [line for line in found["told"] if "0.down.weight" in line or "0 (and" in line]
        assert bool(whole) == (unit == "computed")


@pytest.mark.parametrize("layout", ["fsdp", {"tp": 2}, long({"pp": 2})], ids=str)
def test_a_part_of_a_block_that_others_call(worlds, layout: Any) -> None:
    """It died in a traceback: its weights were those of a split, or of a gathered, block."""
    (alone,) = worlds(1).call("brought_case:conditioned", layout="single")
    for found in worlds(2).call("brought_case:conditioned", layout=layout):
        assert found == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        *(({"tp": 2}, how) if how in SHORT else long({"tp": 2}, how) for how in HOW),
        *(({"cp": 2}, how) if how == "counted" else long({"cp": 2}, how) for how in HOW),
    ],
    ids=str,
)
def test_what_layers_know_beside_their_inputs(worlds, layout: Any, how: str) -> None:
    """A graph went on with what it saw first, in silence; a cache died in a traceback."""
    (alone,) = worlds(1).call("brought_case:handing", layout="single", how=how)
    for found in worlds(2).call("brought_case:handing", layout=layout, how=how):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        if "tp" in layout:
            # What changes between passes alone needs another graph, and is no reason.
            reasons = [line.partition("only: ")[2] for line in found["told"] if "only: " in line]
            assert reasons == WHOLE.get(how, [])
            counted = [line for line in found["told"] if "only: " not in line]
            assert all("each forward pass changes" in line for line in counted), counted
