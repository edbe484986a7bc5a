"""Standard streams that may be closed, full or gone.

A failed print must not end the work that it reports, nor hide its exit status. And if a stream is
closed (`2>&-`), the next opened file gets its descriptor: a checkpoint or a connection, into which
libraries would then write their warnings.
"""

from __future__ import annotations

import contextlib
import os
import sys


def open_closed_streams() -> None:
    """Open /dev/null in place of a closed standard input, output or error."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)


def write_error(line: str) -> None:
    """Write a line to standard error now, ignoring a broken stream."""
    _write(sys.stderr, line)


def write_output(line: str, end: str = "\n", stream: object = None) -> None:
    """Write a line to standard output (or another stream) now, ignoring a broken stream."""
    _write(stream or sys.stdout, line, end)


def flush_streams() -> None:
    """Flush standard output and error, ignoring broken streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _write(stream: object, line: str, end: str = "\n") -> None:
    # None: the stream was closed when Python started; ValueError: it was closed since
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.write(f"{line}{end}")  # type: ignore[attr-defined]
        stream.flush()  # type: ignore[attr-defined]
