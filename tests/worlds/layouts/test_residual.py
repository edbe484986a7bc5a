"""precision.residual = bf16: every layout computes what one process computes in the same formats."""

from __future__ import annotations

import functools
import math
import random
from pathlib import Path
from typing import Any

import pytest

BF16 = {"precision": "bf16", "residual": "bf16"}


@pytest.fixture(scope="module")
def alone(worlds):
    """What one process computes: asked once."""

    @functools.cache
    def ask(case: str, residual: str) -> dict[str, Any]:
        given = {"layout": "single", "precision": "bf16", "residual": residual, "case": case}
        return worlds(1).call("precision_case:train", **given)[0]

    return ask


def long(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.proof)


@pytest.mark.parametrize(
    ("size", "layout", "case", "policies"),
    [
        long(2, "ddp", "llama", {}),
        (2, "fsdp", "llama", {"recompute": "full"}),
        (2, "fsdp", "cnn", {}),
        long(2, "zero1", "llama", {}),
        long(2, "zero2", "gpt", {}),
        long(2, "fsdp", "gpt", {"recompute": "selective"}),
        long(2, "zero1", "cnn", {"recompute": "full"}),
        long(4, "hsdp", "llama", {}),
        long(1, "dp", "llama", {}),
        long(1, "single", "gpt", {"recompute": "full"}),
        long(2, "fsdp", "gpt", {"reshard": "no"}),
        long(2, "ddp", "llama", {"compress": "int8"}),
        long(1, "single", "gpt", {"offload": "parameters", "offload_to": "files"}),
        long(2, "zero1", "llama", {"offload": "optimizer", "offload_to": "files"}),
    ],
)
def test_layouts_agree_with_one_process(
    worlds, alone, size: int, layout: str, case: str, policies: dict[str, str]
) -> None:
    expected = alone(case, "bf16")
    told = worlds(size).call("precision_case:train", layout=layout, case=case, **BF16, **policies)
    for answer in told:
        assert answer["agree"], "ranks ended with different weights"
        assert answer["stepped"] == ["torch.float32"]
        assert not {"torch.bfloat16"} & {*answer["kept"]}
        # Passes of step 1 are equal but for weights of batch norms, which fsdp gathers
        # narrow; later ones to roundings of bf16, which reach the mean loss averaged.
        first = 1e-6 if case != "cnn" else 1e-3
        assert math.isclose(answer["losses"][0], expected["losses"][0], rel_tol=first)
        for ours, theirs in zip(answer["losses"], expected["losses"], strict=True):
            assert math.isclose(ours, theirs, rel_tol=2e-3)
        assert math.isclose(answer["evaluated"], expected["evaluated"], rel_tol=2e-3)


def test_the_stream_is_narrower_and_training_is_not_another(alone) -> None:
    narrow, wide = alone("llama", "bf16"), alone("llama", "fp32")
    assert narrow["losses"] != wide["losses"], "the stream was fp32"
    for ours, theirs in zip(narrow["losses"], wide["losses"], strict=True):
        assert math.isclose(ours, theirs, rel_tol=5e-3)


def assert_near(got: list[list[float]], right: list[list[float]]) -> None:
    """(loss, gradient norm) by step: losses to a rounding of bf16; norms of few gradients scatter."""
    for (loss, norm), (own_loss, own_norm) in zip(got, right, strict=True):
        assert loss == pytest.approx(own_loss, rel=2.0**-8, abs=1e-4)
        assert norm == pytest.approx(own_norm, rel=2.0**-5, abs=1e-4)


ROWS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tp, full": (2, "llama", {"layout": {"tp": 2}, "recompute": "full"}),
    "pp": (2, "moe", {"layout": {"pp": 2}}),
    "cp": (2, "gpt", {"layout": {"cp": 2, "context": "ring"}}),
    "ep": (2, "moe", {"layout": {"ep": 2, "dp_replicate": 2}}),
    "own module, tp": (2, "own", {"layout": {"tp": 2}, "dropout": 0.1}),
    "cp by gathering, full": (
        2, "moe", {"layout": {"cp": 2, "context": "gather"}, "recompute": "full"},
    ),
    "cp by heads": (2, "llama", {"layout": {"cp": 2, "context": "ulysses"}}),
    "tp without sequence parallel": (
        2, "moe", {"layout": {"tp": 2, "sequence_parallel": "off"}},
    ),
    "zero bubble": (2, "gpt", {"layout": {"pp": 2, "schedule": "zero-bubble"}}),
    "pp, full": (2, "own", {"layout": {"pp": 2}, "recompute": "full"}),
    "compiled tp": (2, "gpt", {"layout": {"tp": 2}, "compile": "blocks"}),
    "compiled, full": (
        2, "llama", {"layout": {"dp_replicate": 2}, "compile": "blocks", "recompute": "full"},
    ),
    "compiled fsdp": (
        2, "gpt", {"layout": {"dp_shard": 2, "zero": 3}, "compile": "blocks", "dropout": 0.1},
    ),
    "tp pp": (4, "llama", {"layout": {"tp": 2, "pp": 2}}),
    "tp fsdp": (4, "gpt", {"layout": {"tp": 2, "dp_shard": 2, "zero": 3}}),
    "ep fsdp": (4, "moe", {"layout": {"ep": 2, "dp_shard": 4, "zero": 3}, "micro_batch": 1}),
}  # fmt: skip
KEPT = ("tp, full", "pp", "ep fsdp")


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=[] if r in KEPT else [pytest.mark.proof]) for r in ROWS]
)
def test_split_layouts_agree_with_one_process(worlds: Any, tmp_path: Path, row: str) -> None:
    size, model, words = ROWS[row]
    words = {"clip": 1.0, **BF16, **words}
    told = worlds(size).call("mix_case:fate", folder=str(tmp_path), model=model, words=words)
    for rank in told:
        assert "refused" not in rank, rank
        assert rank["warm"] == rank["cold"][1:]
        assert_near(rank["cold"], told[0]["alone"])


