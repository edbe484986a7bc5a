"""Private names of torch that this package uses; tested on 2.13."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.base.attribute_patch import patch_attribute

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "forbid_new_groups",
    "pytree",
]


def forbid_new_groups(refuse: Callable[[str], None]) -> AbstractContextManager[None]:
    """Call `refuse("new_group")` instead of making a process group, while the context is open.

    All ways to make a group end in one private function of torch. A patch of its public names would
    miss code that imported them before.
    """
    return patch_attribute(
        distributed_c10d, "_new_group_with_tag", lambda *args, **named: refuse("new_group")
    )
