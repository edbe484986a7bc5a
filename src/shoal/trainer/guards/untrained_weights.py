"""Name weights that get no gradient: in step 1 if they are cut off, else at the end.

A model with an unused expert, head or pooler is right. A weight that is cut off by an accidental
`.detach()`, or by a kernel without a backward pass, stays untrained, and the loss falls all the
same. In a run's first step hooks distinguish the two, on every rank:

    no graph       a layer's outputs do not depend on its weights
    no gradient    the outputs got a gradient, and no weight of the layer did
    detached       outputs were detached, or passed to a module under torch.no_grad()
    checkpoint     a reentrant one, whose inputs need no gradient, passes none to its weights

The run names a weight at once if no rank has a gradient of it and it is cut off on some rank. At
the end it lists weights without a gradient in any step. Weights outside the optimizer are not
listed. Layers that tp or cp rewrote as graphs run no hooks: their weights show only at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.base.layouts.policies import CompilePolicy
from shoal.parallel.program import Program
from shoal.trainer._torch import pytree
from shoal.trainer.guards import reports
from shoal.trainer.guards.guard import Guard
from shoal.trainer.step.step_vector import StepNumbers

NEAR, MOST = 4, 50_000
"""Operations between a layer's output and its weight · visited graph nodes, at most."""


class UntrainedWeightsGuard(Guard):
    """Guard against weights that get no gradient.

    Args:
        program: the run's.
        unheld: names of the weights that its optimizer does not hold.
        forgotten: those of them that seem to be left out by mistake.
        notice: prints a line, by rank 0.
    """

    def __init__(
        self,
        program: Program,
        unheld: Collection[str],
        forgotten: Collection[str],
        notice: Callable[[str], None],
    ) -> None:
        self.program, self.notice, self.forgotten = program, notice, forgotten
        self.never = [place for place, name in enumerate(program.names) if name not in unheld]
        self.steps, self._look = 0, _GradientFlowHooks(program)
        # Hooks would recompile a compiled block, and threads have replicas.
        compiled = any(getattr(m, "_compiled_call_impl", None) for m in program.module.modules())
        asked = (
            program.plan.differs_from_default(CompilePolicy) or program.plan.layout.strategy == "dp"
        )
        self.looks = not (compiled or asked)

    def due(self, step: int) -> bool:
        """Return True until every weight has got a gradient."""
        return not self.steps or bool(self.never)

    def sums(self, step: int) -> Mapping[str, Sequence[float]]:
        """Return which weights are cut off on this rank, for the first step's all-reduce."""
        if self.steps:
            return {}
        cut_off = self._look.found | self._look.reached
        return {"cut_off": [float(name in cut_off) for name in self.program.names]}

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """Note which weights got a gradient, and print those that are cut off.

        Args:
            step: the current step, from 1.
            numbers: results of its all-reduce.
        """
        if "used" not in numbers.entries:  # a worker of an asynchronous parameter server
            return
        used = [count > 0 for count in numbers.sums("used")]
        self.steps += 1
        if self.steps == 1 and self.forgotten:
            pairs = zip(self.program.names, used, strict=True)
            got = [name for name, has in pairs if has and name in self.forgotten]
            if line := reports.model_notices.unheld_line(got, self.program.parameters):
                self.notice(line)
        self.never = [place for place in self.never if not used[place]]
        if self.steps > 1 or not self.never or "cut_off" not in numbers.entries:
            return
        names, found = self.program.names, numbers.sums("cut_off")
        lost = [names[place] for place in self.never if found[place]]
        if lost:
            self.notice(reports.model_notices.cut_off_line(lost))

    def close(self) -> None:
        """Print the weights that got no gradient in any step, but for those frozen now."""
        named = [self.program.names[place] for place in self.never] if self.steps else []
        here = self.program.parameters  # a stage of a pipeline lacks those of the others
        names = [name for name in named if name not in here or here[name].requires_grad]
        if names:
            self.never = []
            self.notice(reports.model_notices.untrained_line(names, self.steps))

    def around(self, step: int, micro_batches: int) -> AbstractContextManager[None] | None:
        """Return the context of hooks around the passes of the first step; None in later ones."""
        if self.steps or not self.looks or not self.never:
            return None
        self._look = _GradientFlowHooks(self.program)  # a step that failed is made again
        return self._look.installed()


