"""Standard streams to which every verb can write, however the command was started.

an encoding that lacks letters   they are spelt in ASCII (`base/text/terminal_encoding.py`)
closed (`>&-`, `2>&-`, `<&-`)    /dev/null replaces it: output is dropped, and no file that is
                                 opened later gets the number of a standard stream
a pipe that nobody reads         a verb that only prints ends with 141; one that works
                                 (`GOES_ON`) continues without a word, and ends as its work does
a full disk, a lost terminal     one line on the other stream, and status 2; one that works
                                 prints the line at its end, and ends as its work does
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.standard_streams import open_closed_streams
from shoal.base.text.terminal_encoding import PLAIN_ASCII, READABLE

GOES_ON = ("train", "compare", "prove", "find", "launch")
"""Verbs whose work is worth more than their output: a run folder, a proof, a measurement."""


class OutputLostError(OSError):
    """Error of a standard output that takes no more.

    It has no errno: typer and Rich exit on the errno of a closed pipe.
    """


class _StandardStream(io.RawIOBase):
    """A standard stream by its file descriptor, which remembers that it was lost.

    Attributes:
        failure: the system's first error; after it all output is dropped.
        goes_on: the first failure is no error either.
    """

    def __init__(self, number: int, *, goes_on: bool) -> None:
        self.number, self.goes_on = number, goes_on
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of the data, or drop it."""
        left = memoryview(data).cast("B")
        size = len(left)
        while left and self.failure is None:
            try:
                left = left[os.write(self.number, left) :]
            except BlockingIOError:
                continue  # a terminal that another process made non-blocking
            except OSError as failure:
                self.failure = failure
                if not self.goes_on:
                    raise OutputLostError from None
        return size

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self.number

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return os.isatty(self.number)

    def writable(self) -> bool:
        """Return True."""
        return True


class Terminal:
    """The standard streams of one command: `Terminal(verb)` replaces them, `close` ends them.

    Args:
        verb: the first word after `shoal`; `run` leaves a script's streams as Python made them.
    """

    def __init__(self, verb: str) -> None:
        open_closed_streams()
        self.out = _StandardStream(1, goes_on=verb in GOES_ON)
        self.error = _StandardStream(2, goes_on=True)
        if verb != "run":
            sys.stdout = _text_stream(sys.stdout, self.out)
            sys.stderr = _text_stream(sys.stderr, self.error)

    def close(self) -> OSError | None:
        """Flush the streams; return the failure of standard output if it was lost."""
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OutputLostError:
            pass
        self.out.goes_on = True  # the lost output has been reported already
        return self.out.failure


def output_lost_text(failure: OSError) -> str:
    """Return why standard output takes no more; "" for a pipe whose reader has gone."""
    if failure.errno in (errno.EPIPE, errno.ESHUTDOWN):
        return ""
    return f"shoal: standard output: {failure.strerror}; try: another file or terminal\n"


def check_encoding(words: list[str]) -> None:
    """Refuse command-line words that Python cannot decode in this locale's encoding.

    Raises:
        ConfigError: names the first such word.
    """
    for word in words:
        if not word.isascii() and any("\udc80" <= letter <= "\udcff" for letter in word):
            shown = os.fsencode(word).decode("utf-8", "replace")
            raise ConfigError(
                f"{shown}: has letters that this locale ({sys.getfilesystemencoding()}) lacks, so "
                f"no file is found by them; try: PYTHONUTF8=1 before the command"
            )


def _text_stream(stream: Any, raw: _StandardStream) -> Any:
    """Return a text stream over `raw` like Python's own; a replaced stream (a test's) stays."""
    if stream is not None:
        try:
            if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != raw.number:
                return stream
            stream.flush()
        except (OSError, ValueError):
            return stream
    encoding = stream.encoding if stream is not None else "utf-8"
    if codecs.lookup(encoding).name == "ascii":
        encoding = PLAIN_ASCII
    buffered = io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffered, encoding, READABLE, line_buffering=raw.number == 2 or raw.isatty()
    )
