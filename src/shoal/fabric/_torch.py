"""Names of torch that changed, or that must be imported early; tested on 2.13."""

from __future__ import annotations

import importlib

import torch.distributed as dist

# 2.13 renamed `all_gather_into_tensor`; the old name still works there but warns at every use.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Imported here for its side effect: its functions have the default group as default ARGUMENT,
# taken at import. Imported later (torch itself does, from many places) it would hold the process
# group for ever; gloo's threads then outlive `destroy_process_group` and may abort the exit of
# the interpreter ("terminate called without an active exception"; docs/lab-log.md).
importlib.import_module("torch.distributed.nn.functional")
