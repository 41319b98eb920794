"""The store where the processes of a job meet: serving it, and its signed messages.

A message is a JSON object with an HMAC signature over it and its key, made with the job's token. The token itself is
never sent.

[Note: unauthenticated peers] Any process can write to a store, so its contents do not prove which job it belongs to.
The process that serves it therefore signs :data:`OWNER` first (under torchrun: the first process that joins). Every
process that opens the store checks that signature before it writes anything, and leaves if it was made with another
token. (The store of a process group that the script has formed is not checked.) A message without this job's signature
counts as absent: it takes no place, ends no job and reaches no parser but JSON's. A signed message that lacks a field
ends the job with an error that names its process. If no token was given, the signature is only a checksum.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from towers.errors import HandshakeError, PortInUseError, StartupError
from towers.system import machine
from towers.system.messages import join_address, printable

Message = dict[str, Any]

LARGEST = 2**20
"""Bytes of the longest message that is read. A message of 10,000 workers lists their addresses in half of it."""

OWNER = "towers/owner"
"""The key that the serving process signs; see [Note: unauthenticated peers]."""

TIMEOUT = timedelta(minutes=10)
"""The time for a store to answer."""

_NOTHING = "\0"  # no message
_ATTEMPTS = 20  # to publish a message under a key that others keep writing to


class NotAMessageError(ValueError):
    """A value in a store is not a message of this software. The error's message contains the reason."""


class OtherJobError(NotAMessageError):
    """The value is a message, but it was signed with another token, or for another key."""


def new_nonce() -> str:
    """Returns a text that no other message contains."""
    return secrets.token_urlsafe(12)


def sign(token: str, key: str, message: Message) -> str:
    """Returns ``message`` as it is stored under ``key``, with a nonce if it has none yet, and its HMAC signature."""
    text = json.dumps({"nonce": new_nonce(), **message}, separators=(",", ":"))
    return json.dumps({"message": text, "signature": _hmac(token, key, text)}, separators=(",", ":"))


