"""One process of a test world: it meets the others once, then runs checks as they are asked for.

The member goes to the test's door, a socket, and says its rank there once it has met the others. The
test sends one JSON line per check, {"call": "module:function", "arguments": {…}}; the member answers
with one line, {"ok": result} or {"error": traceback}. A world lives as long as the test session.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import traceback
from collections.abc import Callable

import torch

import guard_off
from shoal.fabric import World, start_world


def main(start: Callable[[], World] = start_world) -> None:
    torch.set_num_threads(1)
    guard_off.switch_off()
    faulthandler.register(signal.SIGUSR2)  # `worlds.py` asks a silent member where it stands
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(os.environ["SHOAL_TEST_DOOR"])
        channel = door.makefile("rw")
    world = start()
    channel.write(json.dumps({"ok": world.rank}) + "\n")
    channel.flush()
    for line in channel:
        gc.collect()
        gc.freeze()  # guards look at all objects, of which earlier checks leave hundreds of thousands
        request = json.loads(line)
        if request["call"] == "end":
            break
        try:
            module, name = request["call"].split(":")
            function = getattr(importlib.import_module(module), name)
            answer = {"ok": function(world, **request["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        channel.write(json.dumps(answer) + "\n")
        channel.flush()
    world.close()


if __name__ == "__main__":
    main()
