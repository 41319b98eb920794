"""Connections that tell the chief's agent at once which worker's agent has ended.

[Note: lifelines] They are the agents' failure detector: torch's store does not know which of its clients have left. So
each worker's agent also connects to a port of the chief's agent, and sends the name by which its signed messages call
that connection; nothing else is sent. When the agent ends, however that happens, its system closes the connection.
Where a firewall or a host that is gone leaves none to close, the chief waits for the deadline.
"""

from __future__ import annotations

import contextlib
import socket

_NAME_BYTES, _MOST = 32, 65_536
_CONNECT_SECONDS = 2.0


class Lifelines:
    """The chief's ends of them.

    Args:
        listener: the socket that workers connect to.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._names: dict[socket.socket, bytes] = {}  # as far as they have come
        self._closed: set[str] = set()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def closed(self) -> set[str]:
        """The names of those whose other end was closed."""
        with contextlib.suppress(OSError):
            while len(self._names) < _MOST:
                line, _ = self._listener.accept()
                line.setblocking(False)
                self._names[line] = b""
        for line in list(self._names):
            with contextlib.suppress(BlockingIOError):
                data = b""
                with contextlib.suppress(ConnectionError, TimeoutError):
                    data = line.recv(_NAME_BYTES)
                self._names[line] = (self._names[line] + data)[:_NAME_BYTES]
                if not data:
                    self._closed.add(self._names.pop(line).decode(errors="replace"))
                    line.close()
        return self._closed


def connect_lifeline(host: str, port: int, name: str) -> socket.socket | None:
    """A worker's end of a lifeline to the chief; None where the chief cannot be reached there.

    Args:
        name: letters and digits, which nobody else can guess.
    """
    try:
        line = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        line.sendall(name.encode())
    except OSError:
        return None
    return line
