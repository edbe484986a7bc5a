"""Lightning strategy over Shoal: its Trainer keeps the loop, a run of Shoal makes the steps.

    import lightning.pytorch, shoal.neighbours.lightning      Lightning first
    Trainer(strategy="shoal", devices=4)                      or "shoal_zero2", "shoal_fsdp", …
    Trainer(strategy=ShoalStrategy(layout="fsdp", recompute="full"))

The numbers are those of Lightning's "ddp": means of means over ranks, a loss divided by
`accumulate_grad_batches`, the last window of an epoch cut short. Its `.ckpt` files stay its own:
weights and the optimizer's state are whole in them, so another layout, or Lightning alone, can
resume from them. Manual optimization is refused. Source: lightning 2.6.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn

from shoal.base.errors import ConfigError, nearest_word
from shoal.base.layouts.policies import POLICIES
from shoal.fabric import World, start_world
from shoal.neighbours.library_loop import LibraryLoop, claim_run_folder
from shoal.neighbours.sources.frozen_weights import find_thaw
from shoal.trainer import parallelize as parallelizing
from shoal.trainer.state.run_state import OPTIMIZER, collect_run_state

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Names under which Lightning is installed; their classes do not know each other."""
LAYOUTS = ("auto", "single", "ddp", "zero1", "zero2", "fsdp", "hsdp")
DEGREES = ("dp_replicate", "dp_shard", "zero", "strategy")
PRECISIONS = {"32-true": "fp32", "64-true": "fp64", "bf16-mixed": "bf16", "16-mixed": "fp16"}
OWN = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
    *("precision_plugin", "process_group_backend", "timeout", "start_method"),
)
"""Arguments of Lightning's strategies that keep their meaning."""
ELSEWHERE = {
    "clip": "Trainer(gradient_clip_val=…)",
    "compute": "Trainer(precision=…)",
    "find_unused_parameters": "leave it out: unused parameters need no word",
    "static_graph": "leave it out: nothing is rebuilt",
    "gradient_as_bucket_view": "leave it out: it is so",
    "ddp_comm_hook": 'compress="int8"',
    "cpu_offload": 'offload="parameters"',
    "activation_checkpointing_policy": 'recompute="full"',
    "sharding_strategy": 'layout="fsdp"',
    "stage": 'layout="zero2"',
}
_in_parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose weights a fit under fsdp left sharded."""
TRUE = {"bf16-true": "bf16-mixed", "16-true": "16-mixed"}


class MethodWrapper(nn.Module):
    """Wrapper that runs a method of the user's module in a forward pass, as Lightning's do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, *inputs: Any, **named: Any) -> Any:
        """Return the result of the method."""
        return getattr(self.module, method)(*inputs, **named)


