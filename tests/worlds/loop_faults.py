"""Faults of users' own loops, one function each, as in `mistakes.py`: each is named, or right.

    @fault("the line", layouts=(…))     it ends the run before the update, or is told and it goes on
    @fault(SILENT, layouts=(…))         a right script: no line beside what its layout tells anyway,
                                        and the numbers of plain PyTorch, from which it gives its
                                        largest difference

`proof=` names layouts that `make proof PART=faults` tries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import shoal
from guards import Lines
from mistakes import X, Y, begin, net, off_by, sgd, share, squares, whole
from shoal.base.errors import ShoalError
from shoal.fabric import World

SILENT = "silent"
ALL = ("ddp", "zero1", "zero2", "fsdp", "tp", "pp")
USUAL = ("layout.pp", "layout.tp", "layout.strategy", "pp: ", "tp: ")
"""How lines begin that a layout tells of itself."""


@dataclass(frozen=True)
class Fault:
    """One of them: what is done, and which line is expected, or SILENT."""

    act: Callable[[World, str], Any]
    expected: str


TABLE: dict[str, Fault] = {}
ROWS: list[tuple[str, str, bool]] = []
"""(fault, layout, whether only `make proof` tries it)."""


def fault(expected: str, *, layouts: tuple[str, ...] = (), proof: tuple[str, ...] = ()):
    """Put a function into the table."""

    def mark(act: Callable[[World, str], Any]) -> Callable[[World, str], Any]:
        TABLE[act.__name__] = Fault(act, expected)
        ROWS.extend((act.__name__, layout, layout not in layouts) for layout in (*layouts, *proof))
        return act

    return mark


def attempt(world: World, name: str, layout: str) -> dict[str, Any]:
    """What came of it: the error's text, the lines that were told, the value."""
    error, value = "", None
    with Lines() as told:
        try:
            value = TABLE[name].act(world, layout)
        except ShoalError as failure:
            error = f"{type(failure).__name__}: {failure}"
    lines = [one for one in told.lines if not one.removeprefix("shoal: ").startswith(USUAL)]
    return {"error": error, "lines": lines, "value": value}


