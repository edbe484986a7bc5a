"""Private names of torch that this room uses; tested on 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "pytree",
    "without_new_groups",
]


@contextmanager
def without_new_groups(refuse: Callable[[str], None]) -> Iterator[None]:
    """While it lasts `refuse("new_group")` is called where a process group would be made.

    All ways to make one end in one function of torch's; to patch its public names would miss those
    who imported them before.
    """
    before = distributed_c10d._new_group_with_tag

    def refused(*args: Any, **named: Any) -> None:
        refuse("new_group")

    distributed_c10d._new_group_with_tag = refused
    try:
        yield
    finally:
        distributed_c10d._new_group_with_tag = before
