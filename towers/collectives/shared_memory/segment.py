"""Memory that the processes of one host share.

[Note: shared memory without a name]
It comes from ``memfd_create`` and is opened by others as ``/proc/<process>/fd/<number>``. It has no name in any file
system: nothing has to be unlinked, a job that is killed at any moment leaves nothing behind, and the size of /dev/shm
(64 MB in many containers) does not matter. That a process can open it is the evidence that it runs on this host.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; everything in a segment begins at a multiple of it."""


class Segment:
    """A mapped piece of shared memory. It is unmapped when no tensor of it is left.

    Attributes:
        nbytes: its size.
        file: number of the open file that others can map it by; -1 where this process is one of the others.
    """

    def __init__(self, file: int, nbytes: int, *, own: bool) -> None:
        self.nbytes = nbytes
        self.file = file if own else -1
        self._close = weakref.finalize(self, os.close, file) if own else None
        self._map = mmap.mmap(file, nbytes)

    @classmethod
    def create(cls, nbytes: int, *, reserve: bool) -> Segment:
        """Allocate ``nbytes`` (rounded up to whole pages) of zeros.

        Args:
            reserve: take all of the memory now, not page by page where it is first touched.

        Raises:
            OSError: the memory is not there, or the system has no such files.
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
        """Map the segment of another process.

        Raises:
            OSError: there is none, or this process may not open it: the other one runs on another host, in another
                container, or as another user.
        """
        descriptor = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, os.fstat(descriptor).st_size, own=False)
        finally:
            os.close(descriptor)

    @property
    def address(self) -> int:
        """Where it begins in this process's memory."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def tensor(self, dtype: torch.dtype, numel: int, offset: int = 0) -> Tensor:
        """A flat tensor in the segment's memory, from byte ``offset`` on."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def memory(self, nbytes: int, offset: int) -> memoryview:
        """``nbytes`` of the segment, from byte ``offset`` on."""
        return memoryview(self._map)[offset : offset + nbytes]

    def close_file(self) -> None:
        """Close the file: no other process can map the segment any more; those that have mapped it keep it."""
        if self._close is not None:
            self._close()
            self.file = -1


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
