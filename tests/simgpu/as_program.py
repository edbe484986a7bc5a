"""What a fork runs: a program whose output goes to a file, and which ends as it would by itself.

as_program.py OUTPUT PROGRAM WORD …
"""

from __future__ import annotations

import os
import runpy
import sys

out, program, *words = sys.argv[1:]
os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
if not os.environ["RANK"]:
    del os.environ["RANK"]  # the server wants one; this is no rank
sys.argv = [program, *words]
try:
    runpy.run_path(program, run_name="__main__")
finally:
    # Functions of `atexit` do not run in a fork: reports that were not raised end in a status here.
    if "simulated_cuda" in sys.modules:
        sys.modules["simulated_cuda"]._verdict()
