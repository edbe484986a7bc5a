"""One worker process of `shoal train`: `python -m shoal.cli.workers.worker RUN_FOLDER`.

The supervisor starts it, never a user; its output is the rank's log.
"""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from shoal.base.layouts.layout import Layout
from shoal.config.sections import ModelSection
from shoal.forecast.models.hf_presence import is_hf_name
from shoal.launch import run_and_exit
from shoal.parallel import list_technique_modules
from shoal.wire.phases import phase
from shoal.wire.stack_dumps import start_worker_reports

LIBRARIES = frozenset(
    ["sklearn", "scipy", "pandas", "torchvision", "transformers", "timm", "einops"]
)
"""Packages that a user's module may begin with: slow to import, without threads or devices."""


def worker_imports(model: ModelSection, layout: Layout | None = None) -> tuple[str, ...]:
    """Return the slow imports that every worker of a command needs.

    torch._dynamo is among them because `Optimizer.step` and a model's first trace on fake tensors
    import it. The libraries with which a user's module begins are among them, and not the module:
    a restart reads its newest text.

    Args:
        model: the [model] of the run.
        layout: its techniques are imported too; None if it is still open.

    >>> worker_imports(ModelSection(name="llama"))
    ('shoal.trainer.main_job', 'shoal.proof.start_proof', 'torch._dynamo')
    """
    own: tuple[str, ...] = ("shoal.trainer.main_job", "shoal.proof.start_proof", "torch._dynamo")
    if layout is not None:
        own = (*own, *list_technique_modules(layout))
    if is_hf_name(model.name):
        own = (*own, "transformers.modeling_utils")
    functions = filter(None, (model.build, model.loss))
    found = [one for name in functions for one in _leading_libraries(name)]
    return tuple(dict.fromkeys([*own, *found]))


def _leading_libraries(function: str) -> Iterator[str]:
    """Yield the LIBRARIES modules that the module of a function imports before other statements.

    What follows another statement may depend on it, as on an environment variable that it sets.
    """
    search: list[str] | None = None
    name, origin = "", ""
    for part in function.partition(":")[0].split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, search)
        if spec is None:
            return
        origin, search = spec.origin or "", list(spec.submodule_search_locations or [])
    if not origin.endswith(".py"):
        return
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # the worker reports it
        for node in ast.parse(Path(origin).read_bytes()).body:
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""] if not node.level else []
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # the docstring
            else:
                return
            yield from (one for one in modules if one.partition(".")[0] in LIBRARIES)


def worker_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment for workers, which also import from the current folder."""
    paths = [str(Path.cwd()), environ.get("PYTHONPATH", "")]
    return {**environ, "PYTHONPATH": ":".join(path for path in paths if path)}


def main() -> int:
    """Train the run folder named on the command line."""
    folder = Path(sys.argv[1])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a request to stop, as SIGTERM is; no crash
    start_worker_reports(folder)
    with phase("import"):
        from shoal.proof.start_proof import prove_run
        from shoal.trainer.main_job import train

    return train(folder, prove_run)


if __name__ == "__main__":
    run_and_exit(main)
