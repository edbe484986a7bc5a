"""Check the first step of a run for mistakes in model, loss and targets that raise no error.

    a mean with a count      the loss's last operation is a mean, which was then called a sum
    targets = inputs         Hugging Face's labels, with a loss that compares place t with place t
    ranks in the loss        it sums or divides over ranks itself, as the run does once more
    weights in the loss      a penalty on weights, where a rank holds parts of them only
    samples in the loss      it compares the samples of a micro-batch with each other
    gradients of gradients   under layouts that can be differentiated once only
    evaluation mode          dropout is off and BatchNorm frozen while the model trains
    weights beside the run   the loss has parameters that no run holds
    parts of a micro-batch   they add up to the whole (`loss_trial.py`)

None but the last calls the loss twice. The first reads the autograd graph. The second reads the
gradient at the last position of the outputs, which no shifted loss uses. Two watch the loss's calls
of torch.distributed and of torch, one takes its second derivative.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.base.errors import ConfigError, PlanError
from shoal.base.layouts.policies import CompilePolicy
from shoal.parallel.program import Program
from shoal.trainer._torch import count_gradient_hooks, pytree
from shoal.trainer.guards import reports
from shoal.trainer.step.call_contract import (
    IGNORED_TARGET,
    Loss,
    is_default,
    split_batch,
    split_named_parts,
)
from shoal.trainer.step.optimizer_step import NO_GRADIENT

if TYPE_CHECKING:
    from shoal.trainer.guards.loss_trial import TrialFinding, TrialRows

FEWEST = 8
"""Targets that must all equal their inputs before a notice is printed."""

DRAWS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
)  # fmt: skip
"""Layers that compute something else in evaluation mode."""


class FirstStepLoss:
    """Wrapper of a run's loss in its first step; its results are the same."""

    def __init__(
        self,
        loss: Loss,
        program: Program,
        batches: list[tuple[int, Any]],
        *,
        coupled: bool = False,
    ) -> None:
        self.loss, self.program, self.module = loss, program, program.module
        self.ranks = program.world.size
        found = [pair for _, value in batches if (pair := _match_copied_targets(value)) is not None]
        self.copied = bool(found)
        # One tensor as both is no label: speed measurements use it in the place of data.
        self.labels = any(one.data_ptr() != other.data_ptr() for one, other in found)
        self.compared = False
        self.asked: set[str] = set()
        self.dropped: set[str] = set()
        self.other_kernels: list[str] = []
        self.once = describe_single_backward(program)
        self.cut_off = self._tied = False
        self.micro_batches = program.data.size * len(batches)
        self.looked, self.together = coupled, 0
        untried = coupled or is_default(loss) or program.plan.layout.threads > 1
        self.tries, self.trial_rows = not untried, cast("TrialRows | None", None)
        self.trial: TrialFinding | None = None
        self.own_loss: Any = None
        self.foreign: Sequence[torch.Tensor] | None = None

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return the result of the loss, after the checks.

        Raises:
            ConfigError: a mean is returned as a sum.
        """
        find_loss = getattr(self.loss, "find_loss", None)
        if find_loss is not None and find_loss(outputs, targets) is not None:
            self.own_loss, self.copied, self.looked, self.tries = self.loss, False, True, False
        elif is_default(self.loss) and not isinstance(targets, torch.Tensor):
            reports.first_step_report.refuse_targets(targets)
        if is_default(self.loss) and not (self.own_loss or isinstance(outputs, torch.Tensor)):
            self.dropped |= reports.model_notices.list_dropped_losses(outputs)
            self._note_other_kernels(outputs)
        outputs = pytree.tree_map(
            without_hooks, forbid_double_backward(outputs, self.once) if self.once else outputs
        )
        # A single rank cannot count twice, and may have other runs in threads.
        ranks = _record_rank_calls(self.asked) if self.ranks > 1 else nullcontext()
        with ranks, _refuse_sharded_weights(self.program):
            result = self.loss(outputs, targets)
        plain, _ = split_named_parts(result)
        if isinstance(plain, tuple) and len(plain) == 2:
            refuse_mean(*plain)
        else:
            _refuse_pairs(plain, outputs, targets)
        self._check_connected(plain)
        if self.micro_batches > 1 and not self.looked:
            self.looked, self.together = True, count_compared_samples(plain, outputs, targets)
        if self.copied:
            self._watch_outputs(outputs, targets)
        if self.foreign is None:
            self.foreign = list_foreign_leaves(plain, outputs, self.program)
        if self.tries:
            from shoal.trainer.guards.loss_trial import TrialRows

            self.trial_rows = self.trial_rows or TrialRows()
            self.trial_rows.add(outputs, targets)
        return result

    def print_notices(self, notice: Callable[[str], None]) -> None:
        """Print notices after the backward passes, such as on targets that are the inputs.

        Raises:
            ConfigError: the model sees the position it predicts; or the loss is not connected to
                the model, which layouts that gather would take for zero gradients.
        """
        if self.cut_off:
            raise ConfigError(NO_GRADIENT)
        self.compared = self.compared and self.copied
        joined = self.trial_rows.join() if self.trial_rows and not self.asked else None
        if joined is not None:
            from shoal.trainer.guards.loss_trial import try_loss

            self.trial = try_loss(self.loss, *joined, self.module)
        found = self.dropped or self.asked or self.together or self.compared or self.other_kernels
        if found or self.trial is not None or self.foreign or self.own_loss:
            reports.first_step_report.print_findings(self, notice)

    def _check_connected(self, result: Any) -> None:
        total, count = result if isinstance(result, tuple) and len(result) == 2 else (result, 1)
        some = bool((count != 0).any()) if isinstance(count, torch.Tensor) else bool(count)
        if isinstance(total, torch.Tensor) and some:  # another check reports an invalid count
            self.cut_off = not total.requires_grad and not self._tied
            self._tied = self._tied or total.requires_grad

    def _note_other_kernels(self, outputs: Any) -> None:
        if not self.other_kernels and hasattr(self.module, "config"):
            plan, device = self.program.plan, self.program.world.device.type
            lines = reports.kernel_notices.other_kernels_lines(self.module, outputs, plan, device)
            self.other_kernels = lines

    def _watch_outputs(self, outputs: Any, targets: Any) -> None:
        if is_default(self.loss):
            self.compared = True
            return
        labels = get_labels(targets)
        if labels is None:
            return
        for leaf in pytree.tree_leaves(outputs):
            per_place = isinstance(leaf, torch.Tensor) and leaf.ndim == labels.ndim + 1
            if per_place and leaf.requires_grad and leaf.shape[:-1] == labels.shape:
                leaf.register_hook(self._last_position_hook(labels))

    def _last_position_hook(self, targets: torch.Tensor) -> Callable[[torch.Tensor], None]:
        last = targets[..., -1] != IGNORED_TARGET

        def check_gradient(gradient: torch.Tensor) -> None:
            if bool(((gradient[..., -1, :] != 0).any(-1) & last).any()):
                self.compared = True

        return check_gradient


RANKS = ("all_reduce", "all_gather", "all_gather_into_tensor", "get_rank", "get_world_size")
"""Functions of torch.distributed that a loss does not need."""


@contextmanager
def _record_rank_calls(asked: set[str]) -> Iterator[None]:
    """Collect which of `RANKS` are called inside, by their name in `torch.distributed`."""
    whole = {name: getattr(dist, name) for name in RANKS}

    def listed(name: str) -> Callable[..., Any]:
        @functools.wraps(whole[name])
        def call(*args: Any, **kwargs: Any) -> Any:
            # Losses over vocabulary shards, Shoal's and torch's, use collectives too.
            caller = str(sys._getframe(1).f_globals.get("__name__", ""))
            if caller.partition(".")[0] not in ("shoal", "torch"):
                asked.add(name)
            return whole[name](*args, **kwargs)

        return call

    for name in RANKS:
        setattr(dist, name, listed(name))
    try:
        yield
    finally:
        for name, function in whole.items():
            setattr(dist, name, function)


class _ShardedWeightMode(TorchFunctionMode):
    """Mode that raises PlanError if user code computes with a weight that is sharded here."""

    def __init__(self, parts: Mapping[int, str], layout: str) -> None:
        super().__init__()
        self.parts, self.layout = parts, layout

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            name = self.parts.get(id(leaf))
            if name is not None and not _is_called_by_shoal():
                raise PlanError(reports.writes_report.penalty_text(name, self.layout))
        return func(*args, **(kwargs or {}))


def _refuse_sharded_weights(program: Program) -> AbstractContextManager[Any]:
    """Return `_ShardedWeightMode` around a loss if weights are sharded, else a null context."""
    parts = {
        id(p): name
        for name, p in program.module.named_parameters()
        if name in program.cuts or p.is_meta or hasattr(p, "device_mesh")
    }
    return _ShardedWeightMode(parts, program.plan.layout.text()) if parts else nullcontext()


def _is_called_by_shoal() -> bool:
    """Return whether Shoal's own loss called torch: it handles sharded weights."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        room = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if room != "torch":
            return room == "shoal"
        frame = frame.f_back
    return False


