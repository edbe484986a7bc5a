"""One process of a test world: it meets the others once, then runs checks as they are asked for.

The test sends one JSON line per check on standard input, {"call": "module:function", "arguments":
{…}}; each member answers with one line, {"ok": result} or {"error": traceback}. Importing torch
costs seconds, so a world lives as long as the test session.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable

import torch

from shoal.fabric import World, start_world


def main(start: Callable[[], World] = start_world) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a check prints goes to the log, not between the answers
    world = start()
    answers.write(json.dumps({"ok": world.rank}) + "\n")
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        if request["call"] == "end":
            break
        try:
            module, name = request["call"].split(":")
            function = getattr(importlib.import_module(module), name)
            answer = {"ok": function(world, **request["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    world.close()


if __name__ == "__main__":
    main()
