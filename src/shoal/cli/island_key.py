"""`shoal islands key`: make the key of an island, as ssh-keygen does; no torch.

    FILE        private Ed25519 key and its certificate, mode 600; it stays on this machine
    FILE.pub    the public line, for the islands.keys of all islands

Only this command needs the package `cryptography`: connections use the standard library's TLS.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shoal.base.errors import ConfigError

if TYPE_CHECKING:
    from shoal.wire.member_keys import PublicKey

FILE = typer.Argument(
    Path("island.key"), metavar="[FILE]", help="The private key; the public line: FILE.pub."
)
SHOW = typer.Option(False, "--show", help="Print the public line of a key that exists.")
LABEL = typer.Option("", "--label", help="Words after the public line; default: this host's name.")
BORN, EXPIRES = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""No clock decides whether a key counts: the list of keys does."""


def key(file: Path = FILE, show: bool = SHOW, label: str = LABEL) -> None:
    """Make an island's key: a private file, and a public line for the other islands.

    islands.key=FILE is this island's own; islands.keys=LIST holds the public lines of all islands
    that may join. Connections between islands are then encrypted, and both sides prove their keys.
    """
    if show:
        from shoal.wire.member_keys import PublicKey, read_own_key

        typer.echo(PublicKey(read_own_key(file).certificate, _clean(label)).line)
        return
    made = make_key(file, _clean(label) or socket.gethostname())
    typer.echo(f"{file}: the private key (mode 600); it stays on this machine", err=True)
    typer.echo(
        f"{file}.pub: the public line, for islands.pub with the lines of all islands; then: shoal "
        f"train … islands.key={file} islands.keys=islands.pub",
        err=True,
    )
    typer.echo(made.line)


def make_key(file: Path, label: str) -> PublicKey:
    """Make a key pair in FILE and FILE.pub; return its public part.

    Raises:
        ConfigError: one of the files exists or cannot be written, or `cryptography` is missing.
    """
    from shoal.wire.member_keys import PublicKey

    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            "shoal islands key: needs cryptography, which is not installed; try: pip install "
            "'shoal[keys]' (a machine that only uses a key does not need it)"
        )
    public_file = file.with_name(f"{file.name}.pub")
    for one in (file, public_file):
        if one.exists():
            raise ConfigError(
                f"{one}: exists, and a key that others may know is not overwritten; try: shoal "
                f"islands key {file.with_stem(f'{file.stem}-2')}, or shoal islands key {file} "
                f"--show"
            )
    private, certificate = _generate()
    made = PublicKey(certificate, label)
    _write(file, private, 0o600)
    _write(public_file, f"{made.line}\n".encode(), 0o644)
    return made


def _generate() -> tuple[bytes, bytes]:
    """Return a private key with its certificate (PEM), and the certificate (DER)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    private = Ed25519PrivateKey.generate()
    raw = private.public_key().public_bytes_raw()
    # Its own name for each key: a TLS library looks certificates up by their names.
    common_name = hashlib.sha256(raw).hexdigest()[:32]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(BORN)
        .not_valid_after(EXPIRES)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(private, None)
    )
    pem = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    pem += certificate.public_bytes(serialization.Encoding.PEM)
    return pem, certificate.public_bytes(serialization.Encoding.DER)


def _write(file: Path, data: bytes, mode: int) -> None:
    """Write a new file of a mode.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(data)
    except OSError as failure:
        raise ConfigError(f"{file}: {failure.strerror}; try: shoal islands key OTHER_FILE") from (
            failure
        )


def _clean(label: str) -> str:
    """Return a label that is one line."""
    return " ".join(label.split())
