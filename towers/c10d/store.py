"""A group of peers that communicate through a c10d store, in which ranks agree on a way to communicate."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from towers.collectives.communicator import PeerGroup
from towers.errors import StartupError


class StorePeerGroup(PeerGroup):
    """Towers that send each other bytes through a store. Every call is a round with one key per tower.

    Keys are deleted again. When a tower has read all keys of a round, all towers have read the keys of the previous
    round, so it deletes its own key of that round. The last tower that closes deletes the keys of the last round. So
    the store can serve another group after all towers have closed this one.

    Args:
        store: used by this group only.
        seconds: the time to wait for the others.
    """

    def __init__(self, store: dist.Store, index: int, size: int, seconds: float) -> None:
        self.index, self.size, self.device = index, size, torch.device("cpu")
        self._store = store
        self._seconds = seconds
        self._round = 0

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every tower's ``data``, in tower order; lengths may differ.

        Raises:
            StartupError: not all towers joined before the deadline; the message lists the missing ones.
        """
        names = [self._name(tower) for tower in range(self.size)]
        self._store.set(names[self.index], data)  # type: ignore[arg-type]  # bytes, according to the documentation
        try:
            self._store.wait(names, timedelta(seconds=self._seconds))
        except RuntimeError:
            missing = [str(tower) for tower, name in enumerate(names) if not self._store.check([name])]
            if not missing:
                raise
            raise StartupError(
                f"rank {self.index} waited {self._seconds:.0f} s for rank {', '.join(missing)} of {self.size} to form "
                "a group"
            ) from None
        gathered = [bytes(self._store.get(name)) for name in names]
        if self._round:
            self._store.delete_key(self._name(self.index, self._round - 1))
        self._round += 1
        return gathered

    def _name(self, tower: int, turn: int | None = None) -> str:
        return f"towers/{self._round if turn is None else turn}/{tower}"

    def close(self) -> None:
        """Leaves. The last tower that does so deletes the keys of the last round."""
        if self._round and self._store.add("towers/left", 1) == self.size:
            for tower in range(self.size):
                self._store.delete_key(self._name(tower, self._round - 1))
            self._store.delete_key("towers/left")
