"""Another user of this machine, for tests of who can reach what: a fork that becomes nobody.

Needs root; where tests run as a common user they are skipped, said aloud.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  another user may not read where it lies
import json
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest

NOBODY = 65534


def needed(what: str) -> None:
    """Skip a test where this process cannot become another user; `what` was not tested then."""
    if os.geteuid() != 0:
        reason = f"{what}: this process is not root and cannot become another user"
        warnings.warn(reason, stacklevel=2)
        pytest.skip(reason)


def become_nobody() -> None:
    """Give up all rights of this process but another user's, for good."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def as_nobody(work: Callable[[], Any]) -> Any:
    """`work()` by another user, a JSON value; its OSErrors are given by their class's name."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        try:
            become_nobody()
            try:
                told = work()
            except OSError as refused:
                told = type(refused).__name__
            os.write(writes, json.dumps(told).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answers:
        text = answers.read()
    os.waitpid(pid, 0)
    assert text, "the other user's process said nothing; its errors are on stderr"
    return json.loads(text)