def _match_copied_targets(value: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (inputs, targets) if these are integers equal to the inputs where they count."""
    inputs, targets = split_batch(value)
    labels = get_labels(targets)
    if labels is None:
        return None
    if isinstance(inputs, Mapping):
        given = [one for key, one in inputs.items() if inputs is not targets or key != LABELS]
    else:
        given = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
    found = (one for one in given if isinstance(one, torch.Tensor) and _are_copies(one, labels))
    return next(((one, labels) for one in found), None)


LABELS = "labels"
"""Key of the targets in Hugging Face's batches."""


def get_labels(targets: Any) -> torch.Tensor | None:
    """Return targets that are token ids: a tensor, or the labels in a dict."""
    found = targets.get(LABELS) if isinstance(targets, Mapping) else targets
    return found if isinstance(found, torch.Tensor) else None


def _are_copies(inputs: torch.Tensor, targets: torch.Tensor) -> bool:
    if any(one.is_floating_point() or one.ndim < 2 for one in (inputs, targets)):
        return False
    unlike = inputs.device != targets.device or inputs.dtype == torch.bool
    if unlike or inputs.shape != targets.shape:
        return False
    valid = targets != IGNORED_TARGET
    if int(valid.sum()) < FEWEST or not bool(((inputs == targets) | ~valid).all()):
        return False
    bounds = torch.iinfo(targets.dtype)
    least = targets.masked_fill(~valid, bounds.max).min()
    return bool(least < targets.masked_fill(~valid, bounds.min).max())


FOREIGN, NODES = 8, 5_000
"""Weights beside the run that are named at most: more are another network · visited nodes."""


def list_foreign_leaves(result: Any, outputs: Any, program: Program) -> list[torch.Tensor]:
    """Return parameters that a loss depends on and that no run holds, such as a temperature.

    Args:
        result: the loss, or (sum, count).
        outputs: of the model, where the search in the autograd graph ends.
        program: the run's.

    Returns:
        Parameters, and tensors without dims; [] for more than a few, as a network beside has.
    """
    total = result[0] if isinstance(result, tuple) and result else result
    root = getattr(total, "grad_fn", None)
    if root is None:
        return []
    leaves = pytree.tree_leaves(outputs)
    ends = {leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor)}
    own = {id(p) for p in program.module.parameters()}
    given = {id(leaf) for leaf in leaves}
    seen, open_nodes, found = {root}, [root], dict[int, Any]()
    while open_nodes and len(seen) < NODES:
        node = open_nodes.pop()
        leaf = getattr(node, "variable", None)
        is_weight = isinstance(leaf, torch.Tensor) and (
            isinstance(leaf, nn.Parameter) or not leaf.ndim
        )
        if is_weight and id(leaf) not in own and id(leaf) not in given:
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following not in ends:
                seen.add(following)
                open_nodes.append(following)
    return list(found.values()) if len(found) <= FOREIGN else []


