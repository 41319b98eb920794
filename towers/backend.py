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

import torch.distributed as dist

from towers.c10d.shared_group import SharedMemoryGroup
from towers.c10d.store import StorePeerGroup
from towers.collectives.shared_memory.communicator import SEVERAL_HOSTS, join
from towers.errors import ArgumentError, StartupError

NAME = "towers_shm"
"""The name of the backend."""


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
