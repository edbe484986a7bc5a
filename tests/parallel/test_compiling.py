"""Compiled blocks compute what plain ones do, dropout included, and refusals say what to do."""

from __future__ import annotations

import copy
import importlib.util
import random
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from proof_rows import rows
from shoal.base.errors import PlanError
from shoal.parallel import compiling
from shoal.parallel.compiling import compiled_parity


class Block(nn.Module):
    """A residual block with something random in it."""

    def __init__(self, width: int, norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.nn.functional.silu(self.inner(self.norm(x))))


class Model(nn.Module):
    """Two equal blocks between two plain layers."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList([Block(8, norm), Block(8, norm)])
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs - targets).square().sum(), outputs.numel()


def steps(
    compile: str, recompute: str = "none", norm: bool = True
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights of three steps."""
    run = shoal.parallelize(
        partial(Model, norm),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        squares,
        layout="single",
        batch=4,
        micro_batch=2,
        precision="fp64",
        compile=compile,
        recompute=recompute,
    )
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(3):
        x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        y = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        losses.append(run.step((x, y)).loss)
    weights = [p.detach().clone() for p in run.program.module.parameters()]
    twin = copy.deepcopy(run.program.module)
    assert twin.layers[0].inner is not run.program.module.layers[0].inner
    with torch.no_grad():
        twin.layers[0].inner.weight.fill_(0.0)
        twin.eval()(x)
    run.close()
    assert "forward" not in run.program.module.layers[0].__dict__
    return losses, weights


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[torch.Tensor]]:
    return steps("none")


@pytest.mark.parametrize(
    ("recompute", "norm"), rows([("none", "full"), (False, True)], kept=[("none", False)])
)
def test_compiled_blocks_compute_the_same(recompute: str, norm: bool) -> None:
    """Every function that the compiler makes of a block takes two seconds: with a norm seven.

    Rows with a norm compile for this processor's vectors, whose search takes seven seconds more.
    """
    from torch._inductor import config as inductor_config

    expected = steps("none", norm=norm)
    # For so few, headers compiled before them cost more than they save.
    cheap = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": None if norm else False}
    with inductor_config.patch(cheap):
        losses, weights = steps("blocks", recompute, norm)
    assert losses == pytest.approx(expected[0], rel=1e-12)
    assert losses[0] != losses[1]
    for one, other in zip(weights, expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda function: lambda x: function(x) * (1 + 1e-6), "outputs"),
        (lambda function: lambda x: function(x.detach() + 0 * x), "gradients"),
        (lambda function: lambda x: function(x) + (x - x.detach()), "gradients"),
    ],
    ids=["outputs", "a gradient is lost", "a gradient too many"],
)
def test_wrong_code_is_found_in_the_first_step(monkeypatch, wrong, what: str) -> None:
    """torch 2.11 loses gradients of norms where an autograd.Function writes in place."""
    monkeypatch.setattr(compiling, "_compile", wrong)
    with pytest.raises(PlanError) as failure:
        steps("blocks")
    line = str(failure.value)
    assert line.startswith(f"compile = blocks: layers.0: the {what} of its compiled code")
    assert line.endswith(f'torch {torch.__version__} makes wrong code of it; try: compile="none"')


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_check_of_the_code_leaves_no_trace(monkeypatch, plain, recompute: str) -> None:
    """Random numbers, buffers, gradients and recompute are as without it; right code passes."""
    monkeypatch.setattr(compiling, "_compile", lambda function: function)
    losses, weights = steps("blocks", recompute)
    assert losses == plain[0]
    assert all(torch.equal(one, other) for one, other in zip(weights, plain[1], strict=True))


