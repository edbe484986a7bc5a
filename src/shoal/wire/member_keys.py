"""Keys of islands that come and go: who may join, and connections that nobody else can read.

    islands.key     this island's own file: its private Ed25519 key and its certificate, mode 600
    islands.keys    files with a public line for each island that may join, as in authorized_keys:
                    shoal-island FINGERPRINT CERTIFICATE LABEL
    connection      TLS 1.3 with a certificate on both sides: ephemeral keys, so that a key that is
                    stolen later opens no recorded connection

A certificate is only a container of a public key: it signs itself, names nobody and does not
expire. It counts if it is one of the lines, byte for byte. The files are read again while the
run lasts (`refresh`). An island's number belongs to the key that proves itself first, until the
line of that key is taken out.

The name of the sender and the fingerprint of its key are readable in the first message of a
connection (server name indication), so that the refusing side can name them.

Source: TLS 1.3, RFC 8446; Ed25519, RFC 8032; lines as of sshd's authorized_keys
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
import re
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.layouts.changing_members import name_member
from shoal.wire.encrypted_socket import (
    AlteredConnectionError,
    EncryptedSocket,
    KeyRefusedError,
    OwnKeyRefusedError,
    accepts_tls,
    is_plain,
    is_refusal,
)

WORD = "shoal-island"
"""First word of a public line."""
MAKE = "shoal islands key"
REFRESH_S = 1.0
MOST_BYTES = 1 << 20
PRIVATE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\s*", re.S)
NAMELESS = "its key is not in"
"""Words of a refusal whose fingerprint this side does not know."""
CLAIM = re.compile(r"island-(\d{1,6})\.([0-9a-f]{16})")
NO_KEY = "0" * 16
"""Fingerprint in the claim of an island that has no key."""


def fingerprint(certificate: bytes) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a certificate (DER)."""
    return hashlib.sha256(certificate).hexdigest()[:16]


@dataclass(frozen=True)
class PublicKey:
    """Public key of an island, in its certificate.

    Attributes:
        certificate: X.509, DER.
        label: for people; it counts for nothing.
    """

    certificate: bytes
    label: str = ""

    @property
    def fingerprint(self) -> str:
        """Digits that people compare."""
        return fingerprint(self.certificate)

    @property
    def line(self) -> str:
        """Public line for the files of islands.keys."""
        text = base64.b64encode(self.certificate).decode()
        return " ".join(filter(None, (WORD, self.fingerprint, text, self.label)))