FOUR: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 4},
    "zero1": {"dp_shard": 4, "zero": 1},
    "zero2": {"dp_shard": 4, "zero": 2},
    "fsdp": {"dp_shard": 4, "zero": 3},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    "tp": {"tp": 4},
    "tp fsdp": {"tp": 2, "dp_shard": 2, "zero": 3},
    "tp pp": {"tp": 2, "pp": 2},
    "cp ring": {"cp": 4, "context": "ring"},
    "cp gather fsdp": {"cp": 2, "context": "gather", "dp_shard": 2, "zero": 3},
    "cp ulysses": {"cp": 2, "context": "ulysses", "dp_replicate": 2},
    "pp 1f1b": {"pp": 4, "schedule": "1f1b"},
    "pp interleaved": {"pp": 2, "schedule": "interleaved", "dp_replicate": 2},
    "pp zero bubble": {"pp": 2, "schedule": "zero-bubble", "dp_shard": 2, "zero": 1},
    "ep": {"ep": 2, "dp_replicate": 4},
    "ep fsdp": {"ep": 2, "dp_shard": 4, "zero": 3},
}
MODELS = ("llama", "llama untied", "llama frozen", "llama lora", "gpt", "moe", "own")
COMPOSED = [
    (layout, model, recompute)
    for layout in FOUR
    for model in MODELS
    for recompute in ("none", "selective", "full")
    if not layout.startswith("ep") or model == "moe"
    # `own` has two blocks of its own, too few to be cut into four stages.
    if model != "own" or not layout.startswith("pp")
    # A backward pass in two halves refuses recompute.
    if layout != "pp zero bubble" or recompute == "none"
]
TENTH = random.Random(20261129).sample(COMPOSED, len(COMPOSED) // 10)


@pytest.mark.proof
@pytest.mark.parametrize(
    "row",
    [pytest.param(r, id=" · ".join((*r, *["tenth"][: r in TENTH]))) for r in COMPOSED],
)
def test_four_ranks_agree_with_one_process(
    worlds: Any, tmp_path: Path, row: tuple[str, str, str]
) -> None:
    """Every layout of four ranks × models × recompute; `-k tenth` for a drawn tenth of them."""
    layout, model, recompute = row
    if "lora" in model:
        pytest.importorskip("peft")
    words = {"clip": 1.0, "layers": 4, "micro_batch": 1, **BF16, "recompute": recompute}
    words["layout"] = FOUR[layout]
    told = worlds(4).call("mix_case:fate", folder=str(tmp_path), model=model, words=words)
    for rank in told:
        assert "refused" not in rank, rank
        assert rank["warm"] == rank["cold"][1:]
        assert_near(rank["cold"], told[0]["alone"])


def test_a_pipeline_sends_half(worlds) -> None:
    sent = {
        residual: worlds(2).call("residual_case:sent", residual=residual)[0]
        for residual in ("fp32", "bf16")
    }
    for told in sent.values():
        assert told["foreseen"] == told["counted"]
    assert sent["fp32"]["counted"] == 2 * sent["bf16"]["counted"]


def test_a_block_that_makes_fp32_is_refused(worlds) -> None:
    assert worlds(1).call("residual_case:refused")[0] == (
        "residual = bf16: blocks.0 mixes bf16 with an fp32 tensor that it makes or keeps "
        "(mat1 and mat2 must have the same dtype, but got Float and BFloat16); try: "
        'tensor.to(input.dtype) there, or residual="fp32"'
    )


def test_a_model_without_blocks_is_named(worlds) -> None:
    assert worlds(1).call("residual_case:without_blocks")[0] == [
        "precision.residual = bf16: there is no residual stream: the model has no ModuleList or "
        "Sequential whose entries are blocks of several layers; try: layout.blocks=NAME"
    ]


@pytest.mark.parametrize("layout", [long("single"), "fsdp"])
def test_frozen_weights_are_read_narrow_and_kept(worlds, layout: str) -> None:
    for told in worlds(2 if layout == "fsdp" else 1).call("residual_case:frozen", layout=layout):
        assert told["kept"] == "torch.float32"
        assert told["same"], "a frozen weight was rounded"
        assert told["stream"] == ["torch.bfloat16"] * 2
