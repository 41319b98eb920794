"""The network interfaces, and the variables that name some of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mirrored.doctor.finding import Finding, ok, problem, warning
from towers.system import devices, machine

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Those that there are, and those that Gloo and NCCL are told to use."""
    found = machine.interfaces()
    listed = ", ".join(f"{name} {address}" if address else f"{name} (no IPv4)" for name, address in found.items())
    yield ok("interfaces", listed or "none")
    if named := environ.get(_GLOO):
        yield _gloo(named.split(","), found)
    if named := environ.get(_NCCL):
        yield _nccl(named, found)


def _gloo(wanted: Sequence[str], found: Mapping[str, str | None]) -> Finding:
    """Gloo takes whole names and fails on one that is not there."""
    missing = [name for name in wanted if name not in found]
    if missing:
        fix = f"unset {_GLOO} (towers choose by themselves), or name one of {', '.join(found)}"
        return problem(_GLOO, f"names {', '.join(map(repr, missing))}, which this machine does not have", fix)
    return _usable(_GLOO, wanted, found)


def _nccl(named: str, found: Mapping[str, str | None]) -> Finding:
    """NCCL takes beginnings of names; behind ``=`` whole names, behind ``^`` those that it is to leave out."""
    words = named.lstrip("^").lstrip("=").split(",")
    exact, without = "=" in named[:2], named.startswith("^")

    def fits(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    chosen = [name for name in found if fits(name) != without]
    if not chosen:
        fix = f"unset {_NCCL}, or name one of {', '.join(found)}"
        severe = problem if devices.count_gpus() > 1 else warning
        return severe(_NCCL, f"is {named!r}, which leaves none of this machine's interfaces", fix)
    return _usable(_NCCL, chosen, found)


def _usable(variable: str, chosen: Sequence[str], found: Mapping[str, str | None]) -> Finding:
    what = f"chooses {', '.join(chosen)}"
    if not any(found[name] for name in chosen):
        return warning(variable, f"{what}, without an IPv4 address", f"unset {variable}, or name one with an address")
    if set(chosen) == {machine.loopback_interface()}:
        return warning(
            variable,
            f"{what}: other machines cannot be reached through it",
            f"unset {variable}, unless all towers run on this machine",
        )
    return ok(variable, what)