def verify(token: str, key: str, data: bytes) -> Message:
    """Returns the message that :func:`sign` has made for ``key``, with its nonce.

    Raises:
        OtherJobError: it was signed with another token, or for another key.
        NotAMessageError: ``data`` is anything else.
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
    except (ValueError, RecursionError):  # not JSON, not UTF-8, numbers of thousands of digits, thousands of brackets
        raise NotAMessageError(f"{len(text)} bytes that are not JSON") from None
    if not isinstance(value, dict):
        raise NotAMessageError("JSON that is not an object")
    return value


def _hmac(token: str, key: str, text: str) -> str:
    signature = hmac.new(os.fsencode(token), json.dumps([key, text]).encode(), hashlib.sha256).hexdigest()
    return signature[:32]  # 128 bits, as RFC 4868 truncates it


class SignedStore:
    """The messages of one job in a store.

    Args:
        store: torch's store.
        token: the job's.

    Attributes:
        rejected: by key, why the stored value is not a message of this job.
    """

    def __init__(self, store: Store, token: str) -> None:
        self.store = store
        self._token = token
        self.rejected: dict[str, str] = {}

    def write(self, key: str, message: Message) -> None:
        """Stores ``message`` under ``key``, and replaces any previous value."""
        self.store.set(key, sign(self._token, key, message))

    def write_all(self, messages: Mapping[str, Message]) -> None:
        """Stores messages under their keys, in one request if the store can."""
        signed = {key: sign(self._token, key, message) for key, message in messages.items()}
        if signed and self.store.has_extended_api():  # type: ignore[attr-defined]
            self.store.multi_set(list(signed), list(signed.values()))  # type: ignore[attr-defined]
        else:
            for key, text in signed.items():
                self.store.set(key, text)

    def read(self, key: str) -> Message | None:
        """Returns the message under ``key``, or None if there is none of this job, with one request."""
        # A comparison with a value that is not stored returns the value that is (get and check need three requests).
        data = self.store.compare_set(key, _NOTHING, _NOTHING)
        return None if data == _NOTHING.encode() else self._verified(key, data)

    def read_all(self, keys: list[str]) -> list[Message | None]:
        """Returns the result of :meth:`read` for each of ``keys``, in one request; empty while one is not stored."""
        if not keys or not self.store.check(keys):
            return []
        return [self._verified(key, data) for key, data in zip(keys, self.store.multi_get(keys), strict=True)]

    def _verified(self, key: str, data: bytes) -> Message | None:
        try:
            return verify(self._token, key, data)
        except NotAMessageError as error:
            self.rejected[key] = str(error)
            return None

    def connect_again(self, prefix: str, timeout: timedelta) -> SignedStore:
        """Returns the same store through a new connection, for another thread. All keys start with ``prefix``."""
        store = self.store.clone()  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return SignedStore(PrefixStore(prefix, store), self._token)

    def add(self, key: str, number: int) -> int:
        """Adds to the count under ``key``, which is not signed, and returns the sum."""
        return self.store.add(key, number)

    def publish(self, key: str, message: Message, *, refuse_other_jobs: bool = False) -> Message:
        """Stores ``message`` under ``key`` unless it has a message of this job, and returns the one that is then there.

        Args:
            message: contains a nonce, by which the caller recognises its own message.
            refuse_other_jobs: whether to leave another job's message there.

        Raises:
            OtherJobError: another job's message was left there.
            HandshakeError: another process keeps writing to this key.
        """
        text = sign(self._token, key, message)
        expected: str | bytes = ""
        for _ in range(_ATTEMPTS):
            stored = self.store.compare_set(key, expected, text)  # type: ignore[arg-type]  # accepts bytes, too
            try:
                return verify(self._token, key, stored)
            except NotAMessageError as error:
                if refuse_other_jobs and isinstance(error, OtherJobError):
                    raise
                expected = "" if stored == expected else stored  # equal: the value existed, and has been removed
        raise HandshakeError(f"an unauthenticated peer keeps writing to {key} in the store where this job meets")


def serve_store(host: str, port: int, origin: str, token: str, others: Sequence[str] = ()) -> TCPStore:
    """Starts the store at ``host:port`` (port 0: any free one). If possible, it listens on that address only.

    Args:
        token: the job's; processes with another token are refused.
        others: hosts from which other processes will connect. They determine the address to listen on if ``host`` is a
            name that resolves differently here and there.

    Returns:
        The store. This machine's own processes reach it at its ``host`` and ``port``.

    Raises:
        PortInUseError, StartupError: see :func:`listen`.
    """
    listener, host = listen(host, port, origin, others)
    port = listener.getsockname()[1]
    # The store receives the socket by number and closes it, so the Python object must detach it.
    store = TCPStore(host, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())
    SignedStore(store, token).write(OWNER, {"host": socket.gethostname()})
    return store


def listen(host: str, port: int, origin: str, others: Sequence[str] = ()) -> tuple[socket.socket, str]:
    """Returns a socket that listens where other processes expect the chief, and the host for this machine's own use.

    Args:
        others: see :func:`serve_store`.

    Raises:
        PortInUseError: another process listens there already.
        StartupError: ``host`` cannot be resolved, or the address cannot be used.
    """
    at = join_address(host, port)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: not a possible name
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
    """Listens on ``address``, or on an equivalent address; see :func:`listen`."""
    has_ipv6 = family == socket.AF_INET6
    serve = functools.partial(socket.create_server, family=family, backlog=1024, dualstack_ipv6=has_ipv6)
    # The machine's own name, which Debian's /etc/hosts maps to loopback; for others it has another address.
    own_name = ipaddress.ip_address(address[0]).is_loopback and host not in ("localhost", address[0])
    towards = machine.own_address(others) if own_name else None
    if not own_name or (towards and ipaddress.ip_address(towards).is_loopback):
        try:
            return serve(address), host
        except OSError as error:
            # The name may resolve to an address of no interface here (a service address in front of this machine).
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            towards = machine.own_address(others)
    if towards and (":" in towards) == has_ipv6:
        return serve((towards, address[1])), towards
    return serve(("::" if has_ipv6 else "0.0.0.0", address[1])), host