def parse_public_lines(text: str, where: str) -> list[PublicKey]:
    """Return the keys of public lines; empty lines and those that begin with # are skipped.

    Raises:
        ConfigError: a line is damaged or no public line; `where` names the file.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        at = f"{where}, line {number}"
        if PRIVATE.search(line):
            raise ConfigError(
                f"{at}: a private key, which must not leave its machine; try: the file beside it "
                f"that ends in .pub"
            )
        words = line.split(maxsplit=3)
        if words[0] != WORD or len(words) < 3:
            raise ConfigError(
                f"{at}: no public line of an island: {line[:40]!r}; try: the line of the .pub file "
                f"that `{MAKE}` wrote"
            )
        with contextlib.suppress(binascii.Error):
            key = PublicKey(base64.b64decode(words[2], validate=True), " ".join(words[3:]))
            if key.fingerprint == words[1]:
                found.append(key)
                continue
        raise ConfigError(
            f"{at}: a damaged line: its key is not the one of fingerprint {words[1]}; try: copy "
            f"the line of that island's .pub file again"
        )
    return found


def read_own_key(path: Path) -> PublicKey:
    """Return the public part of a private key file.

    Raises:
        ConfigError: the file is missing or damaged, or others may read it.
    """
    where = f"islands.key = {path}"
    text = _read(path, where, f"{MAKE} {path}", secret=True)
    found = CERTIFICATE.search(text)
    if not found or not PRIVATE.search(text):
        is_public = text.startswith(WORD)
        is_named_so = is_public and path.suffix == ".pub"
        near = f"islands.key={path.with_suffix('')}" if is_named_so else f"{MAKE} OTHER_FILE"
        what = "a public line" if is_public else "no private key and certificate of an island"
        raise ConfigError(f"{where}: {what}; try: {near}")
    try:
        certificate = ssl.PEM_cert_to_DER_cert(found[0])
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(path, password="")
    except (ssl.SSLError, ValueError, OSError) as failure:
        raise ConfigError(
            f"{where}: the file is damaged ({failure}); try: a copy of it, or {MAKE} OTHER_FILE "
            f"and its public line for the other islands"
        ) from failure
    return PublicKey(certificate)


def read_public_keys(paths: Sequence[Path]) -> dict[bytes, PublicKey]:
    """Return the keys that may join, by certificate.

    Raises:
        ConfigError: a file is missing or damaged, or a key stands twice.
    """
    found: dict[bytes, PublicKey] = {}
    places: dict[bytes, Path] = {}
    for path in paths:
        where = f"islands.keys = {path}"
        text = _read(path, where, "the public lines of all islands in one file")
        for key in parse_public_lines(text, where):
            if key.certificate in found:
                raise ConfigError(
                    f"{where}: the key {key.fingerprint} stands there twice, or in "
                    f"{places[key.certificate]} too; try: a key of its own for each island ({MAKE})"
                )
            found[key.certificate], places[key.certificate] = key, path
    if not found:
        raise ConfigError(
            f"islands.keys = {_join(paths)}: no key in it; try: the public lines of all islands"
        )
    _make_context(ssl.PROTOCOL_TLS_CLIENT, found, _join(paths))
    return found


class MemberKeys:
    """Own key of an island, and the keys that may join; one object serves all its connections.

    Args:
        name: this island's number.
        own: file of islands.key.
        listed: files of islands.keys.
        tell: called with one line on each change of the list.

    Attributes:
        known_to: islands that listed this one's key before: it took part with them.

    Raises:
        ConfigError: one of the files cannot be used.
    """

    def __init__(
        self, name: int, own: Path, listed: Sequence[Path], tell: Callable[[str], None]
    ) -> None:
        self.name, self._path, self._listed, self._tell = name, own, tuple(listed), tell
        self.own = read_own_key(own)
        self.where = _join(listed)
        self._lock = threading.Lock()
        self._holders: dict[int, bytes] = {}
        self._removed: set[str] = set()
        self.known_to: set[int] = set()
        self._used = self._seen = self._stamps()
        self._next_s = 0.0
        self._install(read_public_keys(self._listed))

    @property
    def count(self) -> int:
        """Number of keys that may join."""
        return len(self._allowed)

    def allows(self, certificate: bytes) -> bool:
        """Return whether a certificate is one of those that may join."""
        return certificate in self._allowed

    def is_removed(self, name: int) -> bool:
        """Return whether the key of a member was taken out of the list."""
        held = self._holders.get(name)
        return held is not None and held not in self._allowed

    def find_problem(self, name: int, certificate: bytes) -> str:
        """Return why a key may not take part as member `name`; "" if it may."""
        shown = fingerprint(certificate)
        if not self.allows(certificate):
            return self._describe_unknown(name_member(name), shown)
        with self._lock:
            held = {**self._holders, self.name: self.own.certificate}
            same = [other for other, one in held.items() if one == certificate and other != name]
            if same:
                one, other = map(name_member, sorted((same[0], name)))
                return (
                    f"{one} and {other} have the same key {shown}; try: {MAKE} on one of them, "
                    f"and its public line for all"
                )
            before = held.get(name, certificate)
            if before != certificate and (name == self.name or self.allows(before)):
                return (
                    f"two keys are {name_member(name)}: {fingerprint(before)}, known before, and "
                    f"{shown}; try: if the machine of the first is gone, take its line out of "
                    f"{self.where} on every other island; else another islands.index"
                )
            self._holders[name] = certificate
        return ""

    def connect(self, connection: Any, name: int, at: str) -> EncryptedSocket:
        """Encrypt a connection to member `name`, and authenticate both sides.

        Args:
            connection: a connected socket; its timeout limits each step.
            at: address of the member, for error texts.

        Raises:
            KeyRefusedError: one side refuses the key of the other one.
        """
        claim = f"island-{self.name}.{self.own.fingerprint}"
        held = fingerprint(self._holders[name]) if self.is_removed(name) else ""
        tls = self._client.wrap_socket(
            connection, server_hostname=claim, do_handshake_on_connect=False
        )
        found = EncryptedSocket(
            tls,
            lambda certificate: self.find_problem(name, certificate),
            lambda failure, greets: self._explain(failure, greets, name, at, held),
        )
        try:
            found.authenticate()
        except BaseException:
            found.close()
            raise
        return found

    def accept(self, connection: Any, host: str, report: Callable[[str], None]) -> EncryptedSocket:
        """Encrypt a connection that another member opened; its first use authenticates.

        Args:
            connection: an accepted socket that does not block.
            host: of the other side, for error texts.
            report: called with a line if an allowed key is not that of the member that it claims
                to be; the answer to its first message refuses it then.
        """
        tls = self._server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

        def find_claim() -> re.Match[str] | None:
            return CLAIM.fullmatch(getattr(tls, "claim", None) or "")

        def check(certificate: bytes) -> str:
            claim = find_claim()
            if not self.allows(certificate) or claim is None:
                return self._describe_unknown(f"somebody at {host}", fingerprint(certificate))
            if problem := self.find_problem(int(claim[1]), certificate):
                report(problem)
            return ""

        def explain(failure: ssl.SSLError, greets: bool) -> OSError:
            claim = find_claim()
            name, shown = (int(claim[1]), claim[2]) if claim else (None, "")
            return self._explain(failure, greets, name, host, shown)

        return EncryptedSocket(tls, check, explain)

    def refresh(self) -> bool:
        """Read changed files of islands.keys again, once a second at most; return if one counts.

        A file counts when it stays the same for one more look: an editor may be at work. A damaged
        file leaves the keys as they are.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + REFRESH_S
        stamps, before = self._stamps(), self._seen
        self._seen = stamps
        if stamps != before or stamps == self._used:
            return False
        self._used = stamps
        try:
            found = read_public_keys(self._listed)
        except ConfigError as problem:
            self._tell(f"{problem}; the keys stay as they were")
            return False
        gone, new = self._allowed.keys() - found.keys(), found.keys() - self._allowed.keys()
        named = {**self._allowed, **found}
        for sign, which in (("may join", new), ("is taken out", gone)):
            for certificate in sorted(which):
                key = named[certificate]
                label = f" ({key.label})" if key.label else ""
                self._tell(f"islands.keys = {self.where}: {key.fingerprint}{label} {sign}")
        self._removed -= {fingerprint(certificate) for certificate in new}
        self._removed |= {fingerprint(certificate) for certificate in gone}
        self._install(found)
        return bool(gone or new)

    def _install(self, found: dict[bytes, PublicKey]) -> None:
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = _make_context(protocol, found, self.where)
            context.load_cert_chain(self._path, password="")
            contexts.append(context)
        self._client, self._server = contexts
        self._server.num_tickets = 0  # no resumption: every connection proves both keys
        self._server.sni_callback = _note_claim
        self._allowed = found

    def _explain(
        self, failure: ssl.SSLError, greets: bool, name: int | None, at: str, shown: str
    ) -> OSError:
        """Return the error, with its line, of a connection that TLS ended."""
        whom = f"{'somebody' if name is None else name_member(name)} at {at}"
        if isinstance(failure, ssl.SSLCertVerificationError):
            return KeyRefusedError(self._describe_unknown(whom, shown))
        if is_refusal(failure):
            own = self.own.fingerprint
            people = "the people there" if name is None else f"the people of {name_member(name)}"
            line = f"the line of {self._path}.pub to the file of islands.keys ({self.where} here)"
            if name in self.known_to:
                return OwnKeyRefusedError(
                    f"{whom} took this island's key {own} out of its list: this island is shut "
                    f"out there; try: ask {people}; if it was a mistake, they add "
                    f"{line}"
                )
            return OwnKeyRefusedError(
                f"{whom} refuses this island's key {own}, which is not in its list; try: send "
                f"{self._path}.pub to {people}, who add {line}"
            )
        if (greets and is_plain(failure)) or failure.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return KeyRefusedError(
                f"{whom} has no key; try: islands.key and islands.keys on all islands"
            )
        return AlteredConnectionError(
            f"{whom}: bytes of it were altered on the way ({failure.reason or failure}); they do "
            f"not count, and the connection is made anew"
        )

    def _describe_unknown(self, whom: str, shown: str) -> str:
        if shown in self._removed:
            return (
                f"{whom} is shut out: its key {shown} was taken out of {self.where} "
                f"(islands.keys); its line there lets it in again"
            )
        key = f"its key {shown} is not in" if shown else NAMELESS
        return (
            f"{whom} was refused: {key} {self.where} (islands.keys); try: if you know it, add the "
            f"line of its .pub file there"
        )

    def _stamps(self) -> tuple[tuple[int, ...], ...]:
        """Return what changes when one of the listed files does."""
        found = list[tuple[int, ...]]()
        for path in self._listed:
            try:
                facts = path.stat()
                found.append((facts.st_mtime_ns, facts.st_size, facts.st_ino))
            except OSError:
                found.append(())
        return tuple(found)


