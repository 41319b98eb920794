"""Moves the memory of the process that imports this module to huge pages, if the kernel is Linux 6.1 or newer.

The fork server of the tests imports it last. A fork copies the page table, and the fork server uses 400 MB. With pages
of 2 MB, a fork and its end take 22 ms of a core instead of 62. The tests fork thousands of towers.
"""

import ctypes
import re

_COLLAPSE = 25  # MADV_COLLAPSE
_SIZE = 2 << 20

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
with open("/proc/self/maps", encoding="utf-8") as _file:
    _writable = re.findall(r"^(\w+)-(\w+) rw-p \w+ \S+ 0 +(?:\[heap\])?$", _file.read(), re.MULTILINE)
for _first, _end in _writable:
    for _address in range(-(-int(_first, 16) // _SIZE) * _SIZE, int(_end, 16) - _SIZE + 1, _SIZE):
        _libc.madvise(_address, _SIZE, _COLLAPSE)  # this fails for a range without pages
