"""The sockets on which the processes of a running program listen, as the kernel's tables tell."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
import re
import struct


def listening(process: int) -> list[tuple[str, int]]:
    """(address, port) of each TCP or UDP socket on which one process can be reached."""
    mine, found = _sockets(process), []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in pathlib.Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if rest[5] in mine and (state == "0A" or table.startswith("udp")):
                words, port = local.split(":")
                packed = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
                found.append((str(ipaddress.ip_address(packed)), int(port, 16)))
    return found


def unix_sockets(processes: list[int]) -> list[pathlib.Path]:
    """The paths of the Unix sockets on which processes listen; one in the abstract name space begins with ``@``."""
    mine = set[str]().union(*map(_sockets, processes))
    table = [line.split() for line in pathlib.Path(f"/proc/{processes[0]}/net/unix").read_text().splitlines()[1:]]
    accepts = 0x10000
    return [pathlib.Path(row[7]) for row in table if len(row) == 8 and row[6] in mine and int(row[3], 16) & accepts]


def _sockets(process: int) -> set[str]:
    found = set()
    for path in pathlib.Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path)):
                found.add(match[1])
    return found
