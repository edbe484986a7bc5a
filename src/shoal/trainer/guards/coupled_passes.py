"""See in a run's first step whether a loop's own loss compares samples, or branches on its number.

    loss = Σ over samples          no second derivative by the outputs of two samples
    root, ratio, contrast          of sums over a micro-batch: they depend on its size
    if loss.item() > limit:        each micro-batch decides for itself
    scheduler.step()               in the loop: ranks have other numbers of micro-batches

A loop that writes out its passes has no loss function to try. So the outputs of the model are kept
until `run.backward` gets a loss that was computed from them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.trainer._torch import count_output_hooks, pytree
from shoal.trainer.guards.first_step_checks import count_compared_samples, without_hooks

FINITE = frozenset({"isfinite", "isnan", "isinf", "is_nan", "is_inf"})
"""Functions that look for numbers that no run can use."""


class CoupledPassesCheck:
    """Check of the losses of a rank's first micro-batch with several samples.

    Args:
        module: the run's model.
        notice: prints a line of this rank.
        passes: micro-batches of the step over all ranks, at most.
        groups: of the optimizer.
        differentiates: False: this rank takes no gradients of its own, since backward passes of the
            model wait for other ranks (cp); the trial of the passes finds what they would.
    """

    def __init__(
        self,
        module: nn.Module,
        notice: Callable[[str], None],
        passes: int,
        groups: Sequence[Mapping[str, Any]] = (),
        *,
        differentiates: bool = True,
    ) -> None:
        self.notice, self.passes, self.differentiates = notice, passes, differentiates
        self.outputs: list[Any] = []
        self._is_read = self._has_rate_line = self._is_over = False
        self._groups = groups
        self._rates = self._read_rates()
        self.module, self._hook = module, cast("RemovableHandle | None", None)

    def _keep(self, _module: Any, _inputs: Any, outputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        leaves = pytree.tree_leaves(outputs)
        aliases = pytree.tree_map(without_hooks, outputs)
        self.outputs.append(aliases)
        changed = zip(leaves, pytree.tree_leaves(aliases), strict=True)
        return None if all(one is other for one, other in changed) else aliases

    def _read_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups if "lr" in group]

    def reset_outputs(self) -> None:
        """Forget outputs of the micro-batch before; print a line if it changed a learning rate."""
        self.close()  # the new hook is the last one: it sees what the others made of the outputs
        if not self._is_over:
            self._hook = self.module.register_forward_hook(self._keep)
        if not self._has_rate_line and self._read_rates() != self._rates:
            self._has_rate_line = True
            self.notice(RATE_IN_LOOP)

    def close(self) -> None:
        """Remove the hook from the model, and forget its outputs."""
        self.outputs.clear()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def check(self, loss: torch.Tensor, targets: Any, source: ast.AST | None) -> None:
        """Print a line if a loss couples samples, or if the script branches on its number.

        Args:
            loss: a scalar.
            targets: of the micro-batch.
            source: text of the function that called `run.backward`.
        """
        if not self._is_read and source is not None:
            self._is_read = True
            if name := find_branch(source):
                self.notice(branch_line(name))
        if self._find_coupling(loss, targets):
            self._is_over = True
            self.close()

    def _find_coupling(self, loss: torch.Tensor, targets: Any) -> bool:
        """Print a line on hooks on outputs, or on samples that the loss compares, if there are."""
        leaves = [one for one in pytree.tree_leaves(self.outputs) if isinstance(one, torch.Tensor)]
        if any(map(count_output_hooks, leaves)):
            self.notice(OUTPUT_HOOKS)
            return True
        if samples := count_negatives(loss, leaves):
            self.notice(coupled_pass_line(samples, self.passes))
            return True
        for outputs in self.outputs if self.differentiates else ():
            if _meets_weights(loss, outputs):
                continue  # another network lies between, whose ranks may have to meet
            if samples := count_compared_samples(loss, outputs, targets):
                self.notice(coupled_pass_line(samples, self.passes))
                return True
        return False


NODES = 5_000
"""Operations of a loss that are visited at most."""
NLL_LOSS = re.compile(r"NllLossBackward\d+")
"""Name of the node of F.nll_loss; a gradient penalty has those of its backward pass too."""


def _meets_weights(loss: torch.Tensor, outputs: Any) -> bool:
    """Return whether a loss depends on weights beside the outputs, or is too large to say."""
    ends = {one.grad_fn for one in pytree.tree_leaves(outputs) if isinstance(one, torch.Tensor)}
    seen, open_nodes = {loss.grad_fn}, [loss.grad_fn]
    while open_nodes:
        node: Any = open_nodes.pop()
        if hasattr(node, "variable") or len(seen) > NODES:
            return True
        following = {one for one, _ in node.next_functions if one is not None} - ends - seen
        seen |= following
        open_nodes += following
    return False


def count_negatives(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> int:
    """Return n if a loss takes sample i of n for class i of n, as contrastive losses do; else 0.

    Args:
        loss: a scalar.
        leaves: outputs of the model, where the search in the autograd graph ends.
    """
    ends = {one.grad_fn for one in leaves}
    seen, open_nodes = {loss.grad_fn}, [loss.grad_fn]
    while open_nodes and len(seen) < NODES:
        node: Any = open_nodes.pop()
        if NLL_LOSS.fullmatch(node.name()):
            marks, scores = node._saved_target, node._saved_self
            count = len(marks) if marks.ndim == 1 and not marks.is_floating_point() else 0
            places = torch.arange(count, device=marks.device)
            if count > 1 and scores.shape == (count, count) and torch.equal(marks, places):
                return count
        following = {one for one, _ in node.next_functions if one is not None} - seen - ends
        seen |= following
        open_nodes += following
    return 0


RATE_IN_LOOP = (
    "optimizer: lr changed inside of the loop over run.micro_batches, so as often as this rank has "
    "micro-batches in a step; try: scheduler.step() after run.update()"
)
"""Notice on a schedule that counts micro-batches."""


OUTPUT_HOOKS = (
    "run.backward: outputs of the model have a hook (tensor.register_hook): it sees gradients of a "
    "sum over one micro-batch, and no mean; a factor or a mask is right, a clamp is not; try: "
    "clip=… of shoal.parallelize, or a limit times the count of a step"
)
"""Notice on hooks on outputs."""


def find_branch(source: ast.AST) -> str:
    """Return the name of a loss on whose number a script branches; "" if there is none.

    Args:
        source: text of the function that calls `run.backward`.

    >>> find_branch(ast.parse("loss = loss if loss.item() < 1 else 0; run.backward(loss, n)"))
    'loss'
    """
    calls = [one for one in ast.walk(source) if isinstance(one, ast.Call)]
    losses = {
        part.id
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and call.args
        for part in ast.walk(call.args[0])
        if isinstance(part, ast.Name)
    }
    numbers = {
        target.id
        for one in ast.walk(source)
        if isinstance(one, ast.Assign) and _names(one.value) & losses and _reads_number(one.value)
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    for one in ast.walk(source):
        if isinstance(one, ast.If | ast.IfExp | ast.While):
            found = (_names(one.test) & numbers) or (
                _names(one.test) & losses if _compares(one.test) else set()
            )
            if found and not _asks_for_finite(one.test):
                return min(found)
    return ""


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _reads_number(node: ast.AST) -> bool:
    """Return whether an expression makes a number of a tensor."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call):
            called = one.func
            if isinstance(called, ast.Attribute) and called.attr == "item":
                return True
            if isinstance(called, ast.Name) and called.id == "float":
                return True
    return False


