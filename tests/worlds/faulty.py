"""A model and its data in which one thing goes wrong once; `fault.json` says what, where and when.

As hanging.py, of which it is a part, with deaths and wrong numbers beside the hangs:

    kind   killed, leaves, raises, memory, read (a read error of the disk), and hanging.py's
    nan    samples that are not finite · spike  samples that are 10⁴ too large, with wrong labels
"""

import errno
import json
import os
import signal
from pathlib import Path

import torch

import hanging


def raises() -> None:
    raise RuntimeError("the model broke on purpose")


def memory() -> None:
    torch.empty(2**50)


def read() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "shard-7")


hanging.HANGS |= {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leaves": lambda: os._exit(0),
    "raises": raises,
    "memory": memory,
    "read": read,
}
ASKED = json.loads(Path("fault.json").read_text()) if Path("fault.json").exists() else {}


class Samples(hanging.Samples):
    """As the other's; some may be poisoned."""

    def __getitem__(self, index: int):
        inputs, target = super().__getitem__(index)
        if index in ASKED.get("nan", []):
            inputs = inputs * float("nan")
        if index in ASKED.get("spike", []):
            inputs, target = inputs * 1e4, (target + 1) % 4
        return inputs, target


build = hanging.build


def data():
    return Samples(), [Samples(8, 0.0)[index] for index in range(8)]
