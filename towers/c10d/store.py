"""A group of peers through a c10d store, in which ranks agree on a way to communicate."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from towers.collectives.communicator import PeerGroup
from towers.errors import StartupError


class StorePeerGroup(PeerGroup):
    """Towers that tell each other bytes through a store: every call is a round of one key for each tower.

    Keys are deleted again: a tower that has read all keys of a round knows that all have read those of the round
    before, and the last tower that closes deletes those of the last round. So the store can serve another group when
    all have closed this one.

    Args:
        store: used by this group alone.
        seconds: how long to wait for the others.
    """

    def __init__(self, store: dist.Store, index: int, size: int, seconds: float) -> None:
        self.index, self.size, self.device = index, size, torch.device("cpu")
        self._store = store
        self._seconds = seconds
        self._round = 0

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every tower's ``data``, in tower order; lengths may differ.

        Raises:
            StartupError: not all towers came before the deadline; lists the missing.
        """
        names = [self._name(tower) for tower in range(self.size)]
        self._store.set(names[self.index], data)  # type: ignore[arg-type]  # bytes, says the documentation
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
        """Leave; the last tower that does so deletes the keys of the last round."""
        if self._round and self._store.add("towers/left", 1) == self.size:
            for tower in range(self.size):
                self._store.delete_key(self._name(tower, self._round - 1))
            self._store.delete_key("towers/left")
