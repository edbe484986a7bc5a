"""One worker process of `shoal train`: `python -m shoal.cli.workers.worker RUN_FOLDER`.

The supervisor starts it, never a user; its output is the rank's log.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from shoal.base.layouts.layout import Layout
from shoal.forecast.models.hf_presence import is_hf_name
from shoal.launch import run_and_exit
from shoal.parallel import list_technique_modules
from shoal.wire.phases import phase, write_phases_to_folder
from shoal.wire.stack_dumps import start_page_reports


def worker_imports(model: str, layout: Layout | None = None) -> tuple[str, ...]:
    """Return the slow imports that every worker of a command needs, for `model.name = model`.

    torch._dynamo is among them because `Optimizer.step` and a model's first trace on fake tensors
    import it.

    Args:
        layout: its techniques are imported too; None if it is still open.

    >>> worker_imports("llama")
    ('shoal.trainer.main_job', 'shoal.proof.start_proof', 'torch._dynamo')
    """
    own: tuple[str, ...] = ("shoal.trainer.main_job", "shoal.proof.start_proof", "torch._dynamo")
    if layout is not None:
        own = (*own, *list_technique_modules(layout))
    return (*own, "transformers.modeling_utils") if is_hf_name(model) else own


def worker_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment for workers, which also import from the current folder."""
    paths = [str(Path.cwd()), environ.get("PYTHONPATH", "")]
    return {**environ, "PYTHONPATH": ":".join(path for path in paths if path)}


def main() -> int:
    """Train the run folder named on the command line."""
    folder = Path(sys.argv[1])
    start_page_reports()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a request to stop, as SIGTERM is; no crash
    if os.environ.get("RANK", "0") == "0":
        write_phases_to_folder(folder)
    with phase("import"):
        from shoal.proof.start_proof import prove_run
        from shoal.trainer.main_job import train

    return train(folder, prove_run)


if __name__ == "__main__":
    run_and_exit(main)
