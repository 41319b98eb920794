"""Keepalive connections between agents. They detect an agent's end at once, and an unreachable host after a deadline.

[Note: keepalive connections] Keepalive connections are the agents' failure detector: torch's store does not report
which of its clients have left. So each worker's agent also connects to a port of the chief's agent, and sends the name
that its signed messages use for that connection. When an agent ends, for any reason, its system closes the connection,
and the other end detects that. A chief that ends with the job sends a goodbye first. No other data is sent.

[Note: hosts that do not answer] The systems at both ends check every second whether the connection still exists (TCP's
keepalive). No process takes part in that: a host whose processes are stopped, or wait for a core, answers at once, too.
A host that has not answered for as long as a collective may take cannot be reached, and its peer's system closes the
connection (Linux). If a firewall prevents the connection, agents wait for the deadlines of their towers.
"""

from __future__ import annotations

import contextlib
import socket
import uuid

_NAME_BYTES, _MOST = 32, 65_536
_CONNECT_SECONDS = 2.0
_LEAST_SECONDS = 2.0  # the shortest accepted time without an answer
_GOODBYE = b"."

_ENDED, _UNREACHABLE = "has ended", "cannot be reached: its host, or the network, does not answer"


class KeepaliveServer:
    """The chief's ends of the keepalive connections.

    Args:
        listener: the socket that workers connect to.
        seconds: the time without an answer after which a host counts as unreachable.
    """

    def __init__(self, listener: socket.socket, seconds: float) -> None:
        listener.setblocking(False)
        _keep_alive(listener, seconds)  # also applies to the connections that it accepts
        self._listener = listener
        self._names: dict[socket.socket, bytes] = {}  # as far as they have arrived
        self._lost: dict[str, str] = {}

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return int(self._listener.getsockname()[1])

    def lost(self) -> dict[str, str]:
        """Returns the names of the connections whose other end is gone, with the reason as part of a sentence."""
        with contextlib.suppress(OSError):
            while len(self._names) < _MOST:
                line, _ = self._listener.accept()
                line.setblocking(False)
                self._names[line] = b""
        for line in list(self._names):
            data, end = _receive(line)
            self._names[line] = (self._names[line] + data)[:_NAME_BYTES]
            if end:
                self._lost[self._names.pop(line).decode(errors="replace")] = end
                line.close()
        return self._lost

    def say_goodbye(self) -> None:
        """Reports to all workers that this agent ends with the job, so that its end does not count as a failure."""
        for line in self._names:
            with contextlib.suppress(OSError):
                line.send(_GOODBYE)


class KeepaliveConnection:
    """A worker's end of a keepalive connection to the chief, if the chief can be reached.

    Attributes:
        name: the connection's name, which no other process can guess.
        port: see below.
        has_ended: whether the chief has sent a goodbye.

    Args:
        host, port: the address at which the chief's agent listens for it.
        seconds: see :class:`KeepaliveServer`.
    """

    def __init__(self, host: str, port: int, seconds: float) -> None:
        self.name, self.port, self.has_ended = uuid.uuid4().hex, port, False
        self._line: socket.socket | None = None
        with contextlib.suppress(OSError):
            line = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
            line.sendall(self.name.encode())
            line.setblocking(False)
            _keep_alive(line, seconds)
            self._line = line

    def lost(self) -> str:
        """Returns the state of the chief's agent as part of a sentence, or an empty string if the agent is not lost."""
        data, end = (b"", "") if self._line is None else _receive(self._line)
        if data:
            self._line, self.has_ended = None, True
        return end


def _keep_alive(line: socket.socket, seconds: float) -> None:
    """Lets the system close a connection whose other end has not answered for ``seconds``, or up to a second more.

    The count starts with the last answer, up to a second before the first unanswered check.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = round(1000 * min(max(seconds, _LEAST_SECONDS) + 0.5, 1e6))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _receive(line: socket.socket) -> tuple[bytes, str]:
    """Returns the received data and the reason why the other end is gone, which is empty if it exists."""
    try:
        data = line.recv(_NAME_BYTES)
    except BlockingIOError:
        return b"", ""
    except ConnectionError:
        return b"", _ENDED
    except OSError:
        return b"", _UNREACHABLE
    return data, "" if data else _ENDED