def test_what_a_block_changes_is_changed_once(monkeypatch) -> None:
    """Its input in place, its buffers, random numbers, and an object that it is given."""

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, x: torch.Tensor, seen: list[int] | Counter | None) -> torch.Tensor:
            self.passes += 1
            if isinstance(seen, Counter):
                seen["passes"] += 1
            x += 1
            drawn.append(float(np.random.rand()) + random.random())
            return self.inner(x)

    monkeypatch.setattr(compiling, "_compile", lambda function: function)
    for seen in (None, Counter()):
        block, x, drawn = Changes(), torch.randn(2, 4), []
        compiling._CompiledForward("block", block, set())
        mine = x.clone()
        np.random.seed(7)
        random.seed(7)
        expected = np.random.rand() + random.random()
        np.random.seed(7)
        random.seed(7)
        block(mine, seen)
        assert torch.equal(mine, x + 1)
        assert block.passes == 1
        assert drawn[-1] == expected, "what the check draws is put back"
        assert seen is None or seen["passes"] == 1


def test_selective_recompute_is_refused() -> None:
    with pytest.raises(PlanError, match=r"selective looks at single .* recompute=\"full\""):
        steps("blocks", "selective")


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PlanError, match=r"needs a C\+\+ compiler .* train\.compile=none"):
        compiling.check_compiler(torch.device("cpu"))


def test_a_gpu_without_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        PlanError, match=r"on a GPU torch\.compile needs Triton.* pip install triton"
    ):
        compiling.check_compiler(torch.device("cuda"))


def test_what_a_killed_compiler_left_is_removed_before_anything_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else every start that follows, restarts included, loads half a library and ends."""
    half = tmp_path / "ab" / "cab.main.so"
    half.parent.mkdir()
    half.write_bytes(b"\x7fELF\x02\x01\x01")
    (tmp_path / "locks").mkdir()
    monkeypatch.setattr(compiling, "get_compile_cache", lambda: tmp_path)
    monkeypatch.setattr(compiling, "_compile", lambda function: function)
    steps("blocks")
    assert not half.exists()
    assert f"removed what a killed compiler left half written in {tmp_path}: 1 of" in caplog.text


def test_a_model_without_blocks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    run = shoal.parallelize(
        lambda: nn.Linear(6, 3),
        lambda p: torch.optim.SGD(p, lr=0.1),
        squares,
        layout="single",
        compile="blocks",
    )
    assert "shoal: compile = blocks: nothing to compile" in caplog.text
    assert run.plan.compile == "blocks"
    run.close()


@pytest.mark.parametrize(("narrow", "stands"), [(torch.float32, True), (torch.float64, False)])
def test_a_cast_of_the_models_own_is_no_wrong_code(narrow: torch.dtype, stands: bool) -> None:
    """Compiled code may leave float32 out between two operations: 6e-9 apart in float64."""
    block, x = nn.Linear(8, 8).double(), torch.randn(2, 8, dtype=torch.float64)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return block(x.to(narrow).to(torch.float64))

    def fast(x: torch.Tensor) -> torch.Tensor:
        return block(x.float().double()) * (1 + 6e-9)

    accused = nullcontext() if stands else pytest.raises(PlanError, match="outputs of its compiled")
    with accused:
        compiled_parity.refuse_wrong_code("block", block, plain, fast, (x,), {})


def test_a_block_with_a_hook_inside_runs_as_it_is(monkeypatch, caplog) -> None:
    """Dynamo guards no hooks: a block of the same class would lend it code that has none."""
    asked = []
    monkeypatch.setattr(compiling, "_compile", lambda function: asked.append(function) or function)

    def hooked(module: nn.Module, inputs: object, outputs: torch.Tensor) -> torch.Tensor:
        return 2.0 * outputs

    model = nn.Sequential(
        nn.Linear(4, 4), *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in "ab")
    )
    model[2][0].register_forward_hook(hooked)
    run = shoal.parallelize(
        model, lambda p: torch.optim.SGD(p, lr=0.1), lambda o, t: (o - t) ** 2, compile="blocks"
    )
    run.step((torch.randn(2, 4), torch.randn(2, 4)))
    assert len(asked) == 1, "the other block's"
    assert "shoal: compile = blocks: 2 has a hook inside (0: " in caplog.text
    run.close()