def part(world: World, layout: str, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank brings: its own samples, or all of them where ranks share each."""
    return whole(world, step) if layout in ("tp", "pp") else share(world, step)


# ---- gradients dropped before the update


DROPPED = "gradients were set to None or zero between run.forward_backward and run.update"


@fault(f"ConfigError: step 2: {DROPPED}", layouts=(*ALL, "single"))
def zero_grad_before_the_update(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.step(part(world, layout))
    run.forward_backward(part(world, layout, 1))
    run.optimizer.zero_grad()
    run.update()


@fault(f"ConfigError: step 1: {DROPPED}", layouts=("zero1",), proof=("ddp", "fsdp", "single"))
def zeros_in_place_before_the_update(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.forward_backward(part(world, layout))
    run.optimizer.zero_grad(set_to_none=False)
    run.update()


@fault(f"ConfigError: step 17: {DROPPED}", proof=("ddp", "zero2", "fsdp"))
def gradients_dropped_late(world: World, layout: str) -> None:
    """Where the counters of some tensors are read only."""
    run = begin(world, layout)
    for step in range(17):
        run.forward_backward(part(world, layout, step))
        for group in run.optimizer.param_groups if step == 16 else ():
            for parameter in group["params"]:
                parameter.grad = None
        run.update()


@fault(
    f"ConfigError: step 1: {DROPPED}", layouts=("zero2",), proof=("ddp", "single", "zero1", "fsdp")
)
def models_zero_grad_before_the_update(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.forward_backward(part(world, layout))
    run.model.zero_grad()
    run.update()


def between(world: World, layout: str, change: Callable[[shoal.Run], Any], step: int = 0) -> None:
    """Change gradients between the halves of a step, by itself after so many steps."""
    run = begin(world, layout)
    for number in range(step + 1):
        run.forward_backward(part(world, layout, number))
        if number == step:
            change(run)
        run.update()


HALVES = "between run.forward_backward and run.update, where under"


@fault(f"ConfigError: step 1: {DROPPED}", layouts=("fsdp",), proof=("ddp", "zero1", "zero2", "tp"))
def each_gradient_set_to_zero(world: World, layout: str) -> None:
    between(world, layout, lambda run: of_each(run, lambda gradient: gradient.zero_())())


@fault(
    f"ConfigError: step 17: gradients were changed {HALVES}", layouts=("zero1",), proof=("zero2",)
)
def scaled_between_the_halves(world: World, layout: str) -> None:
    between(world, layout, lambda run: of_each(run, lambda gradient: gradient.mul_(0.5))(), 16)


@fault(f"ConfigError: step 1: gradients were changed {HALVES}", proof=("zero1", "zero2"))
def scaled_between_the_halves_through_data(world: World, layout: str) -> None:
    between(world, layout, lambda run: of_each(run, lambda gradient: gradient.data.mul_(0.5))())


@fault(f"ConfigError: step 1: gradients were changed {HALVES}", proof=("zero1", "zero2"))
def rows_set_to_zero_between_the_halves(world: World, layout: str) -> None:
    def rest(run: shoal.Run) -> None:
        next(run.model.parameters()).grad[:2] = 0

    between(world, layout, rest)


@fault(f"ConfigError: step 1: gradients were set to None {HALVES}", layouts=("fsdp",),
       proof=("zero1", "zero2"))  # fmt: skip
def a_part_rests_where_parts_are_stepped(world: World, layout: str) -> None:
    def rest(run: shoal.Run) -> None:
        next(run.model.parameters()).grad = None

    between(world, layout, rest)


@fault(f"ConfigError: step 1: gradients were replaced {HALVES}", proof=("zero1", "zero2", "fsdp"))
def others_put_in_their_place(world: World, layout: str) -> None:
    def put(run: shoal.Run) -> None:
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clamp(-0.1, 0.1)

    between(world, layout, put)


@fault("ConfigError: gradients were changed beside the run", layouts=("fsdp",),
       proof=("ddp", "zero1", "zero2"))  # fmt: skip
def clipped_after_a_step(world: World, layout: str) -> None:
    run = begin(world, layout)
    run.step(part(world, layout))
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.001)
    run.step(part(world, layout, 1))


@fault(SILENT, layouts=("zero1",), proof=("zero2", "fsdp", "tp"))
def a_plain_loop_clips_once_the_run_is_closed(world: World, layout: str) -> float:
    run = begin(world, layout)
    run.step(part(world, layout))
    parameters = list(run.model.parameters())
    run.guards.writes.close()
    nn.utils.clip_grad_norm_(parameters, 0.001)
    return 0.0


@fault(SILENT, proof=("fsdp", "tp"))
def norms_are_logged_between_the_halves(world: World, layout: str) -> float:
    run = begin(world, layout)
    run.forward_backward(part(world, layout))
    of_each(run, lambda gradient: gradient.norm())()
    nn.utils.clip_grad_norm_(run.model.parameters(), float("inf"))
    run.update()
    run.model.zero_grad(set_to_none=False)
    run.step(part(world, layout, 1))
    return off_by(run, [whole(world), whole(world, 1)])


@fault(SILENT, layouts=("ddp",), proof=("single", "pp"))
def last_layer_rests(world: World, layout: str) -> float:
    """Its gradient is dropped in the first steps, as DINO does; all others are stepped."""
    run = begin(world, layout)
    before = run.state_dict()
    run.forward_backward(part(world, layout))
    for parameter in run.model[3].parameters():
        parameter.grad = None
    run.update()
    after = run.state_dict()
    stayed = all(torch.equal(before[name], after[name]) for name in ("3.weight", "3.bias"))
    return float(not stayed or torch.equal(before["0.weight"], after["0.weight"]))


# ---- written-out passes: what is done to gradients between run.backward and run.update


def passes(
    run: shoal.Run,
    batch: Any,
    *,
    top: Callable[[], Any] = lambda: None,
    inside: Callable[[], Any] = lambda: None,
    behind: Callable[[], Any] = lambda: None,
) -> None:
    """One step; `top` before each forward pass, `inside` after each backward, `behind` the loop."""
    for micro in run.micro_batches(batch):
        top()
        run.backward(squares(run.model(micro.inputs), micro.targets).sum(), micro.targets.numel())
        inside()
    behind()
    run.update()


def of_each(run: shoal.Run, change: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
    """A loop over gradients, as scripts have it."""

    def do() -> None:
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                change(parameter.grad)

    return do


WRITTEN = "inside of the loop over run.micro_batches, where each rank has sums over its own samples"
CHANGED = f"ConfigError: step 1: gradients were changed {WRITTEN}"
FOUR = ("ddp", "zero1", "zero2", "fsdp", "tp")


@fault(f"ConfigError: step 1: clip_grad_norm_ was called {WRITTEN}", layouts=(*FOUR, "single"))
def clipped_in_passes(world: World, layout: str) -> None:
    run = begin(world, layout)
    passes(
        run, part(world, layout),
        inside=lambda: nn.utils.clip_grad_norm_(run.model.parameters(), 1.0),
    )  # fmt: skip


@fault(
    f"ConfigError: step 1: clip_grad_value_ was called {WRITTEN}", layouts=("ddp",), proof=FOUR[1:]
)
def clamped_in_passes(world: World, layout: str) -> None:
    run = begin(world, layout)
    passes(
        run, part(world, layout),
        inside=lambda: nn.utils.clip_grad_value_(run.model.parameters(), 0.1),
    )  # fmt: skip


@fault(CHANGED, layouts=("ddp", "zero2"), proof=("zero1", "fsdp", "tp", "single"))
def scaled_in_passes(world: World, layout: str) -> None:
    run = begin(world, layout)
    passes(run, part(world, layout), inside=of_each(run, lambda g: g.mul_(0.5)))


@fault(CHANGED, proof=FOUR)
def noise_in_passes(world: World, layout: str) -> None:
    run = begin(world, layout, micro_batch=4)
    passes(run, part(world, layout), inside=of_each(run, lambda g: g.add_(torch.randn_like(g))))


@fault(CHANGED, layouts=("fsdp",), proof=("ddp", "zero1", "zero2", "tp"))
def own_clip_in_passes(world: World, layout: str) -> None:
    run = begin(world, layout)

    def clip() -> None:
        held = [p.grad for p in run.model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(g.norm()) ** 2 for g in held))
        for gradient in held:
            gradient.data.mul_(1.0 / (norm + 1.0))

    passes(run, part(world, layout), inside=clip)


@fault("step 1: gradients were set to None or zero between run.micro_batches and run.update",
       layouts=("ddp", "fsdp"), proof=("single", "tp", "zero1", "zero2"))  # fmt: skip
def zero_grad_in_passes(world: World, layout: str) -> None:
    run = begin(world, layout)
    passes(run, part(world, layout), behind=run.model.zero_grad)


@fault(SILENT, layouts=("ddp", "zero2"), proof=("single", "zero1", "fsdp", "tp"))
def zero_grad_at_the_top(world: World, layout: str) -> float:
    """Every loop has it, and with one micro-batch a step nothing is lost."""
    run = begin(world, layout)
    for step in range(2):
        passes(run, part(world, layout, step), top=run.optimizer.zero_grad)
    for step in range(2):
        passes(run, part(world, layout, step), top=run.model.zero_grad)
    return off_by(run, [whole(world, step) for step in (0, 1, 0, 1)])


@fault(SILENT, layouts=("ddp",), proof=("single", "fsdp", "tp"))
def norms_are_logged_in_passes(world: World, layout: str) -> float:
    run = begin(world, layout, micro_batch=4)
    logged: list[float] = []

    def log() -> None:
        nn.utils.clip_grad_norm_(run.model.parameters(), math.inf)
        nn.utils.clip_grad_norm_(run.model.parameters(), max_norm=1e9, norm_type=1.0)
        held = [p.grad for p in run.model.parameters() if p.grad is not None]
        logged.append(float(nn.utils.get_total_norm(held)))
        logged.extend(float(g.detach().abs().mean()) for g in held)

    for step in range(2):
        passes(run, part(world, layout, step), inside=log, behind=log)
    assert logged
    return off_by(run, [whole(world, step) for step in range(2)])


@fault(SILENT, layouts=("single",))
def clipped_by_one_process(world: World, layout: str) -> float:
    """Losses that are shares of the step's mean already: the gradient is what plain PyTorch has."""
    run = begin(world, layout)
    for micro in run.micro_batches(whole(world)):
        outputs = run.model(micro.inputs)
        run.backward(squares(outputs, micro.targets).sum() / micro.targets.numel())
    norm = float(nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))
    run.update()
    model = net()
    squares(model(X[:8]), Y[:8]).mean().backward()
    wanted = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    sgd(model.parameters()).step()
    got = run.state_dict()
    worst = max(float((got[n] - w).abs().max()) for n, w in model.state_dict().items())
    return worst + abs(norm - wanted)


