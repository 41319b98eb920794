"""Memory that the processes of one host share: every tower of the host maps every other tower's.

[Note: shared memory without a name]
The memory is created with ``memfd_create``, and other processes open it as ``/proc/<process>/fd/<number>``. It has no
name in any file system. So no file has to be unlinked, and a job that is killed at any moment leaves no files behind.
The size of /dev/shm (64 MB in many containers) does not matter. A process that can open the memory runs on this host.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import weakref
from typing import Any

import torch
from torch import Tensor

from towers.collectives.communicator import PeerGroup, from_bytes
from towers.collectives.shared_memory import semaphores

_TOKEN = 16  # bytes

ALIGNMENT = 64
"""Bytes; every part of a segment starts at a multiple of it."""


class Segment:
    """A mapped piece of shared memory. It is unmapped when it has no more tensors.

    Attributes:
        nbytes: its size.
        file: the number of the open file through which other processes can map it; -1 if this process is one of them.
    """

    def __init__(self, file: int, nbytes: int, *, own: bool) -> None:
        self.nbytes = nbytes
        self.file = file if own else -1
        self._close = weakref.finalize(self, os.close, file) if own else None
        self._map = mmap.mmap(file, nbytes)

    @classmethod
    def create(cls, nbytes: int, *, reserve: bool) -> Segment:
        """Allocates ``nbytes`` (rounded up to whole pages) of zeros.

        Args:
            reserve: whether to take all of the memory now, instead of each page when it is first touched.

        Raises:
            OSError: the memory is not available, or the system has no such files.
        """
        nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memfd_create")
        file = os.memfd_create("towers", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, nbytes)
            if reserve:
                os.posix_fallocate(file, 0, nbytes)
        except OSError:
            os.close(file)
            raise
        return cls(file, nbytes, own=True)

    @classmethod
    def open(cls, process: int, file: int) -> Segment:
        """Maps the segment of another process.

        Raises:
            OSError: there is none, or this process may not open it: the other process runs on another host, in another
                container, or as another user.
        """
        descriptor = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, os.fstat(descriptor).st_size, own=False)
        finally:
            os.close(descriptor)

    @property
    def address(self) -> int:
        """Its start address in this process's memory."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def tensor(self, dtype: torch.dtype, numel: int, offset: int = 0) -> Tensor:
        """Returns a flat tensor in the segment's memory, from byte ``offset`` on."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def memory(self, nbytes: int, offset: int) -> memoryview:
        """Returns ``nbytes`` of the segment, from byte ``offset`` on."""
        return memoryview(self._map)[offset : offset + nbytes]

    def close_file(self) -> None:
        """Closes the file. No further process can map the segment; processes that have mapped it keep it."""
        if self._close is not None:
            self._close()
            self.file = -1


def aligned(nbytes: int) -> int:
    """Returns ``nbytes`` rounded up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def map_segments(comm: PeerGroup, nbytes: int, waiting: int) -> tuple[list[Segment], list[int]]:
    """Returns every tower's segment, and every tower's process id. All towers call it.

    It does not assume that towers run on one host, but tries: each tower maps the others' memory and looks there for a
    token that they have sent.

    Args:
        nbytes: size of a segment, at least.
        waiting: the number of semaphores at the start of a segment.

    Raises:
        OSError: on all towers with one message, if one could not allocate or map them.
    """
    token, at = secrets.token_bytes(_TOKEN), aligned(nbytes)
    offer: dict[str, Any] = {"process": os.getpid(), "token": token.hex()}
    own = None
    try:
        if not semaphores.available():
            raise OSError("this system has no semaphores that processes can share")
        own = Segment.create(at + _TOKEN, reserve=False)
        for number in range(waiting):
            semaphores.create(own.address + semaphores.BYTES * number)
        own.tensor(torch.uint8, _TOKEN, at).copy_(from_bytes(token))
        offer["file"] = own.file
    except OSError as error:
        offer["problem"] = str(error)
    offers = comm.all_gather_json(offer)
    problem = next((f"tower {i}: {other['problem']}" for i, other in enumerate(offers) if "problem" in other), "")
    segments = []
    if own is not None and not problem:
        try:
            segments = [own if tower == comm.index else _open(other, at) for tower, other in enumerate(offers)]
        except OSError as error:
            problem = f"tower {comm.index}: {error}"
    results = [text.decode() for text in comm.all_gather_bytes(problem.encode())]
    if own is not None:
        own.close_file()  # every tower that is able to has mapped it
    if any(results):
        raise OSError(next(filter(None, results)))
    return segments, [other["process"] for other in offers]


def _open(offer: dict[str, Any], at: int) -> Segment:
    segment = Segment.open(offer["process"], offer["file"])
    if segment.nbytes < at + _TOKEN or bytes(segment.memory(_TOKEN, at)).hex() != offer["token"]:
        raise OSError(f"the memory of process {offer['process']} is not there: it runs in another container")
    return segment
