"""One CPU process with several replicas, as `nn.DataParallel` has them, only for comparison.

For several devices see `device_replicas.py`. Every replica has its own gradients, and all share the
weights' memory. Each runs every `threads`-th micro-batch in its own thread. Afterwards the
gradients are added in the order of the replicas. Compared with `ddp`, one interpreter runs all
replicas in turn between kernels, gradients of all replicas meet in one place after the backward
pass instead of during it, and it ends at one machine.

Random operations, BatchNorm and buffers that the forward pass changes belong to the process, not to
a thread: with those the replicas run in turn. The first step, which always runs in turn, finds out
whether there are random operations: it checks whether a generator still has its seeded state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from shoal.base.errors import PlanError
from shoal.parallel._torch import BatchNorm, get_generators
from shoal.parallel.data_parallel.single import LocalGradients
from shoal.parallel.program import Pass, Program, Reducer, tied_aliases, whole_local_parameters
from shoal.trace.isolation.module_copies import copy_module

LATE = (
    "layout.strategy = dp: the model drew random numbers for the first time after its first step; "
    "threads share one generator; try: layout.strategy=ddp"
)
"""Error text for random draws in a step that runs in threads."""


def apply(program: Program) -> Program:
    """Run the passes of a step on replicas, in threads if that is safe."""
    replicas = ThreadReplicas(program)
    program.notices.append(
        f"dp: {program.plan.layout.threads} replicas in one process, for comparison; ddp's "
        f"processes do not share one interpreter, and sum gradients during backward"
    )
    return replace(
        program,
        local=whole_local_parameters(program),
        reducer=AddedGradients(program.parameters, replicas.others),
        run=replicas.run,
        around=(*program.around, replicas.detect_draws),
        on_close=(*program.on_close, replicas.close),
    )


class ThreadReplicas:
    """The module and its copies, which share its weights' memory but not its gradients."""

    def __init__(self, program: Program) -> None:
        self.module, self.blocks = program.module, program.blocks
        self.others = [_make_replica(program) for _ in range(program.plan.layout.threads - 1)]
        # Otherwise each thread would start as many workers as there are cores.
        share = max(1, torch.get_num_threads() // (len(self.others) + 1))
        self.pool = ThreadPoolExecutor(
            len(self.others) + 1, initializer=torch.set_num_threads, initargs=(share,)
        )
        # A context around micro-batches, except seeding, means buffers that threads would share.
        self.in_turn = bool(program.around) or any(True for _ in program.module.buffers())
        self.looked = False
        self.generators = get_generators(program.world.device)

    def run(self, program: Program, passes: Sequence[Pass], reducer: Reducer) -> None:
        """Run all passes; micro-batch k goes to replica k modulo the number of replicas."""
        modules = [self.module, *self.others]
        for first in range(0, len(passes), len(modules)):
            group = passes[first : first + len(modules)]
            reducer.prepare_backward(first + len(group) == len(passes))
            if self.in_turn or not self.looked:
                for module, one in zip(modules, group, strict=False):
                    self._run_exclusively(module, one)
            else:
                before = [one.get_state() for one in self.generators]
                works = [
                    self.pool.submit(one, module, alone=False)
                    for module, one in zip(modules, group, strict=False)
                ]
                for work in works:
                    work.result()
                after = [one.get_state() for one in self.generators]
                if not all(map(torch.equal, before, after)):
                    raise PlanError(LATE)
            reducer.end_backward(counted=True)
        self.looked = True

    def close(self) -> None:
        """Stop the threads."""
        self.pool.shutdown()

    @contextmanager
    def detect_draws(self, step: int, index: int) -> Iterator[None]:
        """Check at the end of a pass, loss included, whether it drew random numbers."""
        yield
        self._note_draws()

    def _run_exclusively(self, module: nn.Module, one: Pass) -> None:
        """Run one pass in the calling thread, while no other thread runs one.

        In the first step hooks find out whether blocks draw random numbers; then `in_turn` makes
        all later passes exclusive too. Replicas share one device, so nothing is copied.

        Args:
            module: the replica of the module.
            one: the pass.
        """
        with hook_blocks(module, () if self.looked else self.blocks, self._note_draws):
            one(module)

    def _note_draws(self, *_: object) -> None:
        if not self.looked:
            self.in_turn = self.in_turn or any(map(has_drawn, self.generators))


@contextmanager
def hook_blocks(
    module: nn.Module, names: Iterable[str], note: Callable[..., None]
) -> Iterator[None]:
    """Call `note` before and after the forward pass of each of these blocks."""
    hooks = []
    for name in names:
        block = module.get_submodule(name)
        # Before the hooks that reseed the generators, which would hide a draw.
        hooks.append(block.register_forward_pre_hook(note, prepend=True))
        hooks.append(block.register_forward_hook(note, prepend=True))
    yield
    for hook in hooks:
        hook.remove()


def has_drawn(now: torch.Generator) -> bool:
    """Return whether a generator has left the state that its seed set."""
    seeded = torch.Generator(now.device).manual_seed(now.initial_seed())
    return not torch.equal(now.get_state(), seeded.get_state())


def _make_replica(program: Program) -> nn.Module:
    """Copy the module over the same weights and buffers, with parameters of its own."""
    shared: dict[int, object] = {id(buffer): buffer for buffer in program.module.buffers()}
    # batch_norm.py keeps these layers' statistics, and it knows only the module's own layers.
    shared.update({id(m): m for m in program.module.modules() if isinstance(m, BatchNorm)})
    for parameter in program.module.parameters():
        own = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        shared[id(parameter)] = own
    return copy_module(program.module, shared)


class AddedGradients(LocalGradients):
    """Reducer of `dp`: gradients of all replicas, added in their order."""

    def __init__(self, parameters: dict[str, nn.Parameter], replicas: list[nn.Module]) -> None:
        super().__init__(parameters)
        second = tied_aliases(replicas[0]) if replicas else {}
        self.replicas = [
            {
                name: parameter
                for name, parameter in replica.named_parameters()
                if name in parameters and name not in second and parameter is not parameters[name]
            }
            for replica in replicas
        ]

    def start_step(self, rounds: int) -> None:
        """Drop the gradients of all replicas."""
        for parameters in (self.parameters, *self.replicas):
            for parameter in parameters.values():
                parameter.grad = None

    def finish(self) -> None:
        """Add the replicas' gradients to the module's own."""
        for replica in self.replicas:
            for name, parameter in replica.items():
                if parameter.grad is None:
                    continue
                own = self.parameters[name]
                came = parameter.grad.to(own.device, non_blocking=True)
                own.grad = came if own.grad is None else own.grad.add_(came)
                parameter.grad = None