# ---- step hooks of the optimizer


def hooked(world: World, layout: str, hook: Callable[[list[nn.Parameter]], Any]) -> shoal.Run:
    """A step of an optimizer whose hook is called with what it steps."""
    model = net()
    optimizer = sgd(model.parameters())

    def called(one: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        hook([p for group in one.param_groups for p in group["params"]])

    optimizer.register_step_pre_hook(called)
    run = begin(world, layout, model, optimizer)
    run.step(part(world, layout))
    return run


HOOK = "ConfigError: step 1: a step hook of the optimizer (register_step_pre_hook)"


def own_norm(held: list[nn.Parameter]) -> None:
    gradients = [p.grad for p in held if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(0.01 / norm)


@fault(
    f"{HOOK} reads norm and changes gradients, and under ",
    layouts=("fsdp",),
    proof=("zero1", "zero2", "tp"),
)
def hook_with_a_norm_of_its_own(world: World, layout: str) -> None:
    hooked(world, layout, own_norm)


@fault(SILENT, layouts=("zero1", "fsdp", "tp"), proof=("ddp", "zero2", "pp"))
def hook_that_clips_whole_gradients(world: World, layout: str) -> float:
    """Under tp and pp by the norm of all parts, of the stepped tensors under zero."""
    run = hooked(world, layout, lambda held: nn.utils.clip_grad_norm_(held, 0.01))
    model = net()
    squares(model(whole(world)[0]), whole(world)[1]).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    sgd(model.parameters()).step()
    got = run.state_dict()
    return max(float((got[n] - w).abs().max()) for n, w in model.state_dict().items())


@fault(SILENT, layouts=("fsdp",), proof=("zero1", "zero2"))
def hook_that_clamps_elements(world: World, layout: str) -> float:
    """A clamp looks at one element at a time, which is here or elsewhere; norms may be logged."""
    logged: list[float] = []

    def clamp(held: list[nn.Parameter]) -> None:
        logged.append(float(nn.utils.clip_grad_norm_(held, math.inf)))
        nn.utils.clip_grad_value_(held, 0.01)

    run = hooked(world, layout, clamp)
    model = net()
    squares(model(whole(world)[0]), whole(world)[1]).mean().backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    sgd(model.parameters()).step()
    got = run.state_dict()
    return max(float((got[n] - w).abs().max()) for n, w in model.state_dict().items())


# ---- checkpoints of the model's own under a pipeline


class Checkpointed(nn.Module):
    """Four blocks that are run again in the backward pass, by one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.first, self.last = way, nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.way == "segments":
            return self.last(checkpoint_sequential(self.blocks, 2, x, use_reentrant=True))
        for block in self.blocks:
            if self.way == "parts":
                x = x + checkpoint(block[2], torch.tanh(block[0](x)), use_reentrant=True)
            else:
                x = x + checkpoint(block, x, use_reentrant=True)
        return self.last(x)


def checkpointed(world: World, layout: Any, way: str) -> float:
    run = begin(world, layout, Checkpointed(way), batch=16, micro_batch=4, sample=(X[:4], Y[:4]))
    for step in range(2):
        run.step(whole(world, step))
    return off_by(run, [whole(world, step) for step in range(2)], lambda: Checkpointed(way))


@fault(SILENT, proof=("pp", "zero-bubble", "interleaved", "zbv"))
def reentrant_checkpoint(world: World, layout: str) -> float:
    return checkpointed(world, layout, "blocks")


@fault(SILENT, proof=("pp", "zero-bubble"))
def reentrant_checkpoint_of_segments(world: World, layout: str) -> float:
    return checkpointed(world, layout, "segments")


@fault(SILENT, proof=("pp", "zero-bubble"))
def reentrant_checkpoint_of_parts(world: World, layout: str) -> float:
    return checkpointed(world, layout, "parts")


# ---- weights that do not train


class Branch(nn.Module):
    """A branch that is added to the trunk: detached by mistake, or left unread."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.first, self.aside = way, nn.Linear(4, 8), nn.Linear(8, 8)
        self.block, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.first(x)
        if self.way == "detached":
            h = h + self.aside(h).detach()
        elif self.way == "unread":
            self.aside(h)
        elif self.way == "layerdrop" and self.calls % 2 == 0:
            h = h + self.aside(h)
        return self.head(self.block(h))


@fault("model: aside.weight (and 1 more) computed in step 1, and no rank got a gradient",
       layouts=("ddp", "fsdp"), proof=("zero1", "zero2", "single"))  # fmt: skip
def branch_that_is_detached(world: World, layout: str) -> None:
    begin(world, layout, Branch("detached")).step(part(world, layout))


def right_branch(world: World, layout: str, way: str, steps: int) -> float:
    run = begin(world, layout, Branch(way))
    for step in range(steps):
        run.step(part(world, layout, step))
    return off_by(run, [whole(world, step) for step in range(steps)], lambda: Branch(way))


@fault(SILENT, layouts=("ddp",), proof=("zero2", "fsdp", "single"))
def branch_that_nobody_reads(world: World, layout: str) -> float:
    return right_branch(world, layout, "unread", 2)


@fault(SILENT, layouts=("ddp",), proof=("zero1", "zero2"))
def layer_that_is_dropped_first(world: World, layout: str) -> float:
    return right_branch(world, layout, "layerdrop", 3)


@fault("optimizer: 5 of the weights that get gradients are in no optimizer, first: 0.weight",
       layouts=("fsdp",), proof=("ddp", "zero1", "zero2"))  # fmt: skip
def optimizer_of_matrices(world: World, layout: str) -> None:
    model = nn.Sequential(nn.LayerNorm(4), *net())
    held = [p for p in model.parameters() if p.ndim > 1]
    begin(world, layout, model, sgd(held)).step(part(world, layout))


@fault(SILENT, layouts=("zero1",), proof=("ddp", "zero2", "fsdp"))
def optimizer_of_the_head(world: World, layout: str) -> float:
    """The trunk is not frozen, and stays."""
    model = net()
    run = begin(world, layout, model, sgd(model[3].parameters()))
    run.step(part(world, layout))
    got, plain = run.state_dict(), net().state_dict()
    return float(not torch.equal(got["0.weight"], plain["0.weight"]))