MOST = 1 << 20
"""Largest number of output elements whose second derivative is taken."""


def count_compared_samples(result: Any, outputs: Any, targets: Any) -> int:
    """Return how many samples a loss compares with each other; 0 if it sums them, or is unknown.

    A sum over samples has no second derivative by outputs of two of them.
    """
    total = result[0] if isinstance(result, tuple) else result
    rows = [leaf.shape[0] for leaf in pytree.tree_leaves(targets)
            if isinstance(leaf, torch.Tensor) and leaf.ndim]  # fmt: skip
    if not rows or rows[0] < 2 or not isinstance(total, torch.Tensor) or not total.requires_grad:
        return 0
    for out in pytree.tree_leaves(outputs):
        wide = isinstance(out, torch.Tensor) and out.requires_grad and out.ndim > 1
        if (
            wide
            and out.shape[0] == rows[0]
            and out.numel() <= MOST
            and _is_coupled(total.sum(), out)
        ):
            return rows[0]
    return 0


def without_hooks(leaf: Any) -> Any:
    """Return an alias of an output whose hooks wait for the backward pass, so that none runs early.

    Under fsdp hooks gather all weights and, at the end, reduce all gradients.
    """
    hooked = isinstance(leaf, torch.Tensor) and leaf.requires_grad and count_gradient_hooks(leaf)
    return leaf.view_as(leaf) if hooked else leaf


