"""Record of a script's own changes of gradients, weights and optimizers between calls of its runs.

The one process holds whole tensors, so changes are found there by versions and digests: between the
last backward pass and the update, and between an update and the next step. Both sides list the
optimizers that step parameters outside of any run.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shoal.base.attribute_patch import patch_attribute
from shoal.optim.named_state import group_settings
from shoal.parallel.compare_weights import tensor_digest
from shoal.proof.script.script_frames import OWN, calling_line
from shoal.trainer.run import Run

CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
MODULE_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
OPTIMIZER_HOOKS = {
    "_optimizer_step_pre_hooks": "pre-hook",
    "_optimizer_step_post_hooks": "post-hook",
}
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
SHOWN = 3
"""Names that a text lists."""


class ScriptActions:
    """Record of the script's own actions.

    Args:
        is_alone: this is the one process, whose tensors are whole.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self.is_alone = is_alone
        self._runs: Sequence[Run] = ()
        self._hooked: dict[int, list[str]] = {}
        self._marks: dict[str, tuple[int, int]] = {}
        self._edits: list[str] = []
        self._calls: list[str] = []
        self._state: dict[int, dict[str, str]] = {}
        self._own: dict[int, tuple[torch.optim.Optimizer, str]] = {}
        self._own_steps: list[str] = []

    @contextmanager
    def watching(self, runs: Sequence[Run]) -> Iterator[None]:
        """Record the script's actions while it is open.

        Args:
            runs: the script's runs, a list that grows.
        """
        self._runs = runs
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_post_hook(self._note_step).remove)
            if self.is_alone:
                for name in CLIPPING:
                    clip = self._wrap_clip(getattr(nn.utils, name))
                    stack.enter_context(patch_attribute(nn.utils, name, clip))
                    stack.enter_context(patch_attribute(nn.utils.clip_grad, name, clip))
                for name in ("backward", "forward_backward"):
                    wrapped = self._wrap_passes(getattr(Run, name))
                    stack.enter_context(patch_attribute(Run, name, wrapped))
                update = self._wrap_update(Run.update)
                stack.enter_context(patch_attribute(Run, "update", update))
            yield

    def add_run(self, number: int, run: Run, arguments: Mapping[str, Any]) -> None:
        """Note the hooks that the script registered on the weights of a new run."""
        model = arguments.get("model")
        found = []
        for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
            for kind in TENSOR_HOOKS:
                for hook in (getattr(parameter, kind, None) or {}).values():
                    if line := _user_line(hook):
                        found.append(f"has a gradient hook of {name} ({line})")
        self._hooked[number] = found
        self.note_update(run, number)

    def own_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that optimizers of the script's own step, by their variables."""
        found: dict[str, torch.Tensor] = {}
        for optimizer, _line in self._own.values():
            for group, entry in enumerate(optimizer.param_groups):
                for place, parameter in enumerate(entry["params"]):
                    name = _find_tensor_name(parameter)
                    found[name or f"{type(optimizer).__name__}.{group}.{place}"] = parameter
        return found

    def list_hooks(self, run: Run) -> list[str]:
        """Return the script's hooks on optimizer, weights and modules of a run."""
        found = list(self._hooked.get(list(self._runs).index(run), ()))
        for kind, word in OPTIMIZER_HOOKS.items():
            for hook in getattr(run.optimizer, kind, {}).values():
                if line := _user_line(hook):
                    found.append(f"has an optimizer step {word} ({line})")
        for name, module in run.model.named_modules():
            for kind, word in MODULE_HOOKS.items():
                for hook in getattr(module, kind).values():
                    if line := _user_line(hook):
                        found.append(f"has a {word} of {name or 'the model'} ({line})")
        return found

    def pop_gradient_edits(self) -> list[str]:
        """Return the script's changes of gradients between the passes and the update."""
        found, self._edits, self._calls = self._edits, [], []
        return found

    def note_update(self, run: Run, number: int) -> None:
        """Note weights, buffers and optimizer state right after an update."""
        self._marks = {}
        if self.is_alone:
            self._state[number] = _digest_state(run)

    def list_between(self, run: Run, number: int) -> list[str]:
        """Return what the script changed since the last update of a run."""
        found, self._own_steps = list(dict.fromkeys(self._own_steps)), []
        before = self._state.get(number)
        if before is None:
            return found
        now = _digest_state(run)
        for kind, text in (
            ("weight", "changed {}"),
            ("state", "changed optimizer.state of {}"),
            ("group", "changed {} of the optimizer"),
        ):
            names = [
                name.partition("/")[2]
                for name in {**before, **now}
                if name.startswith(f"{kind}/") and before.get(name) != now.get(name)
            ]
            if names:
                found.append(text.format(format_names(names)))
        return found

    def _note_step(self, optimizer: torch.optim.Optimizer, *_more: Any) -> None:
        """Note a step of an optimizer that belongs to no run."""
        if any(run.optimizer is optimizer for run in self._runs):
            return
        line = calling_line()
        if line:
            self._own.setdefault(id(optimizer), (optimizer, line))
            kind = type(optimizer).__name__
            self._own_steps.append(f"stepped {kind} ({line}), an optimizer of no run")

    def _wrap_clip(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(clip)
        def clipped(*values: Any, **named: Any) -> Any:
            if line := calling_line():
                self._calls.append(f"{clip.__name__}, {line}")
            return clip(*values, **named)

        return clipped

    def _wrap_passes(self, passes: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(passes)
        def mark(run: Run, *values: Any, **named: Any) -> Any:
            self._calls = []
            result = passes(run, *values, **named)
            self._marks = _mark_gradients(run)
            return result

        return mark

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(update)
        def compare(run: Run) -> Any:
            now = _mark_gradients(run)
            names = [n for n in {**self._marks, **now} if self._marks.get(n) != now.get(n)]
            if self._marks and names:
                calls = f" ({'; '.join(dict.fromkeys(self._calls))})" if self._calls else ""
                text = f"changed .grad of {format_names(names)} before run.update{calls}"
                self._edits.append(text)
            return update(run)

        return compare


def digest_loss_tensors(run: Run) -> dict[str, list[str]]:
    """Return ["", digest] of the tensors and modules that a run's loss reads by name."""
    loss = inspect.unwrap(run.loss) if callable(run.loss) else run.loss
    found: dict[str, Any] = {}
    if isinstance(loss, nn.Module):
        found |= {"the loss": loss}
    elif (code := getattr(loss, "__code__", None)) is not None:
        found |= {name: loss.__globals__.get(name) for name in code.co_names}
        for name, cell in zip(code.co_freevars, loss.__closure__ or (), strict=False):
            with suppress(ValueError):  # a cell that is empty yet
                found[name] = cell.cell_contents
    tensors: dict[str, torch.Tensor] = {}
    for name, value in found.items():
        if isinstance(value, nn.Module) and value is not run.model:
            inside = (*value.named_parameters(), *value.named_buffers())
            tensors |= {f"{name}.{inner}": one for inner, one in inside}
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
    return {name: ["", tensor_digest(one)] for name, one in tensors.items()}


def format_names(names: Sequence[str]) -> str:
    """Join names, the first three and how many more.

    >>> format_names(["a", "b"]), format_names(list("abcde"))
    ('a, b', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _mark_gradients(run: Run) -> dict[str, tuple[int, int]]:
    """Return storage and version of each gradient, which every change in place counts up."""
    return {
        name: (one.grad.data_ptr(), one.grad._version)
        for name, one in run.program.parameters.items()
        if one.grad is not None
    }


def _digest_state(run: Run) -> dict[str, str]:
    """Return digests of the weights, the optimizer's state and its numbers."""
    module = run.model
    found = {
        f"weight/{name}": tensor_digest(one)
        for name, one in (*module.named_parameters(), *module.named_buffers())
    }
    names = {id(one): name for name, one in module.named_parameters()}
    for parameter, state in run.optimizer.state.items():
        parts = [
            tensor_digest(one) if isinstance(one, torch.Tensor) else repr(one)
            for one in state.values()
        ]
        found[f"state/{names.get(id(parameter), 'a parameter')}"] = " ".join(parts)
    for number, group in enumerate(group_settings(run.optimizer)):
        for key, value in group.items():
            found[f"group/{key} of group {number}"] = json.dumps(value)
    return found


def _user_line(hook: Any) -> str:
    """Return name and line of a hook that the script registered; "" for one of a library."""
    function = inspect.unwrap(getattr(hook, "func", hook))
    code = getattr(function, "__code__", None)
    if code is None or not _is_user_file(code.co_filename):
        return ""
    return f"{function.__name__}, {Path(code.co_filename).name}:{code.co_firstlineno}"


def _is_user_file(name: str) -> bool:
    libraries = ("site-packages", "dist-packages")
    return not name.startswith((OWN, "<")) and not any(one in name for one in libraries)


def _find_tensor_name(tensor: torch.Tensor) -> str:
    """Return the script's name of a tensor: a variable, or a parameter of a module in one."""
    for name, value in list(vars(sys.modules["__main__"]).items()):
        if value is tensor:
            return name
        if isinstance(value, nn.Module):
            for inner, parameter in value.named_parameters():
                if parameter is tensor:
                    return f"{name}.{inner}"
    return ""
