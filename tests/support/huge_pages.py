"""The fork server of the tests loads this last: it moves its memory to huge pages, where Linux 6.1 or newer has them.

It has 400 MB, and a fork copies an entry of the page table for each page. With pages of 2 MB, a fork and its end take
22 ms of a core, not 62; the tests fork thousands of towers.
"""

import ctypes
import gc
import re

_COLLAPSE = 25  # MADV_COLLAPSE
_SIZE = 2 << 20

gc.freeze()
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
with open("/proc/self/maps", encoding="utf-8") as _file:
    _writable = re.findall(r"^(\w+)-(\w+) rw-p \w+ \S+ 0 +(?:\[heap\])?$", _file.read(), re.MULTILINE)
for _first, _end in _writable:
    for _address in range(-(-int(_first, 16) // _SIZE) * _SIZE, int(_end, 16) - _SIZE + 1, _SIZE):
        _libc.madvise(_address, _SIZE, _COLLAPSE)  # fails where nothing is in use
