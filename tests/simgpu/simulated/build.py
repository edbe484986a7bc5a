"""Builds the simulated device once per torch, Python and its own source, into a cache.

python tests/simgpu/simulated/build.py     the library's path on the last line
SHOAL_SIMGPU_CACHE=folder                  where builds lie; default: build/simgpu of the repository
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).parent / "csrc"
HEADERS = SOURCE.parent / "torch_headers"
"""In the place of two of torch's that read the headers of all its operators."""
ROOT = Path(__file__).parents[3]
MADE_FOR = "2.13"
MEMORY = ("--param", "ggc-min-expand=1000", "--param", "ggc-min-heapsize=2000000")
"""The compiler collects no garbage before it holds 2 GB: it needs less."""
FLAGS = ("-std=gnu++17", "-fPIC", "-O1", "-w", "-DAT_PER_OPERATOR_HEADERS", *MEMORY)
COMPILER = os.environ.get("CXX", "g++")


class CannotBuild(Exception):
    """What this machine lacks, in one line."""


def library() -> Path:
    """The built library, built now if this source was not yet.

    Errors: CannotBuild without a compiler, with another torch, or where the compiler fails
    """
    torch_version = version("torch")
    if not torch_version.startswith(MADE_FOR):
        raise CannotBuild(
            f"the simulated device is written for torch {MADE_FOR}, here is {torch_version}"
        )
    # The library names torch's folder: one that was built beside an environment that is gone loads nowhere.
    digest = hashlib.sha256(f"{torch_version} {_torch()} {sys.version} {FLAGS}".encode())
    sources = sorted(SOURCE.iterdir())
    for path in (*sources, *sorted(HEADERS.rglob("*.h"))):
        digest.update(path.read_bytes())
    cache = Path(os.environ.get("SHOAL_SIMGPU_CACHE") or ROOT / "build" / "simgpu")
    target = cache / f"{torch_version}-{digest.hexdigest()[:16]}" / "libsimgpu.so"
    if target.exists():
        return target
    if shutil.which(COMPILER) is None:
        raise CannotBuild(f"the simulated device needs a C++17 compiler ({COMPILER}); none is here")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile([p for p in sources if p.suffix == ".cpp"], target)
    return target


def _torch() -> Path:
    """The folder of torch, which links may lead to."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).resolve()


def _compile(sources: list[Path], target: Path) -> None:
    """Compile and link all files as one: torch's headers, read once, take longer than the rest."""
    torch = _torch()
    include = torch / "include"
    paths = (
        SOURCE,
        HEADERS,
        include,
        include / "torch/csrc/api/include",
        sysconfig.get_path("include"),
    )
    libraries = (f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch", "-ltorch_python")
    together = target.with_suffix(".cpp")
    together.write_text("".join(f'#include "{source.name}"\n' for source in sources))
    whole = target.with_suffix(".new")
    made = subprocess.run(
        [
            *(COMPILER, *FLAGS, *(f"-I{path}" for path in paths), "-shared", "-o", whole, together),
            *(*libraries, f"-Wl,-rpath,{torch / 'lib'}"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    if made.returncode:
        raise CannotBuild("the simulated device does not compile:\n" + made.stderr[:4000])
    whole.rename(target)
    together.unlink()


if __name__ == "__main__":
    try:
        print(library())
    except CannotBuild as why:
        raise SystemExit(str(why)) from None
