"""The store where the processes of a job meet: serving it, and the signed messages in it.

A message is a JSON object with an HMAC signature over it and the key that it is stored under, made with the job's
token. The token itself is never sent.

[Note: unauthenticated peers] Anybody can write to a store, so which job it belongs to cannot be read off what lies in
it. The process that serves it therefore signs :data:`OWNER` first (under torchrun: the first process that joins). Every
process that opens the store checks that signature before it writes anything, and leaves when it was made with another
token. (The store of a process group that the script has formed is not checked.) A message without this job's signature
counts as absent: it takes no place, ends no job and reaches no parser but JSON's. A signed message that lacks a field
ends the job with an error that names its process. Where nobody gave a token, the signature is only a checksum.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import hmac
import ipaddress
import json
import os
import socket
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from towers.errors import HandshakeError, PortInUseError, StartupError
from towers.system import machine
from towers.system.text import join_address, printable

Message = dict[str, Any]

LARGEST = 2**20
"""Bytes of the longest message that is read. The messages of 10,000 workers list their addresses in half of it."""

OWNER = "towers/owner"
"""The key that the process which serves a store signs; see [Note: unauthenticated peers]."""

TIMEOUT = timedelta(minutes=10)
"""How long a store may take to answer."""

_ATTEMPTS = 20  # to publish a message under a key that others keep writing to


class NotAMessageError(ValueError):
    """A value in a store is no message of this software. The text says what is wrong with it."""


class OtherJobError(NotAMessageError):
    """It is a message, but it was signed with another token, or for another key."""


def sign(token: str, key: str, message: Message) -> str:
    """``message`` as it is stored under ``key``, with a nonce where it has none yet, and its HMAC signature."""
    text = json.dumps({"nonce": uuid.uuid4().hex, **message})
    return json.dumps({"message": text, "signature": _hmac(token, key, text)})


def verify(token: str, key: str, data: bytes) -> Message:
    """The message that :func:`sign` has made for ``key``, with its nonce.

    Raises:
        OtherJobError: it was signed with another token, or for another key.
        NotAMessageError: it is something else, of whatever kind.
    """
    if len(data) > LARGEST:
        raise NotAMessageError(f"{len(data)} bytes, too many for a message")
    signed = _parse(data)
    text, signature = signed.get("message"), signed.get("signature")
    if not isinstance(text, str) or not isinstance(signature, str):
        raise NotAMessageError("an object without a message and a signature")
    message = _parse(text)
    if not hmac.compare_digest(signature.encode(errors="replace"), _hmac(token, key, text).encode()):
        raise OtherJobError(f"a message of a process on {printable(message.get('host'), 64)} with another job token")
    if "nonce" not in message:
        raise NotAMessageError("a message without a nonce")
    return message


def _parse(text: str | bytes) -> Message:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, numbers of thousands of digits, thousands of brackets
        raise NotAMessageError(f"{len(text)} bytes that are not JSON") from None
    if not isinstance(value, dict):
        raise NotAMessageError("JSON that is not an object")
    return value


def _hmac(token: str, key: str, text: str) -> str:
    return hmac.new(os.fsencode(token), json.dumps([key, text]).encode(), hashlib.sha256).hexdigest()


class SignedStore:
    """The messages of one job in a store.

    Args:
        store: torch's.
        token: the job's.

    Attributes:
        rejected: by key, why what is stored there is no message of this job.
    """

    def __init__(self, store: Store, token: str) -> None:
        self.store = store
        self._token = token
        self.rejected: dict[str, str] = {}

    def write(self, key: str, message: Message) -> None:
        """Store ``message`` under ``key``, in place of whatever is there."""
        self.store.set(key, sign(self._token, key, message))

    def read(self, key: str) -> Message | None:
        """The message under ``key``; None where there is none of this job."""
        return self._verified(key, self.store.get(key)) if self.store.check([key]) else None

    def read_all(self, keys: list[str]) -> list[Message | None]:
        """As :meth:`read` of each of ``keys``, in one request; empty as long as one of them is not in the store."""
        if not self.store.check(keys):
            return []
        return [self._verified(key, data) for key, data in zip(keys, self.store.multi_get(keys), strict=True)]

    def _verified(self, key: str, data: bytes) -> Message | None:
        try:
            return verify(self._token, key, data)
        except NotAMessageError as error:
            self.rejected[key] = str(error)
            return None

    def connect_again(self, prefix: str, timeout: timedelta) -> SignedStore:
        """The same store by a connection of its own, for another thread; all keys begin with ``prefix``."""
        store = self.store.clone()  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return SignedStore(PrefixStore(prefix, store), self._token)

    def add(self, key: str, number: int) -> int:
        """Add to the count under ``key``, which is not signed; returns the sum."""
        return self.store.add(key, number)

    def publish(self, key: str, message: Message, *, refuse_other_jobs: bool = False) -> Message:
        """Store ``message`` under ``key`` unless there is a message of this job, and return the one that is there then.

        Args:
            message: with a nonce, by which the caller tells its own message.
            refuse_other_jobs: leave another job's message there.

        Raises:
            OtherJobError: it was left.
            HandshakeError: somebody keeps writing there.
        """
        text = sign(self._token, key, message)
        expected: str | bytes = ""
        for _ in range(_ATTEMPTS):
            stored = self.store.compare_set(key, expected, text)  # type: ignore[arg-type]  # takes bytes as well
            try:
                return verify(self._token, key, stored)
            except NotAMessageError as error:
                if refuse_other_jobs and isinstance(error, OtherJobError):
                    raise
                expected = "" if stored == expected else stored  # equal: it was there, and is gone
        raise HandshakeError(f"an unauthenticated peer keeps writing to {key} in the store where this job meets")


def serve_store(host: str, port: int, origin: str, token: str, others: Sequence[str] = ()) -> TCPStore:
    """Start the store at ``host:port`` (port 0: any free one), listening on that address only, where possible.

    Args:
        token: the job's; processes with another one are refused.
        others: hosts from which other processes will come. They tell on which address to listen when ``host`` is a name
            that leads elsewhere from here than from there.

    Returns:
        The store; this machine's own processes reach it at its ``host`` and ``port``.

    Raises:
        PortInUseError, StartupError: see :func:`listen`.
    """
    listener, host = listen(host, port, origin, others)
    port = listener.getsockname()[1]
    # The store closes the socket that it is given by number, so the Python object must let go of it.
    store = TCPStore(host, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())
    SignedStore(store, token).write(OWNER, {"host": socket.gethostname()})
    return store


def listen(host: str, port: int, origin: str, others: Sequence[str] = ()) -> tuple[socket.socket, str]:
    """A socket that listens where other processes expect the chief, and the host at which this machine reaches it.

    Args:
        others: see :func:`serve_store`.

    Raises:
        PortInUseError: something listens there already.
        StartupError: ``host`` cannot be resolved, or the address cannot be used.
    """
    at = join_address(host, port)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # the latter for what cannot be a name
        raise StartupError(f"the chief's address {at} (from {origin}) cannot be resolved: {error}") from None
    try:
        return _listen(family, host, address, others)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                errno.EADDRINUSE,
                f"EADDRINUSE: {at} (from {origin}), where the towers must meet, is in use by another process; "
                "end that process (an earlier run, or a second one that claims to be the chief), or name "
                "another port",
            ) from None
        raise StartupError(f"cannot listen on {at} (from {origin}): {error.strerror}") from None


def _listen(family: int, host: str, address: Any, others: Sequence[str]) -> tuple[socket.socket, str]:
    """Listen on ``address``, or on what it stands for; see :func:`listen`."""
    has_ipv6 = family == socket.AF_INET6
    serve = functools.partial(socket.create_server, family=family, backlog=1024, dualstack_ipv6=has_ipv6)
    # The machine's own name, which Debian's /etc/hosts takes to loopback; others know it by another address.
    own_name = ipaddress.ip_address(address[0]).is_loopback and host not in ("localhost", address[0])
    towards = machine.own_address(others) if own_name else None
    if not own_name or (towards and ipaddress.ip_address(towards).is_loopback):
        try:
            return serve(address), host
        except OSError as error:
            # The name may lead to an address that no interface here has (a service address in front of this machine).
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            towards = machine.own_address(others)
    if towards and (":" in towards) == has_ipv6:
        return serve((towards, address[1])), towards
    return serve(("::" if has_ipv6 else "0.0.0.0", address[1])), host
