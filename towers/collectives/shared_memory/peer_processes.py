"""Watches the processes of the other towers of one host, and detects their end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import weakref
from collections.abc import Mapping


class PeerProcesses:
    """Watches processes. If the system has pidfds, it uses these, because a process id may be given to another process.

    Args:
        processes: process id of every other tower, by its index.
    """

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._processes = dict(processes)
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        for tower, process in processes.items():
            with contextlib.suppress(OSError, AttributeError):  # an old kernel, or a container that forbids it
                descriptor = os.pidfd_open(process)
                self._watched[descriptor] = tower
                self._poll.register(descriptor, select.POLLIN)
        self._close = weakref.finalize(self, _close, list(self._watched))

    def gone(self) -> list[int]:
        """Returns the towers whose processes have ended."""
        ended = {self._watched[descriptor] for descriptor, _ in self._poll.poll(0)}
        unwatched = set(self._processes) - set(self._watched.values())
        return sorted(ended | {tower for tower in unwatched if not os.path.exists(f"/proc/{self._processes[tower]}")})

    def wake(self, tower: int) -> None:
        """Continues a stopped tower (SIGCONT), because a stopped tower would not detect the end of the others."""
        for descriptor, watched in self._watched.items():
            if watched == tower:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)

    def close(self) -> None:
        """Stops watching."""
        self._close()
        self._watched = {}
        self._poll = select.poll()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
