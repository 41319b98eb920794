"""Keys of a communicator's memory (:meth:`Communicator.allocate`).

[Note: keys are used again, one layout later] Shared memory has places for 4,096 keys, and a script that mirrors a copy
of its model in every step would use them up. Buckets are laid out anew after a collective only, so a tower that makes
the next layout knows that all towers have let go of what the last one released.
"""

from __future__ import annotations

from towers.collectives.communicator import Communicator


class Keys:
    """Gives out keys; towers that ask for keys in the same order get the same.

    Args:
        channel: whose memory they are of. Nothing else allocates there.
    """

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel
        self._next = 0
        self._free: list[int] = []
        self._released: list[int] = []

    def new(self) -> int:
        """Give out a key that nothing else has."""
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def release(self, key: int) -> None:
        """Take back a key under which nothing is reduced any more."""
        self._channel.release(key)
        self._released.append(key)

    def recycle(self) -> None:
        """Let released keys be given out again: all towers have made a collective since.

        See [Note: keys are used again, one layout later].
        """
        self._free += self._released
        self._released = []
