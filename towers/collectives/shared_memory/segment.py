"""Memory that the processes of one host share.

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
import weakref

import torch
from torch import Tensor

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