def _is_coupled(total: torch.Tensor, outputs: torch.Tensor) -> bool:
    """Return whether the gradient of the first of several outputs depends on the others."""
    grad = functools.partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
    try:
        (first,) = grad(total, outputs, create_graph=True)
        if first is None or not first.requires_grad:
            return False
        weights = torch.linspace(0.5, 1.5, first[0].numel()).to(first)
        (second,) = grad(first[0].flatten() @ weights, outputs)
    except RuntimeError:  # an operation of the loss has no second derivative
        return False
    if second is None:
        return False
    sizes = second.detach().abs()
    return bool(sizes[1:].max() > 1e-6 * sizes.max())


PASSED = ("ToCopyBackward0", "NegBackward0", "AliasBackward0", "ViewBackward0", "CloneBackward0",
          "_FollowChainBackward")  # fmt: skip
"""Operations after which a mean is still one; the last is that of fsdp's outputs."""


def _refuse_pairs(losses: Any, outputs: Any, targets: Any) -> None:
    """Raise ConfigError for [B, 1] and [B], which broadcasting turns into B × B losses."""
    if not all(isinstance(each, torch.Tensor) for each in (losses, outputs, targets)):
        return
    shapes = {tuple(outputs.shape), tuple(targets.shape)}
    rows = len(losses) if losses.ndim == 2 else 0
    if rows > 1 and losses.shape[1] == rows and shapes == {(rows,), (rows, 1)}:
        reports.first_step_report.refuse_broadcast(rows, outputs, targets)


def refuse_mean(
    total: Any,
    count: Any,
    where: str = "loss returned",
    nearest: str = 'reduction="sum", or shoal.mean_of_samples(loss)',
) -> None:
    """Raise ConfigError for (mean, count): its gradient is too small, by the count.

    Args:
        total: first element of the loss's result.
        count: second element.
        where, nearest: begin and end of the message.
    """
    node = getattr(total, "grad_fn", None)
    while node is not None and node.name() in PASSED:
        node = node.next_functions[-1][0]
    if node is None:
        return
    reduction = getattr(node, "_saved_reduction", None)
    several = getattr(node, "_saved_self_sym_numel", 2) > 1  # a mean of one number equals it
    mean = (node.name().startswith("MeanBackward") and several) or reduction == MEAN
    if mean:
        raise ConfigError(
            f"{where} (mean, {float(count):g}), where (sum, count) is wanted: a mean is divided by "
            f"the count again, or weighs ranks with unequal counts wrongly; try: {nearest}"
        )


MEAN = 1
"""torch's number for reduction="mean"."""


def evaluation_mode_notice(module: nn.Module) -> str:
    """Return the notice for a model that trains in evaluation mode; "" if no layer cares."""
    if module.training or not any(isinstance(part, DRAWS) for part in module.modules()):
        return ""
    return reports.first_step_report.EVALUATES


def describe_single_backward(program: Program) -> str:
    """Return the part of a plan that can be differentiated only once; "" for none."""
    layout = program.plan.layout
    for axis in ("tp", "cp", "ep", "pp"):
        if getattr(layout, axis) > 1:
            return f"layout.{axis} = {getattr(layout, axis)}"
    if layout.zero == 3:
        return f"layout.strategy = {layout.strategy}"
    return "train.compile = blocks" if program.plan.differs_from_default(CompilePolicy) else ""


def forbid_double_backward(outputs: Any, what: str) -> Any:
    """Return aliases of outputs whose gradient must not be differentiated again.

    Args:
        outputs: of the model.
        what: the part of the plan that can be differentiated only once.

    Returns:
        Aliases: derivatives by the outputs themselves pass through no operation of a layout.
    """

    def refuse(gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise ConfigError(
                f"loss: a gradient of a gradient (create_graph=True) passes through the model, and "
                f"{what} can be differentiated once only; try: layout.strategy=ddp, zero1 or "
                f"zero2, without train.compile"
            )

    def watch(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        leaf.register_hook(refuse)
        return leaf.view_as(leaf)

    return pytree.tree_map(watch, outputs)


@contextmanager
def watch_double_backward(program: Program) -> Iterator[None]:
    """Watch the outputs of every forward pass of the program's module inside."""
    what = describe_single_backward(program)
    if not what:
        yield
        return

    def after(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        return forbid_double_backward(outputs, what) if torch.is_grad_enabled() else None

    handle = program.module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()
