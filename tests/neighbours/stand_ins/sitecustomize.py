"""Writes down what a neighbour's script hands to `backward`, in the programs of `beside_scripts.py`.

Python loads it before the script, on PYTHONPATH; the script stays as it is. At the end of a process
it also writes which modules of the neighbour's own package were loaded, and what others are told of
whether that is installed. Generators are seeded once, where the neighbour is imported.
"""

import atexit
import importlib.abc
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

WATCHED = {
    "torch._tensor": "Tensor",
    "accelerate.accelerator": "Accelerator",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "shoal.neighbours.accelerate": "Accelerator",
    "shoal.neighbours.deepspeed_engine": "Engine",
}
CUTS = "deepspeed.runtime.zero.partition_parameters"
NEIGHBOURS = ("accelerate", "deepspeed")
losses, inside = [], []


class Watch(importlib.abc.MetaPathFinder):
    """Wraps `backward` of the class that scripts call, once its module is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name not in WATCHED and name != CUTS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            if name == CUTS:
                if os.environ.get("CUT_LATE"):
                    module.Init._post_init_method = lambda self, layer: None
                return
            watch(getattr(module, WATCHED[name]))
            if name != "torch._tensor":  # some scripts draw their weights without a seed
                sys.modules["torch"].manual_seed(0)
            if name == "deepspeed.runtime.engine":
                importlib.import_module("shoal.neighbours.without_cuda")

        spec.loader.exec_module = exec_module
        return spec


def watch(kind):
    backward = kind.backward

    def watched(self, *args, **named):
        loss = self if kind.__name__ == "Tensor" else args[0]
        if not inside and loss.numel() == 1:
            losses.append(loss.detach().float().item())
        inside.append(True)
        try:
            return backward(self, *args, **named)
        finally:
            inside.pop()

    kind.backward = watched


def installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def end():
    if not losses:
        return  # a helper of the process, which has its RANK
    own = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if name.partition(".")[0] in NEIGHBOURS and f"site-packages{os.sep}" in file:
            own.append(name.partition(".")[0])
    told = {"losses": losses, "loaded": sorted(set(own))}
    told["version"] = {name: installed(name) for name in NEIGHBOURS}
    if "transformers" in sys.modules:
        from transformers.integrations import is_deepspeed_available
        from transformers.utils import is_accelerate_available

        told["transformers"] = installed("transformers")
        told["available"] = {
            "accelerate": bool(is_accelerate_available()),
            "deepspeed": bool(is_deepspeed_available()),
        }
    Path(os.environ["LOSSES"], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(told))


if "RANK" in os.environ and "LOSSES" in os.environ:
    sys.meta_path.insert(0, Watch())
    atexit.register(end)
