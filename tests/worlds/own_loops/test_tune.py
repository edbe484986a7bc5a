"""Adapters of peft train as in one process, are cut as the layers they stand on, and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.proof
pytest.importorskip("peft")

LAYOUTS: dict[str, tuple[int, Any]] = {
    "ddp": (2, "ddp"),
    "zero2": (2, "zero2"),
    "fsdp": (2, "fsdp"),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
}
FAMILIES = ("llama", "gpt2", "gpt-neox")


@pytest.fixture(scope="module")
def one(worlds) -> Any:
    """What one process computes, asked once per model."""
    known: dict[tuple[str, str], Any] = {}

    def ask(name: str, adapter: str) -> Any:
        if (name, adapter) not in known:
            (known[name, adapter],) = worlds(1).call(
                "tune_case:trained", name=name, adapter=adapter, layout="single"
            )
        return known[name, adapter]

    return ask


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_equal_one_process(worlds, one, name: str, adapter: str, layout: str) -> None:
    equal(worlds, one, name, adapter, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_tower_equals_one_process(worlds, one, layout: str) -> None:
    equal(worlds, one, "llava", "", layout)


def equal(worlds, one: Any, name: str, adapter: str, layout: str) -> None:
    """A layout's losses and trained weights are those of one process, its states no more."""
    alone = one(name, adapter)
    ranks, words = LAYOUTS[layout]
    found = worlds(ranks).call("tune_case:trained", name=name, adapter=adapter, layout=words)
    for told in found:
        assert told["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert told["weights"].keys() == alone["weights"].keys()
        for weight, values in told["weights"].items():
            assert values == pytest.approx(alone["weights"][weight], rel=1e-10, abs=1e-12)
        assert told["states"] <= 2 * told["trained"], "AdamW has two numbers for what trains alone"
    assert sum(told["states"] for told in found) >= 2 * alone["trained"]


@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_with_adapters_are_cut_as_without(worlds, name: str, adapter: str) -> None:
    plain = worlds(2).call("tune_case:trained", name=name, adapter="", layout={"tp": 2})[0]
    tuned = worlds(2).call("tune_case:trained", name=name, adapter=adapter, layout={"tp": 2})[0]
    bases = {
        weight.removeprefix("base_model.model.").replace(".base_layer.", ".")
        for weight in tuned["split"]
        if ".lora_" not in weight
    }
    assert bases == set(plain["split"])
    if adapter == "dora":
        return  # whose A stays whole where B is cut: norms of the rows need all of its product
    # B of a layer that ranks sum over gives whole rows, of few numbers each
    whole = {weight for weight in tuned["whole"] if ".lora_" in weight}
    assert whole <= {w for w in whole if ".lora_B." in w}
    assert any(".lora_A." in weight for weight in tuned["split"])
    assert any(".lora_B." in weight for weight in tuned["split"])


@pytest.mark.parametrize(
    ("name", "adapter", "layout"),
    [("llama", "lora", "fsdp"), ("gpt2", "dora", "tp2"), ("llama tied", "dora", "pp2")],
)
def test_adapters_open_with_peft_and_merged(
    worlds, tmp_path: Path, name: str, adapter: str, layout: str
) -> None:
    ranks, words = LAYOUTS[layout]
    told = worlds(ranks).call(
        "tune_case:exported", name=name, adapter=adapter, layout=words, folder=str(tmp_path)
    )[0]
    assert told["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert told["adapter"] == 0.0
    assert told["merged"] <= 1e-12
    assert told["loading"] == {}
    assert told["untrained"] > 1e-3, "else nothing is seen of an adapter"
