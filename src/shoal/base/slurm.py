"""Detection of Slurm tasks: whether srun started this process as one of several.

    srun -n 4 program       four tasks: SLURM_PROCID counts them, SLURM_STEP_NUM_TASKS says how many
    salloc -n 4, a shell    one process: the allocation's SLURM_NTASKS is left in its environment
    srun --pty bash         one process, at a terminal

Source: Slurm's srun(1), salloc(1); slurm_protocol_defs.h, SLURM_INTERACTIVE_STEP.
"""

from __future__ import annotations

from collections.abc import Mapping

INTERACTIVE_STEP = "4294967290"
"""SLURM_STEP_ID of the shell that salloc opens on a node (use_interactive_step)."""


def count_tasks(env: Mapping[str, str]) -> str:
    """Return srun's number of tasks as text; "" if this process is not one of them.

    >>> count_tasks({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"})
    '4'
    >>> count_tasks({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_PTY_PORT": "4000"})
    ''
    """
    at_terminal = env.get("SLURM_STEP_ID") == INTERACTIVE_STEP or "SLURM_PTY_PORT" in env
    if "SLURM_PROCID" not in env or at_terminal:
        return ""
    return env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "")
