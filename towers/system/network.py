"""Which network interface towers listen on: the one they need, and no other."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
from collections.abc import Mapping, Sequence

from towers.system import machine

_GLOO = "GLOO_SOCKET_IFNAME"
_NCCL = "NCCL_SOCKET_IFNAME"


def keep_to_loopback() -> None:
    """Let Gloo and NCCL of this process, and of those it starts, listen where only this machine reaches them."""
    keep_to(machine.loopback_interface())


def keep_to(interface: str) -> None:
    """Let Gloo and NCCL listen on ``interface`` alone, unless the user named another.

    Left alone, Gloo takes the address of this machine's name, which on some systems is a loopback address that
    other machines cannot reach, and on others one that the outside can; NCCL takes the first that looks good.
    """
    os.environ.update(variables(interface, os.environ))


def variables(interface: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are missing in ``environ`` for keeping to ``interface``."""
    wanted = {_GLOO: interface}
    if not _nccl_is_configured(environ):
        wanted[_NCCL] = f"={interface}"  # without the sign it would be the beginning of a name
    return {name: value for name, value in wanted.items() if name not in environ}


def own_address(others: Sequence[str]) -> str | None:
    """This machine's address on the way to all of ``others`` (host names); None when there is not exactly one."""
    found = {machine.address_towards(host, 1) for host in others}
    return found.pop() if len(found) == 1 else None


def split_address(address: str) -> tuple[str, int]:
    """``"host:port"`` or ``"[IPv6]:port"`` → (host, port)."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def canonical(address: str) -> str:
    """One spelling for all spellings of an address: upper case, a final dot, zeros of IPv6, ``localhost``."""
    host, port = split_address(address)
    host = host.lower().removesuffix(".")
    if host == "localhost":
        host = "127.0.0.1"
    with contextlib.suppress(ValueError):
        host = ipaddress.ip_address(host).compressed
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _nccl_is_configured(environ: Mapping[str, str]) -> bool:
    """Whether a file of the user's or the machine's tells NCCL its interface, which a variable would override."""
    files = [environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf"]
    for file in files:
        try:
            if _NCCL in pathlib.Path(file).read_text(errors="replace"):
                return True
        except OSError:  # there is no such file
            continue
    return False
