"""Blocks of our models are one graph each for torch.compile: a graph break costs fusion and launches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from shoal.models.catalog import build

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"dim": 32, "layers": 1, "heads": 2}, {"vocabulary": 61, "sequence": 12}),
    "gpt": ({"dim": 32, "layers": 1, "heads": 2}, {"vocabulary": 61, "sequence": 12}),
    "vit": ({"dim": 32, "layers": 1, "heads": 2, "patch": 4}, {}),
}
"""moe is not among them: its experts are called between graphs."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_block_is_one_graph(name: str, precision: str) -> None:
    arguments, data = MODELS[name]
    block = build(name, arguments, **data).blocks[0]
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    narrow = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
    torch._dynamo.reset()
    with narrow:
        torch.compile(block.forward, backend=count)(torch.randn(2, 12, 32, requires_grad=True))
    assert len(graphs) == 1
