"""Keys of a communicator's memory (:meth:`Communicator.allocate`).

[Note: keys are used again, one layout later] Shared memory has places for 4,096 keys, and a script that mirrors a copy
of its model in every step would use them up. Buckets are only laid out again after a collective. So when a tower makes
the next layout, all towers have released the keys that the previous layout released.
"""

from __future__ import annotations

from towers.collectives.communicator import Communicator


class Keys:
    """Assigns keys. Towers that request keys in the same order get the same keys.

    Args:
        channel: the owner of the memory. No other code allocates there.
    """

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel
        self._next = 0
        self._free: list[int] = []
        self._released: list[int] = []

    def new(self) -> int:
        """Returns an unused key."""
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def release(self, key: int) -> None:
        """Takes back a key under which no memory is reduced any more."""
        self._channel.release(key)
        self._released.append(key)

    def recycle(self) -> None:
        """Makes released keys available again. All towers have run a collective since their release.

        See [Note: keys are used again, one layout later].
        """
        self._free += self._released
        self._released = []