def open_member_keys(
    key: str, keys: str, index: int, tell: Callable[[str], None]
) -> MemberKeys | None:
    """Return the keys of an island's settings; None if it has none.

    Args:
        key: islands.key; {index} in it stands for the island's number.
        keys: islands.keys: paths with commas between.

    Raises:
        ConfigError: one of the files cannot be used, or one of the two settings lacks.
    """
    if not key and not keys:
        return None
    if not keys:
        raise ConfigError(
            f"islands.key = {key}: and no islands.keys, so nobody may join; try: "
            f"islands.keys=FILE, with the public lines of all islands"
        )
    if not key:
        raise ConfigError(
            f"islands.keys = {keys}: and no islands.key, so nothing would be encrypted; try: "
            f"`{MAKE} FILE`, and islands.key=FILE"
        )
    own = Path(key.replace("{index}", str(index)))
    return MemberKeys(index, own, [Path(path) for path in keys.split(",")], tell)


def refuse_without_key(own: int, name: int, connection: socket.socket, at: str) -> None:
    """Raise an error if member `name` encrypts, and so refuses this one, which has no key.

    The other side reports a connection without a key, and by its claim whose.

    Args:
        own: this member's number · connection: a new one, which is closed · at: its address.

    Raises:
        OwnKeyRefusedError: it encrypts.
    """
    if accepts_tls(connection, f"island-{own}.{NO_KEY}"):
        whom = name_member(name)
        raise OwnKeyRefusedError(
            f"{whom} at {at} refuses this island, which has no key: connections there are "
            f"encrypted; try: {MAKE} island.key, and send island.key.pub to the people of {whom}, "
            f"who add its line to the file of islands.keys and send you that file; then "
            f"islands.key=island.key islands.keys=islands.pub here"
        )