def _compares(test: ast.AST) -> bool:
    """Return whether a condition compares sizes, and not identities as `loss is None`."""
    sizes = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    return any(
        isinstance(one, ast.Compare) and any(isinstance(op, sizes) for op in one.ops)
        for one in ast.walk(test)
    )


def _asks_for_finite(test: ast.AST) -> bool:
    names = {one.attr for one in ast.walk(test) if isinstance(one, ast.Attribute)}
    return bool(FINITE & (names | _names(test)))


def branch_line(name: str) -> str:
    """Return the notice on a branch by the number of a micro-batch's loss.

    Args:
        name: of the loss, or of its number.
    """
    return (
        f"run.backward: the script branches on the number of {name}, which is that of one "
        f"micro-batch of this rank, so each decides for itself; try: a condition by sample "
        f"(torch.where), or one on the number that run.update returned for the step before"
    )


def coupled_pass_line(samples: int, passes: int) -> str:
    """Return the notice on a loss of a written-out pass that compares samples.

    Args:
        samples: of the micro-batch.
        passes: micro-batches of the step over all ranks, at most.
    """
    return (
        f"run.backward: what a sample adds to the loss depends on the others beside it (a root or "
        f"a ratio of sums, negatives out of the batch), and only the {samples} of a micro-batch "
        f"are beside each other, of which the step has up to {passes}; try: a sum over samples; "
        f"if it is meant: shoal.parallelize(…, coupled=True)"
    )
