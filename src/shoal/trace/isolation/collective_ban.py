"""Refuse collectives where one process works alone: it would wait for ranks that never come.

A model may communicate by itself: a contrastive loss that averages over all ranks, a SyncBatchNorm
of its own. If only rank 0 runs such a model (one process as the reference of a proof, a count of
operations), its first collective would wait until a deadline kills the run. Inside
`forbid_collectives` it raises instead, before anything is sent, with the name of the collective and
of the line that called it. All collectives go through torch's dispatcher, whichever function called
them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from shoal.trace._torch import TorchDispatchMode, forbid_new_groups

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
"""Namespaces of torch's collectives."""

TORCH, OWN = str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[2])
"""Folders whose lines are not the user's: torch's and this package's."""


class ForbiddenCollective(RuntimeError):
    """Error in the place of a collective inside of `forbid_collectives`, which would wait for ever.

    It is no ShoalError: the proof catches it and explains it.

    Args:
        name: name of the collective.
        where: file:line of the user's code that called it, if known.
    """

    def __init__(self, name: str, where: str) -> None:
        super().__init__(f"{name} at {where}, in a process that works alone")
        self.name, self.where = name, where


@contextmanager
def forbid_collectives() -> Iterator[None]:
    """Raise ForbiddenCollective for collectives and new groups of this thread while it is open."""
    with forbid_new_groups(_raise_forbidden), _CollectiveBan():
        yield


class _CollectiveBan(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles here, and torch's guard would import its compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in NAMESPACES:
            _raise_forbidden(func.overloadpacket.__name__.strip("_"))
        return func(*args, **(kwargs or {}))


def _raise_forbidden(name: str) -> None:
    raise ForbiddenCollective(name, caller_location() or "an unknown line")


def caller_location(*but: str) -> str:
    """Return file:line of the innermost caller that is neither torch's nor this package's.

    Args:
        but: folders of this package that are not skipped: "" if one of them called.
    """
    frame: FrameType | None = sys._getframe(2)
    ends = tuple(f"{OWN}{os.sep}{room}{os.sep}" for room in but)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, OWN, "<")):
        if ends and frame.f_code.co_filename.startswith(ends):
            return ""
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""
