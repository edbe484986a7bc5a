"""Private names of torch that this package uses; tested on 2.13."""

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
    "forbid_new_groups",
    "pytree",
]


@contextmanager
def forbid_new_groups(refuse: Callable[[str], None]) -> Iterator[None]:
    """Call `refuse("new_group")` instead of making a process group, while the context is open.

    All ways to make a group end in one private function of torch. A patch of its public names would
    miss code that imported them before.
    """
    before = distributed_c10d._new_group_with_tag

    def refused(*args: Any, **named: Any) -> None:
        refuse("new_group")

    distributed_c10d._new_group_with_tag = refused
    try:
        yield
    finally:
        distributed_c10d._new_group_with_tag = before