def _note_claim(tls: Any, claim: str | None, context: ssl.SSLContext) -> None:
    """Keep the name that a client gives itself, for the line that refuses it."""
    tls.claim = claim


def _make_context(protocol: Any, listed: dict[bytes, PublicKey], where: str) -> ssl.SSLContext:
    """Return a TLS context that takes the listed certificates and no others."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # a certificate names nobody: it must be one of the list
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for key in listed.values():
        try:
            context.load_verify_locations(cadata=key.certificate)
        except (ssl.SSLError, ValueError) as failure:
            raise ConfigError(
                f"islands.keys = {where}: the key {key.fingerprint} is no certificate; try: the "
                f"line of the .pub file that `{MAKE}` wrote"
            ) from failure
    return context


def _join(paths: Sequence[Path]) -> str:
    return ",".join(map(str, paths))


def _read(path: Path, where: str, near: str, *, secret: bool = False) -> str:
    """Return the text of a key file.

    Raises:
        ConfigError: it is missing or no text, or others may read a secret one.
    """
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            text = file.read(MOST_BYTES)
    except FileNotFoundError as failure:
        folder = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(f"{where}: no such file{folder}; try: {near}") from failure
    except (OSError, ValueError) as failure:
        raise ConfigError(f"{where}: {failure}; try: {near}") from failure
    others = found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if secret and os.name == "posix" and (others or found.st_uid not in (0, os.geteuid())):
        raise ConfigError(
            f"{where}: others may read it (mode {found.st_mode & 0o777:o}, owner {found.st_uid}); "
            f"try: chmod 600 {path}"
        )
    return text
