"""A model and its data in which one thing goes wrong once; `fault.json` says what, where and when.

As hanging.py, of which it is a part, with deaths and wrong numbers beside the hangs:

    kind   killed, leaves, raises, memory, read (a read error of the disk), and hanging.py's
    nan    samples that are not finite · wild  samples that are far too large
    slow   rank `rank` takes `extra_s` more for each sample, always
    fsync  the disk refuses, twice, what rank `rank` writes
    flip   one bit of a weight of rank 1 turns over after step `after`, by the hook `flip`
    swap   two sums of equal shape in the other order on that rank
"""

import errno
import json
import os
import signal
import time
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
RANK = int(os.environ.get("RANK", "0"))
MODELS: list[torch.nn.Module] = []
ASKED = json.loads(Path("fault.json").read_text()) if Path("fault.json").exists() else {}
HERE = ASKED.get("island", "") in os.environ.get("SHOAL_RUN_FOLDER", "")
MINE = HERE and ASKED.get("rank") == RANK


class Samples(hanging.Samples):
    """As the other's; some may be poisoned, all may come late."""

    def __getitem__(self, index: int):
        if ASKED.get("kind") == "slow" and MINE:
            time.sleep(ASKED["extra_s"])
        inputs, target = super().__getitem__(index)
        if index in ASKED.get("nan", []):
            inputs = inputs * float("nan")
        if index in ASKED.get("wild", []):
            inputs = inputs * 1e4
        return inputs, target


def sum_mean(x: torch.Tensor) -> None:
    torch.distributed.all_reduce(x.mean(0))


def sum_most(x: torch.Tensor) -> None:
    torch.distributed.all_reduce(x.amax(0))


class Model(hanging.Hanging):
    """As the other's; it sums two means over ranks on its way, as a loss over all samples does."""

    def forward(self, x):
        if ASKED.get("kind") == "swap":
            for one in (sum_most, sum_mean) if MINE else (sum_mean, sum_most):
                one(x.detach())
        return super().forward(x)


def build(layers: int = 4) -> torch.nn.Module:
    MODELS.append(Model(layers))
    return MODELS[-1]


def flip(record: dict) -> None:
    """A hook: turns a bit over between two steps."""
    now = record.get("step") == ASKED["after"] and "loss" in record
    if MINE and now and not Path("hung").exists():
        Path("hung").touch()
        for model in MODELS:
            if model.last.weight.is_meta:
                continue  # built for its shapes
            # Not by torch, which would count it as a write of the user's.
            model.last.weight.detach().numpy().view("int32")[0, 0] ^= 1 << 20


def refuse_twice() -> None:
    """Let the first two files that this rank wants to have on the disk fail."""
    real, left = os.fsync, [2]

    def fsync(descriptor: int) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    os.fsync = fsync


def data():
    if ASKED.get("kind") == "fsync" and MINE:
        refuse_twice()
    return Samples(), [Samples(8, 0.0)[index] for index in range(8)]
