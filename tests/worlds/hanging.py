"""A model and its data, of which one rank hangs once: how, which, when is said by the file `hang.json`.

    kind   stopped  its process gets SIGSTOP
           lock     a call into C keeps Python's lock
           loop     a loop without an end
           barrier  it calls a barrier that the others do not
           cut      what comes for it over the network is dropped from then on
    place  data, when a sample is read · forward, which only layouts have that leave the model whole
    rank   of its run (RANK) · island  its folder's name, if there are islands
    after  samples or passes of this rank
    saved  it waits until a checkpoint is complete: on a busy machine steps are faster than saves

           swap     its two sums over ranks change places, in every forward pass
           extra    it makes one more, of the same shape, in every forward pass
           apart    it makes one at another line, as is right where that is meant; harmless

It hangs once: the file `hung` tells a restart that it has been.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

SO_ATTACH_FILTER, BPF_RETURN = 26, 0x06
LOOP = """
import os
import torch
import hanging
import shoal

run = shoal.parallelize(
    hanging.build, lambda p: torch.optim.SGD(p, lr=0.1), torch.nn.CrossEntropyLoss(reduction="none"),
    layout="ddp", batch=8, micro_batch=2, folder="run",
)
print("this is rank", os.environ["RANK"], flush=True)
run.restore()
data = hanging.Samples()
while run.step_count < 40:
    for batch in run.loader(data):
        run.step(batch)
        if run.step_count % 8 == 0:
            run.save()
run.close()
"""
"""A loop of a user's own with this model and data, under torchrun."""


class Once:
    """Counts how often it is called, and hangs if it is this rank's turn."""

    def __init__(self, place: str) -> None:
        self.asked = json.loads(Path("hang.json").read_text()) if Path("hang.json").exists() else {}
        mine = self.asked.get("rank") == int(os.environ.get("RANK", "0"))
        here = self.asked.get("island", "") in os.environ.get("SHOAL_RUN_FOLDER", "")
        self.mine = mine and here and self.asked["place"] == place
        self.passes = 0

    def __call__(self) -> None:
        # Islands look at their data, in a process of its own, before they train on it.
        if (
            self.asked.get("island")
            and not Path(os.environ["SHOAL_RUN_FOLDER"], "metrics.jsonl").exists()
        ):
            return
        self.passes += 1
        if not self.mine or self.asked["kind"] in SUMS or self.passes <= self.asked["after"]:
            return
        self.mine = False
        if self.asked.get("saved"):
            wait_for_a_checkpoint()
        try:
            os.close(os.open("hung", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        HANGS[self.asked["kind"]]()


def wait_for_a_checkpoint(deadline_s: float = 30.0) -> None:
    until_s = time.monotonic() + deadline_s
    folder = Path(os.environ["SHOAL_RUN_FOLDER"], "checkpoints")
    while not list(folder.glob("step-*/manifest.json")):
        if time.monotonic() > until_s:
            raise TimeoutError(f"no complete checkpoint after {deadline_s:.0f} s")
        time.sleep(0.005)


def loop() -> None:
    while True:
        time.sleep(0.01)


def cut() -> None:
    """Drop what arrives at this process's connections: a filter that passes no byte."""
    line = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(line))
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        except OSError:  # no socket, or closed meanwhile
            continue


HANGS = {
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "lock": lambda: ctypes.PyDLL(None).sleep(3600),
    "loop": loop,
    "barrier": lambda: dist.barrier(),
    "cut": cut,
}


SUMS = ("swap", "extra", "apart", "none")


def add(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def sums(kind: str) -> None:
    """Two sums over ranks, as a model may make them; `kind` is what is wrong with them here."""
    means, squares = torch.ones(4), torch.full((4,), 100.0)

    def first() -> None:
        add(means)

    def second() -> None:
        add(squares)

    order = [second, first] if kind == "swap" else [first, second]
    if kind == "apart":
        order[1] = lambda: add(squares)
    for one in order:
        one()
    if kind == "extra":
        add(means)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Hanging(nn.Module):
    """Some blocks."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.last = nn.Linear(16, 4)
        self.once = Once("forward")

    def forward(self, x):
        self.once()
        if self.once.asked.get("kind") in SUMS:
            sums(self.once.asked["kind"] if self.once.mine else "")
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(layers: int = 4) -> nn.Module:
    return Hanging(layers)


class Samples:
    def __init__(self, count: int = 64, sleep_s: float = 0.003) -> None:
        self.count, self.sleep_s = count, sleep_s
        self.once = Once("data")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        time.sleep(self.sleep_s)
        self.once()
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.tensor(index % 4)


def data():
    return Samples(), [Samples(8, 0.0)[index] for index in range(8)]
