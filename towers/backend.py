"""Shared memory as a backend of ``torch.distributed``, for DDP and other code that communicates through it.

Importing this module registers the backend. torch 2.14 and later find it without the import::

    import torch.distributed as dist
    import towers.backend

    dist.init_process_group("towers_shm")  # tensors on the CPU
    dist.init_process_group("cpu:towers_shm,cuda:nccl")  # those on GPUs through NCCL

All ranks of a group must be processes of one host. See ``docs/advanced/c10d-backend.md``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from towers.c10d.shared_group import SharedMemoryGroup
from towers.collectives.communicator import PeerGroup
from towers.collectives.shared_memory.communicator import SEVERAL_HOSTS, join
from towers.errors import ArgumentError, StartupError

NAME = "towers_shm"
"""The name of the backend."""


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


def register() -> None:
    """Registers :data:`NAME` with ``torch.distributed``. Further calls do nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(common: Any, options: Any) -> SharedMemoryGroup:
    """Creates a group. c10d calls it on all ranks of the group."""
    if options is not None:
        raise ArgumentError(f"the backend {NAME} takes no options, but pg_options is {type(options).__name__}")
    timeout: timedelta = common.timeout
    seconds = timeout.total_seconds()
    base = StorePeerGroup(dist.PrefixStore("form", common.store), common.group_rank, common.group_size, seconds)
    try:
        comm = join(base, seconds)
    finally:
        base.close()
    if isinstance(comm, str):
        advice = "; use gloo" if comm == SEVERAL_HOSTS else ""
        raise StartupError(f"the ranks of a group cannot share memory ({comm}), as the backend {NAME} does{advice}")
    ranks = list(common.global_ranks_in_group) or list(range(common.group_size))
    return SharedMemoryGroup(NAME, comm, ranks, common.store, seconds)


register()