class _StrategyMethods:
    """Methods in which Shoal's strategy differs from its base, Lightning's ddp strategy."""

    package: ClassVar[Any]
    lightning_module: Any
    optimizers: Any

    def __init__(self, layout: Any = "auto", **named: Any) -> None:
        check_layout(layout)
        policies = named.keys() & (POLICIES.keys() - ELSEWHERE.keys())
        for name in named.keys() - policies - {*OWN}:
            known = [*OWN, *POLICIES]
            near = (
                ELSEWHERE.get(name)
                or nearest_word(name, known)
                or "a key of docs/reference/configuration.md"
            )
            raise ConfigError(f"ShoalStrategy: {name} is no argument of it; try: {near}")
        self.policies = {name: named.pop(name) for name in policies}
        super().__init__(**named)
        self.layout = layout
        self.loop: LibraryLoop | None = None
        self.carrier: MethodWrapper | None = None
        self.world: World | None = None
        self._names: list[list[str]] = []
        self._states: Any = None
        self._more, self._norm = False, 0.0
        self._thaws = self._loads = False

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """Register the strategies by name, for Trainer."""
        for name in LAYOUTS:
            said = "shoal" if name == "auto" else f"shoal_{name}"
            told = f"Shoal, layout {name}"
            registry.register(said, cls, description=told, override=True, layout=name)

    # Setup

    def setup(self, trainer: Any) -> None:
        """Move the module to its device; to fit, start a run of it and its optimizer."""
        compute = self._compute()
        states, self._states = self._states, None  # of a checkpoint that only this call resumes
        if self.lightning_module in _in_parts:
            raise ConfigError(
                "LightningModule: since a fit under fsdp it holds this rank's parts of its "
                "weights; try: a new one, and ckpt_path="
            )
        super().setup(trainer)  # type: ignore[misc]  # of the ddp strategy
        if trainer.state.fn != "fit":
            return
        module, optimizers = self.lightning_module, self.optimizers
        if not module.automatic_optimization:
            raise ConfigError(
                "LightningModule.automatic_optimization = False: a run makes each step whole; "
                "try: True, or shoal.parallelize in a loop of your own (run.micro_batches)"
            )
        if type(module).backward is not self.package.LightningModule.backward:
            raise ConfigError(
                "LightningModule.backward is overridden: gradients of a pass are the run's; "
                "try: leave it out, and give training_step's loss the factor"
            )
        if not any(group["params"] for one in optimizers for group in one.param_groups):
            raise ConfigError(
                "configure_optimizers: no optimizer that steps a weight; try: one, over "
                "self.parameters()"
            )
        self._thaws = any(map(_is_finetuning, trainer.callbacks)) or bool(find_thaw()[0])
        frozen = [one for one in module.parameters() if self._thaws and not one.requires_grad]
        for one in frozen:  # the callback thaws them in mid-training: their gradients are summed
            one.requires_grad_(True)
        self._start_run(optimizers[0], compute, states)
        for one in frozen:
            one.requires_grad_(False)

    def _start_run(self, optimizer: torch.optim.Optimizer, compute: str, states: Any) -> None:
        carrier = MethodWrapper(self.lightning_module)
        # Whole, and cut with the parameters; groups that a callback adds come later, and load then.
        self._loads = bool(states) and len(states[0]["param_groups"]) != len(optimizer.param_groups)
        if states and not self._loads:
            optimizer.load_state_dict(states[0])
        names = {id(one): name for name, one in carrier.named_parameters()}
        groups = optimizer.param_groups
        self._names = [[names[id(one)] for one in group["params"]] for group in groups]
        run = parallelizing.parallelize(
            carrier,
            optimizer,
            layout=self.layout if self._world().size > 1 else "single",
            precision=compute,
            world=self._world(),
            prove="off",
            **{"clip": 0.0, **self.policies, **claim_run_folder()},
        )
        vars(optimizer)["zero_grad"] = _do_nothing  # a step begins without gradients
        plugin: Any = self.precision_plugin  # type: ignore[attr-defined]  # the base's
        vars(plugin)["clip_gradients"] = self._clip
        if hasattr(plugin, "scaler"):
            plugin.scaler = None  # the run scales the loss
        # As DDP does, which the numbers are those of; FSDP broadcasts no buffers.
        self.carrier = carrier
        self.loop = LibraryLoop(run, broadcasts=run.plan.layout.zero < 3)

    def _world(self) -> World:
        if self.world is None:
            self.world = start_world()  # adopts the group that Lightning made
        return self.world

    def _compute(self) -> str:
        plugin: Any = self.precision_plugin  # type: ignore[attr-defined]  # the base's
        if plugin.precision not in PRECISIONS:
            near = TRUE.get(plugin.precision, "bf16-mixed")
            raise ConfigError(
                f"Trainer(precision={plugin.precision!r}): weights are stepped in fp32; try: {near}"
            )
        return PRECISIONS[plugin.precision]

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Return the module as it is: a run sums gradients, no wrapper does."""
        return model

    def _register_ddp_hooks(self) -> None:
        """Do nothing: no module is wrapped."""

    # Steps

    def training_step(self, *inputs: Any, **named: Any) -> Any:
        """Run the module's own step, as a pass of the step under way."""
        return self._run_method("training_step", *inputs, **named)

    def validation_step(self, *inputs: Any, **named: Any) -> Any:
        """Run the module's own step, in the run's dtype."""
        return self._run_method("validation_step", *inputs, **named)

    def _run_method(self, method: str, *inputs: Any, **named: Any) -> Any:
        loop = self.loop
        if loop is None:
            return getattr(super(), method)(*inputs, **named)
        if method == "training_step":
            return loop.forward(method, *inputs, **named)
        if loop.buffers is not None:
            loop.buffers.enter_pass()
        with loop.run.program.autocast():
            return loop.run.model(method, *inputs, **named)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Enclose a pass before the last one of the same step."""
        self._more = True
        with nullcontext() if self.loop is None else self.loop.before_last_pass():
            yield
        self._more = False

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *_: Any, **named: Any) -> Any:
        """Add gradients of a loss, which Lightning has divided by the accumulation."""
        if self.loop is None:
            raise ConfigError("backward: no fit is under way; try: Trainer.fit")
        plugin: Any = self.precision_plugin  # type: ignore[attr-defined]  # the base's
        loss = plugin.pre_backward(closure_loss, self.lightning_module)
        self.loop.backward(loss, share=1.0, last=not self._more, **named)
        return plugin.post_backward(loss, self.lightning_module)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **_: Any) -> Any:
        """Run the last pass of a step, then update; hooks and clipping see the mean gradient."""
        if self.loop is None:
            raise ConfigError("optimizer.step: no fit is under way; try: Trainer.fit")
        found, run = closure(), self.loop.run
        if self.loop.passes is None or not self.loop.passes.count:
            return found  # training_step returned None
        plugin: Any = self.precision_plugin  # type: ignore[attr-defined]  # the base's
        if self._thaws and not run.plan.layout.zero:
            run.guards.optimizer.accept_groups()
        run.adjust = partial(plugin._after_closure, model or self.lightning_module, optimizer)
        self._norm = self.loop.norm()
        try:
            self.loop.update()
        finally:
            run.adjust = None
        return found

    def _clip(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "") -> None:
        """Clip, in place of the plugin, by the norm over all ranks' parts, or by value."""
        if not clip_val:
            return
        held = [one for group in optimizer.param_groups for one in group["params"]]
        if getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) == "value":
            torch.nn.utils.clip_grad_value_(held, clip_val)
            return
        parts = [one.grad for one in held if one.grad is not None]
        factor = float(clip_val) / (self._norm + 1e-6)
        if parts and factor < 1.0:
            torch._foreach_mul_(parts, factor)

    # Checkpoints

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> Any:
        """Load Lightning's file; by default its pickle may hold tensors and plain values."""
        found = super().load_checkpoint(  # type: ignore[misc]  # of the ddp strategy
            checkpoint_path, weights_only=True if weights_only is None else weights_only
        )
        self._states = found.get("optimizer_states")
        return found

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the states if a callback has added groups; else the run started with them."""
        if self._loads:
            super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]  # of the ddp strategy

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole module's tensors by its own names; every rank calls it."""
        if self.loop is None or not self.loop.run.plan.layout.zero:
            return dict(self.lightning_module.state_dict())
        told = self.loop.state_dict()
        return {name.removeprefix("module."): value for name, value in told.items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return `state_dict` of the optimizer over the whole module; every rank calls it."""
        own = optimizer.state_dict()
        if self.loop is None or not self.loop.run.plan.layout.zero:
            return dict(own)
        from shoal.parallel.build.full_state import assemble_tensors

        run = self.loop.run
        parts, record = collect_run_state(run)
        kept = {name: part for name, part in parts.items() if name.startswith(OPTIMIZER)}
        places = {name: place for place, name in enumerate(chain(*self._names))}
        state: dict[int, dict[str, Any]] = {}
        for full, tensor in assemble_tensors(kept, run.world).items():
            name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
            state.setdefault(places[name], {})[key] = tensor
        for name, values in record["optimizer"]["scalars"].items():
            state.setdefault(places[name], {}).update(values)
        groups, first = [], 0
        for group, names in zip(own["param_groups"], self._names, strict=True):
            groups.append({**group, "params": list(range(first, first + len(names)))})
            first += len(names)
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    # Communication

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast plain values and tensors, as JSON and bytes: never as a pickle."""
        world = self._world()
        if world.size == 1:
            return obj
        said = world.broadcast_json(_encode_json(obj) if world.rank == src else None, src)
        return _decode_json(said)

    def on_exception(self, exception: BaseException) -> None:
        """Release the run without its end: the other processes may be gone."""
        super().on_exception(exception)  # type: ignore[misc]  # of the ddp strategy
        if self.loop is not None and self._world().size > 1:
            self.loop = None

    def teardown(self) -> None:
        """End the run; the module keeps its weights, under fsdp this rank's parts."""
        if self.loop is not None:
            self.loop.run.close()
            if self.loop.run.plan.layout.zero == 3:
                _in_parts.add(self.lightning_module)
        self.loop = self.carrier = self.world = None
        super().teardown()  # type: ignore[misc]  # of the ddp strategy


def check_layout(layout: Any) -> None:
    """Refuse a layout other than data-parallel ones: Lightning's loop runs whole layers.

    Args:
        layout: one of LAYOUTS, or a dict with keys of DEGREES.

    Raises:
        ConfigError: for tp, pp, cp and unknown names.

    >>> check_layout("zero2"), check_layout({"dp_replicate": 2, "dp_shard": 2})
    (None, None)
    """
    known = isinstance(layout, dict) and set(layout) <= set(DEGREES)
    if known or layout in LAYOUTS:
        return
    first = nearest_word(str(layout), LAYOUTS) or "ddp, zero1, zero2 or fsdp"
    raise ConfigError(
        f"ShoalStrategy(layout={layout!r}): Lightning's loop calls training_step on whole layers, "
        f"once per batch; try: {first}; tp, pp and cp: shoal.parallelize(…, sample=…)"
    )


def _is_finetuning(callback: Any) -> bool:
    """Return whether a callback unfreezes weights during training."""
    return any(kind.__name__ == "BaseFinetuning" for kind in type(callback).__mro__)


def _do_nothing(set_to_none: bool = True) -> None:
    """Do nothing, in place of `zero_grad`."""


def _encode_json(value: Any) -> Any:
    """Convert a value to JSON with tagged types.

    Raises:
        ConfigError: only a pickle could hold the value.

    >>> _decode_json(_encode_json({"a": (1, None), "b": [torch.tensor([2.5])]}))
    {'a': (1, None), 'b': [tensor([2.5000])]}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_encode_json(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_encode_json(one) for one in value]}
    if isinstance(value, dict) and all(isinstance(one, str) for one in value):
        return {"dict": {name: _encode_json(one) for name, one in value.items()}}
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return {"tensor": value.tolist(), "dtype": kind, "device": str(value.device)}
    if hasattr(value, "__fspath__"):
        return {"path": str(value)}
    raise ConfigError(
        f"strategy.broadcast: {type(value).__name__} would travel as a pickle; try: plain "
        f"values, lists, dicts and tensors of it"
    )


def _decode_json(value: Any) -> Any:
    """Return the value that `_encode_json` converted."""
    if isinstance(value, list):
        return [_decode_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        kind = getattr(torch, value["dtype"])
        return torch.tensor(value["tensor"], dtype=kind, device=torch.device(value["device"]).type)
    if "path" in value:
        from pathlib import Path

        return Path(value["path"])
    if "tuple" in value:
        return tuple(_decode_json(one) for one in value["tuple"])
    return {name: _decode_json(one) for name, one in value["dict"].items()}


def _strategies() -> list[type]:
    """Return one class for each Lightning here: those imported before, else those installed."""
    found = [name for name in PACKAGES if name in sys.modules]
    found = found or [name for name in PACKAGES if find_spec(name.partition(".")[0])]
    made: list[type] = []
    for name in found:
        package, strategies = (importlib.import_module(f"{name}{x}") for x in ("", ".strategies"))
        inside = {"package": package, "__doc__": "Shoal's layouts under a Trainer of Lightning's."}
        kind = type("ShoalStrategy", (_StrategyMethods, strategies.DDPStrategy), inside)
        kind.register_strategies(strategies.StrategyRegistry)  # type: ignore[attr-defined]
        made.append(kind)
    return made


def __getattr__(name: str) -> Any:
    if name != "ShoalStrategy":
        raise AttributeError(f"shoal.neighbours.lightning has no {name}")
    if not _made:
        raise ImportError("ShoalStrategy: no Lightning is installed here: pip install lightning")
    return _made[0]


_made = _strategies()