class _GradientFlowHooks:
    """Hooks on the layers that hold weights, during the passes of one step.

    Attributes:
        found: weights whose layer's output has no graph, or was detached.
        reached: weights whose layer's output got a gradient; most of them got one too.
    """

    def __init__(self, program: Program) -> None:
        self.names: dict[int, str] = {}
        self.owners: list[tuple[nn.Module, dict[str, str]]] = []
        for path, module in program.module.named_modules():
            held: dict[str, str] = {}
            for key in module._parameters:
                name = f"{path}.{key}".lstrip(".")
                name = program.aliases.get(name, name)
                if name in program.parameters:
                    held[key] = name
            if held:
                self.owners.append((module, held))
        self.found, self.reached = set[str](), set[str]()
        self.left = MOST

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Register the hooks, and remove them at the end."""
        handles = []
        for module, held in self.owners:
            before = partial(self._check_inputs, held)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._check_outputs, held)))
        detach = torch.Tensor.detach

        def watched(tensor: torch.Tensor) -> torch.Tensor:
            room = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
            if tensor.requires_grad and torch.is_grad_enabled() and room not in ("shoal", "torch"):
                self._mark_cut_off(tensor)
            return detach(tensor)

        torch.Tensor.detach = watched  # type: ignore[assignment]
        try:
            yield
        finally:
            del torch.Tensor.detach
            for handle in handles:
                handle.remove()

    def _check_inputs(self, own: dict[str, str], module: nn.Module, args: Any, kwargs: Any) -> None:
        for key, name in own.items():  # the weights that a layout gathered for this pass
            self.names[id(getattr(module, key))] = name
        if not torch.is_grad_enabled():
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            for leaf in tensors:
                if leaf.grad_fn is not None:
                    self._mark_cut_off(leaf)
            if not any(t.requires_grad for t in tensors) and _is_checkpointed():
                self.found |= set(own.values())

    def _check_outputs(
        self, own: dict[str, str], module: nn.Module, inputs: Any, outputs: Any
    ) -> None:
        if not torch.is_grad_enabled():
            return
        held = set(own.values())
        leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        wide = [t for t in leaves if t.is_floating_point() or t.is_complex()]
        if wide and not any(t.requires_grad for t in wide) and not any(module.children()):
            self.found |= held
            for leaf in pytree.tree_leaves(inputs):
                if isinstance(leaf, torch.Tensor):
                    self._mark_cut_off(leaf)
        for leaf in wide:
            if leaf.grad_fn is not None:
                near = self._reachable_weights(leaf.grad_fn, NEAR) & held
                if near:
                    leaf.register_hook(partial(self._mark_reached, near))

    def _mark_reached(self, names: set[str], _gradient: torch.Tensor) -> None:
        self.reached |= names

    def _mark_cut_off(self, tensor: torch.Tensor) -> None:
        if tensor.grad_fn is not None:
            self.found |= self._reachable_weights(tensor.grad_fn, MOST)
        elif id(tensor) in self.names:
            self.found.add(self.names[id(tensor)])

    def _reachable_weights(self, root: Any, levels: int) -> set[str]:
        """Return names of the weights that a graph reaches within `levels` operations."""
        found, seen, layer = set[str](), {root}, [root]
        while layer and levels and self.left > 0:
            levels -= 1
            self.left -= len(layer)
            below = [one for node in layer for one, _ in node.next_functions if one is not None]
            layer = list(dict.fromkeys(one for one in below if one not in seen))
            seen.update(layer)
            for node in layer:
                name = self.names.get(id(getattr(node, "variable", None)))
                if name is not None:
                    found.add(name)
        return found


def _is_checkpointed() -> bool:
    """Return whether a reentrant checkpoint runs this pass; its inputs pass gradients on."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return frame.f_code.co_name == "forward"
        frame = frame.f_back  # type: ignore[assignment]
    return False
