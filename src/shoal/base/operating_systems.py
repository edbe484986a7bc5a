"""Supported operating systems, and the warnings or errors on untested ones.

Tested on Linux. macOS can start runs, so a warning lists the limits there. Windows lacks required
functions, so runs are refused with a workaround.
"""

from __future__ import annotations

import sys

from shoal.base.errors import ConfigError

TRIED = "linux"

MACOS = (
    "macOS: never tried; missing here: the parent-death signal (workers outlive a launcher that is "
    "killed together with its guardian), /proc (who owned a run folder is not known, memory is the "
    "peak), saves that are on the drive and read back from it (fsync ends at its cache), Apple's "
    "GPU (runs use the CPU); tried on: Linux"
)
WINDOWS = (
    "Windows: never tried; missing here: locks of run folders (fcntl), process groups to end "
    "workers by, the parent-death signal, sockets handed to workers; try: WSL 2, which is Linux"
)


def system_name() -> str:
    """Return Python's name of the system: linux, darwin, win32 or another."""
    return sys.platform


def loopback_interface() -> str:
    """Return the loopback interface's name on this system: lo0 on macOS, else lo."""
    return "lo0" if system_name() == "darwin" else "lo"


def untested_system_warning() -> str:
    """Return the warning for a system on which Shoal was never tested; "" on Linux.

    Raises:
        ConfigError: the system is Windows, where a run cannot start.
    """
    system = system_name()
    if system.startswith(TRIED):
        return ""
    if system in ("win32", "cygwin"):
        raise ConfigError(WINDOWS)
    if system == "darwin":
        return MACOS
    return f"{system}: never tried; missing here: the parent-death signal, /proc; tried on: Linux"
