"""Parts of messages: names of towers, addresses, and untrusted text that is safe to print."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence


def name_towers(towers: Sequence[int]) -> str:
    """Returns ``tower 2``, or ``towers 0, 1 and 3``."""
    if len(towers) == 1:
        return f"tower {towers[0]}"
    return f"towers {', '.join(map(str, towers[:-1]))} and {towers[-1]}"


def printable(text: object, longest: int = 4000) -> str:
    """Returns untrusted text as one line of at most ``longest`` characters, none of which moves a terminal's cursor."""
    if not isinstance(text, str):
        return "?"
    shown = text[:longest]
    return shown if shown.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in shown)


def split_address(address: str) -> tuple[str, int]:
    """Converts ``"host:port"`` or ``"[IPv6]:port"`` to (host, port)."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Converts (host, port) to ``"host:port"`` or ``"[IPv6]:port"``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def canonical_address(address: str) -> str:
    """Returns one spelling for all spellings of an address: upper case, a final dot, zeros of IPv6, ``localhost``."""
    host, port = split_address(address)
    host = host.lower().removesuffix(".")
    if host == "localhost":
        host = "127.0.0.1"
    with contextlib.suppress(ValueError):
        host = ipaddress.ip_address(host).compressed
    return join_address(host, port)
