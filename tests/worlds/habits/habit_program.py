"""One habit on one layout as a program: `torchrun --nproc-per-node 2 habit_program.py NAME LAYOUT`.

Each rank writes its answer (`habit_table.attempt`) as one line; the watchdog of a script may end all
ranks before, with a line that names why.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch  # noqa: E402

from habits.habit_table import attempt  # noqa: E402
from shoal.fabric import start_world  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    world = start_world()
    answer = attempt(world, *sys.argv[1:3])
    sys.stdout.write(f"ANSWER {json.dumps(answer)}\n")
    sys.stdout.flush()
    if answer.get("error") or answer.get("raised"):
        os._exit(1)  # as an uncaught error ends a script; the launcher ends the other ranks
    world.close()


if __name__ == "__main__":
    main()
