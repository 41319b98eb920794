"""Connections that tell agents at once which other agent has ended, and soon whose host does not answer.

[Note: lifelines] They are the agents' failure detector: torch's store does not know which of its clients have left. So
each worker's agent also connects to a port of the chief's agent, and sends the name by which its signed messages call
that connection. When an agent ends, however that happens, its system closes the connection, and the other end misses
it. A chief that ends with the job says goodbye first. Nothing else is sent.

[Note: hosts that do not answer] The systems at both ends ask each other every second whether the connection is still
there (TCP's keepalive). No process takes part in that: also a host whose processes are stopped, or wait for a core,
answers at once. One that has not answered for as long as a collective may take cannot be reached, and its system closes
the connection (Linux). Where a firewall leaves no connection, agents wait for the deadlines of their towers.
"""

from __future__ import annotations

import contextlib
import socket
import uuid

_NAME_BYTES, _MOST = 32, 65_536
_CONNECT_SECONDS = 2.0
_LEAST_SECONDS = 2.0  # without an answer
_GOODBYE = b"."

_ENDED, _UNREACHABLE = "has ended", "cannot be reached: its host, or the network, does not answer"


class Lifelines:
    """The chief's ends of them.

    Args:
        listener: the socket that workers connect to.
        seconds: how long a host may leave the question unanswered whether it is there.
    """

    def __init__(self, listener: socket.socket, seconds: float) -> None:
        listener.setblocking(False)
        _keep_alive(listener, seconds)  # and all that it accepts
        self._listener = listener
        self._names: dict[socket.socket, bytes] = {}  # as far as they have come
        self._lost: dict[str, str] = {}

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def lost(self) -> dict[str, str]:
        """The names of those whose other end is gone, with what has become of it, as part of a sentence."""
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
        """This agent ends with the job, so it is not to be missed."""
        for line in self._names:
            with contextlib.suppress(OSError):
                line.send(_GOODBYE)


class Lifeline:
    """A worker's end of a lifeline to the chief, if the chief can be reached there.

    Attributes:
        name: of the lifeline, which nobody else can guess.
        port: see below.
        has_ended: whether the chief has said goodbye.

    Args:
        host, port: where the chief's agent listens for it.
        seconds: see :class:`Lifelines`.
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
        """What has become of the chief's agent, as part of a sentence; empty where it is not missed."""
        data, end = (b"", "") if self._line is None else _receive(self._line)
        if data:
            self._line, self.has_ended = None, True
        return end


def _keep_alive(line: socket.socket, seconds: float) -> None:
    """Let the system close a connection when its other end has not answered for so many seconds, a second more at most.

    The count begins with the last answer, up to a second before the first question that has none.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = round(1000 * min(max(seconds, _LEAST_SECONDS) + 0.5, 1e6))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _receive(line: socket.socket) -> tuple[bytes, str]:
    """What has come, and what has become of the other end; empty where it is there."""
    try:
        data = line.recv(_NAME_BYTES)
    except BlockingIOError:
        return b"", ""
    except ConnectionError:
        return b"", _ENDED
    except OSError:
        return b"", _UNREACHABLE
    return data, "" if data else _ENDED
