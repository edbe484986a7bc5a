"""What is a block: the user's own word, and what it refuses in one line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal import parallelize
from shoal.base.errors import PlanError
from shoal.base.layouts.policies import BlocksPolicy
from shoal.trace.find.blocks import detect_blocks, fsdp_blocks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.up(x).relu()))


class Net(nn.Module):
    """One layer, called three times, between a list of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Layer() for _ in range(2))
        self.again = Layer()

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.body, self.again, self.again, self.again):
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("wished", "names"),
    [
        ((), ["body.0", "body.1"]),
        (("Layer",), ["body.0", "body.1", "again"]),
        (("again",), ["again"]),
        (("body.*.up", "a*n"), ["body.0.up", "body.1.up", "again"]),
    ],
)
def test_blocks_are_named_by_name_or_class(wished: tuple[str, ...], names: list[str]) -> None:
    assert list(detect_blocks(Net(), BlocksPolicy(blocks=wished))) == names


@pytest.mark.parametrize(
    ("wished", "line"),
    [
        (("Layr",), "layout.blocks = Layr: matches no module of Net, by name or class; try: "
         "Layer"),
        (("again", "Linear"), "layout.blocks = again, Linear: again.down lies inside of again, "
         "which is a block too; try: layout.blocks=again"),
        (("body",), "layout.blocks = body: body is a ModuleList, which is never called; try: "
         "layout.blocks=body.*"),
    ],
)  # fmt: skip
def test_what_is_no_block_is_one_line(wished: tuple[str, ...], line: str) -> None:
    with pytest.raises(PlanError) as refused:
        detect_blocks(Net(), BlocksPolicy(blocks=wished))
    assert str(refused.value) == line
    with pytest.raises(PlanError, match="^blocks = "):
        parallelize(Net(), torch.optim.SGD, blocks=wished)


def test_fsdp_gathers_them_one_at_a_time() -> None:
    assert list(fsdp_blocks(Net(), BlocksPolicy(blocks=("again",)))) == ["again"]
    assert not fsdp_blocks(Net(), BlocksPolicy(blocks=("Linear",))), (
        "bare layers stay with the root"
    )


def test_they_are_what_is_recomputed_and_has_dropout_keys() -> None:
    run = parallelize(
        Net(),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda outputs, targets: (outputs - targets) ** 2,
        layout={"strategy": "single", "blocks": "again"},
        recompute="full",
        batch=2,
    )
    assert run.program.blocks == run.plan.blocks == ("again",)
    hooked = [name for name, part in run.model.named_modules() if part._forward_pre_hooks]
    assert hooked == ["", "again"]
    x = torch.ones(2, 8)
    run.step((x, x))
    run.close()
