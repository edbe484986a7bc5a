"""Operating systems: what Shoal asks of one, and what is missing where it was never tried.

Tried on Linux. macOS has enough of it to start, so a line says what does not hold there; Windows
lacks what runs stand on, so they are refused with the way round.
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


def this_system() -> str:
    """Python's name of the system: linux, darwin, win32, …"""
    return sys.platform


def loopback() -> str:
    """Returns the loopback interface's name on this system: lo0 on macOS, else lo."""
    return "lo0" if this_system() == "darwin" else "lo"


def untried() -> str:
    """Returns the warning for a system on which Shoal was never tried; "" on Linux.

    Raises:
        ConfigError: on Windows, where a run cannot start at all, with the same kind of line.
    """
    system = this_system()
    if system.startswith(TRIED):
        return ""
    if system in ("win32", "cygwin"):
        raise ConfigError(WINDOWS)
    if system == "darwin":
        return MACOS
    return f"{system}: never tried; missing here: the parent-death signal, /proc; tried on: Linux"
