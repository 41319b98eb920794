"""Memory of which the towers of a host have one copy.

[Note: one copy, and what a script writes] Parameters that several towers share must not be written to by all of them: a
script's ``p.data.mul_(0.9)`` would count once for each tower. So a tower maps the memory twice. Inner optimizers update
the shared mapping. The model's parameters are in a mapping of copy-on-write pages. Those show the updates, and a page
that the script writes to becomes this tower's own. All towers write the same (rule R1), so at the next step one tower's
pages become the shared ones, and all towers drop theirs. A script sees no difference. The kernel reports which pages
are a tower's own. Querying it takes some 6 µs per MB, and 15 before Linux 6.7. Pages with the same content as the
shared ones are not a change: a single tower may evaluate other weights and then restore these.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from fcntl import ioctl

import numpy as np
import torch
from torch import Tensor

from towers.collectives.communicator import Communicator
from towers.collectives.shared_memory.segment import Segment
from towers.errors import MirrorError
from towers.mirroring.fingerprint import fingerprints
from towers.system.memory_layout import view_like

_IN_MEMORY, _OF_FILE = 0b110, 0b001  # of the three highest bits of a page's entry: present, swapped out; not private

# PAGEMAP_SCAN and its argument, struct pm_scan_arg (Linux, Documentation/admin-guide/mm/pagemap.rst).
_SCAN, _SCAN_ARGUMENT = 0xC0606610, struct.Struct("12Q")
_IS_FILE, _IS_PRESENT_OR_SWAPPED = 0b100, 0b11000


class SingleCopy:
    """One tower's mappings of the memory, which keep no file open.

    Args:
        path: of an open file.
        nbytes: its size.

    Raises:
        RuntimeError: it cannot be mapped.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        self._shared = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        self._view = torch.from_file(path, shared=False, size=nbytes, dtype=torch.uint8)

    def shared(self, like: Tensor, offset: int) -> Tensor:
        """Returns the memory from byte ``offset`` on, in the shape, strides and dtype of ``like``.

        All towers see updates.
        """
        return _tensor(self._shared, like, offset)

    def view(self, like: Tensor, offset: int) -> Tensor:
        """Returns the same for reading, with its own storage. Data that this tower writes there become its own."""
        return _tensor(self._view, like, offset)

    def is_changed(self) -> bool:
        """Returns whether this tower has written other values than the shared ones."""
        if not self._has_own_pages():
            return False
        changed = not torch.equal(self._view.view(torch.int64), self._shared.view(torch.int64))
        if not changed:
            self.drop_own()
        return changed

    def fingerprint(self) -> int:
        """Returns a fingerprint of the memory, as this tower sees it."""
        return int(fingerprints([self._view]))

    def _has_own_pages(self) -> bool:
        """Returns whether the kernel reports own pages, or reports nothing."""
        start, nbytes = self._view.data_ptr(), self._view.nbytes
        with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb", buffering=0) as pages:
            region = (ctypes.c_uint64 * 3)()
            first_page = (start, start + nbytes, 0, ctypes.addressof(region), 1, 1)
            not_of_file = (_IS_FILE, _IS_FILE, _IS_PRESENT_OR_SWAPPED, _IS_PRESENT_OR_SWAPPED)
            with contextlib.suppress(OSError):  # raised by older kernels
                question = _SCAN_ARGUMENT.pack(_SCAN_ARGUMENT.size, 0, *first_page, *not_of_file)
                return bool(ioctl(pages, _SCAN, bytearray(question)))
            count = nbytes // mmap.PAGESIZE
            entries = np.frombuffer(os.pread(pages.fileno(), 8 * count, 8 * (start // mmap.PAGESIZE)), np.uint64)
            bits = entries >> np.uint64(61)
            return bool(((bits & _IN_MEMORY != 0) & (bits & _OF_FILE == 0)).any())
        return True

    def publish(self) -> None:
        """Makes this tower's own pages the shared ones."""
        self._shared.copy_(self._view)

    def drop_own(self) -> None:
        """Drops this tower's own pages, so that it sees the shared ones again."""
        memory = ctypes.c_void_p(self._view.data_ptr()), ctypes.c_size_t(self._view.nbytes)
        if ctypes.CDLL(None).madvise(*memory, mmap.MADV_DONTNEED) != 0:  # the memory is locked (mlockall)
            self._view.copy_(self._shared)


def _tensor(memory: Tensor, like: Tensor, offset: int) -> Tensor:
    dtype = like.dtype.to_real() if like.is_complex() else like.dtype
    flat = torch.frombuffer(memory.numpy(), dtype=dtype, count=like.nbytes // dtype.itemsize, offset=offset)
    return view_like(like, flat)


def give_back_freed_memory() -> None:
    """Returns memory to the kernel that this process has freed, and kept (:func:`machine.keep_freed_memory`)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def allocate(host: Communicator, nbytes: int) -> SingleCopy:
    """Allocates zeros, once for all towers, which are processes of one host. All of them call it.

    Raises:
        MirrorError: on all towers: the memory is not available.
    """
    segment, path, copy, problem = None, "", None, ""
    if host.index == 0:
        try:
            segment = Segment.create(nbytes, reserve=True)
            path = f"/proc/{os.getpid()}/fd/{segment.file}"
        except OSError as error:
            problem = str(error)
    path = host.all_gather_bytes(path.encode())[0].decode()
    if path:
        try:
            copy = SingleCopy(path, os.stat(path).st_size)
        except (OSError, RuntimeError) as error:
            problem = str(error)
    problems = [reply.decode() for reply in host.all_gather_bytes(problem.encode())]  # all have tried to map it
    if segment is not None:
        segment.close_file()
    if copy is None or any(problems):
        raise MirrorError(
            f"{nbytes / 1e6:.3g} MB of parameters cannot be allocated in the host's memory: "
            f"{next(filter(None, problems))}. Give the job more memory (in a container: more of its limit)"
        )
    return copy
