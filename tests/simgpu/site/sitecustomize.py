"""On PYTHONPATH with SIM_LIBRARY set: a process's `cuda` is the simulated device once it imports torch.

The library must be loaded before torch's own, so that its answers are found first.

What Shoal measures there is no fact of this machine: unless SHOAL_CACHE is set, its cache lies beside
the library.
"""

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import os
import sys

LIBRARY = os.environ.get("SIM_LIBRARY", "")


class BeforeTorch(importlib.abc.MetaPathFinder):
    """Finds torch itself, once, with the library loaded before and the names set after."""

    def find_spec(self, name, path, target=None):
        """The plain spec of torch, its loader wrapped."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module):
            ctypes.CDLL(LIBRARY, ctypes.RTLD_GLOBAL)
            load(module)
            importlib.import_module("simulated_cuda")

        spec.loader.exec_module = exec_module
        return spec


if LIBRARY:
    os.environ.setdefault("SHOAL_CACHE", os.path.join(os.path.dirname(LIBRARY), "shoal-cache"))
    sys.meta_path.insert(0, BeforeTorch())
if os.environ.get("SIM_LINES"):
    importlib.import_module("reached").install()
