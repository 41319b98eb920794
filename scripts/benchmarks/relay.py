"""A program that is the cables of hosts: it takes their packets, and hands each on after a delay.

Many kernels come without netem, which would delay packets by itself. Each host's device is a TUN of this program, which
gets packets of up to 64 KB there, as network adapters do that cut them up themselves. So 1 Gbit/s in both directions
takes it some tenths of a core. It ends with its standard input.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

TUN = "/dev/net/tun"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_FLAGS = 0x0001 | 0x1000 | 0x4000  # IFF_TUN, IFF_NO_PI, IFF_VNET_HDR
_OFFLOADS = 0x01 | 0x02  # checksums; large TCP packets
_HEADER = 10  # bytes in front of each packet: struct virtio_net_hdr
_LARGEST = 2**16 + _HEADER


def start(delay: float, namespaces: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the program; returns when each of ``namespaces`` has a device ``eth0``.

    Args:
        delay: ms.
    """
    process = subprocess.Popen(
        [sys.executable, __file__, str(delay), *namespaces], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _open(namespace: str, number: int) -> int:
    """Make a TUN and move it to a namespace; returns its file."""
    file, name = os.open(TUN, os.O_RDWR | os.O_NONBLOCK), f"tun{os.getpid()}-{number}"
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _FLAGS))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _OFFLOADS)
    subprocess.run(["ip", "link", "set", name, "netns", namespace, "name", "eth0", "txqueuelen", "10000"], check=True)
    return file


def main() -> None:
    delay, namespaces = float(sys.argv[1]) * 1e-3, sys.argv[2:]
    files = [_open(namespace, number) for number, namespace in enumerate(namespaces)]
    with contextlib.suppress(OSError):  # a packet that is due goes before what computes
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever has started it closes its input then
    print("ready", flush=True)
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([0, *files], [], [], pause)
        if 0 in ready:
            return
        now = time.monotonic()
        for file in ready:
            packet = os.read(file, _LARGEST)
            number = packet[_HEADER + 19] - 1  # the last byte of an IPv4 packet's receiver
            if packet[_HEADER] >> 4 == 4 and number < len(files):
                waiting.append((now + delay, files[number], packet))
        while waiting and waiting[0][0] <= now:
            _, file, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # the host is going away
                os.write(file, packet)


if __name__ == "__main__":
    main()
