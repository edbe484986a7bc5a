"""Token of a run: a shared secret by which its processes authenticate each other.

    SHOAL_TOKEN the token itself, as `shoal launch` hands it on
    SHOAL_TOKEN_FILE   a file that holds it and that only its owner may read

Every run has one of its own, so that processes of another run are strangers to it. Environment
variables of a process are read by its user and by root alone, command lines by everybody.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from shoal.base.errors import ConfigError

LEAST_LETTERS = 16
TOKEN, TOKEN_FILE = "SHOAL_TOKEN", "SHOAL_TOKEN_FILE"


def new_token() -> str:
    """Make a token of 256 random bits, in characters that need no quotes."""
    return secrets.token_urlsafe(32)


def read_token(env: Mapping[str, str]) -> bytes:
    """Return the token that the environment names; empty if it names none.

    Raises:
        ConfigError: the token is short, or others may read its file.

    >>> read_token({"SHOAL_TOKEN": "correct horse battery staple"})
    b'correct horse battery staple'
    """
    text, source = env.get(TOKEN, ""), TOKEN
    if not text and (named := env.get(TOKEN_FILE, "")):
        text, source = _read(Path(named)), f"{TOKEN_FILE} = {named}"
    if text and len(text) < LEAST_LETTERS:
        raise ConfigError(
            f"{source}: {len(text)} letters, a token has at least {LEAST_LETTERS}; try: "
            f"export {TOKEN}=$(openssl rand -hex 32)"
        )
    return text.encode()


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            text = file.read(4096).strip()
    except (OSError, ValueError) as failure:
        raise ConfigError(f"{TOKEN_FILE} = {path}: {failure}") from failure
    # A secret that Kubernetes mounts belongs to root and to the group of the pod.
    open_to = stat.S_IRWXO if found.st_uid == 0 else stat.S_IRWXO | stat.S_IRWXG
    if os.name == "posix" and (found.st_mode & open_to or found.st_uid not in (0, os.geteuid())):
        raise ConfigError(
            f"{TOKEN_FILE} = {path}: others may read it (mode {found.st_mode & 0o777:o}, owner "
            f"{found.st_uid}); try: chmod 600 {path}"
        )
    if not text:
        raise ConfigError(f"{TOKEN_FILE} = {path}: the file is empty")
    return text
