"""``TF_CONFIG``: is it right, and does its cluster fit this machine and network?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mirrored.cluster import ClusterError, TFConfigClusterResolver
from mirrored.doctor import addresses
from mirrored.doctor.finding import Finding, note, ok, problem, warning
from towers.system.machine import loopback_interface

_SUBJECT = "TF_CONFIG"


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Its grammar, its addresses, and the chief's port."""
    text = environ.get("TF_CONFIG")
    if text is None:
        yield ok(_SUBJECT, "is not set")
        return
    if not text.strip():
        yield note(_SUBJECT, "is set but empty: taken as unset")
        return
    try:
        cluster = TFConfigClusterResolver(environ)
    except ClusterError as error:
        yield problem(_SUBJECT, str(error), "correct it, or unset it if it is left over from another job")
        return
    if cluster.workers == 1:
        yield note(_SUBJECT, f"this is the {cluster.task_type} of a cluster of one")
        return
    own, chief = cluster.addresses[cluster.worker], cluster.addresses[0]
    yield ok(
        _SUBJECT,
        f"worker {cluster.worker} of {cluster.workers} ({cluster.task_type} {cluster.task_id}) at {own}, the chief at "
        f"{chief}; for MultiWorkerMirroredStrategy only",
    )
    found = addresses.resolve([_split(address)[0] for address in cluster.addresses])
    unknown = [
        f"{at} ({answer.strerror or answer})"
        for at, answer in zip(cluster.addresses, found, strict=True)
        if isinstance(answer, OSError)
    ]
    if unknown:
        yield problem(
            _SUBJECT,
            f"{len(unknown)} of {len(found)} addresses do not resolve here: {', '.join(unknown[:8])}",
            "correct the names, or let /etc/hosts or the name server know them; in Kubernetes a pod's name is there "
            "when its service is",
        )
    yield from _places(cluster, found, environ)
    if isinstance(found[0], OSError):
        return
    host, port = _split(chief)
    if cluster.worker == 0:
        yield addresses.check_can_serve("chief's port", host, port, "TF_CONFIG")
    else:
        yield addresses.check_can_reach("chief", host, port, "TF_CONFIG")


def _places(
    cluster: TFConfigClusterResolver, found: list[list[str] | OSError], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether this worker's address is this machine's, and whether the workers can see each other's."""
    own, mine = found[cluster.worker], cluster.addresses[cluster.worker]
    if not isinstance(own, OSError) and not any(addresses.is_own(address) for address in own):
        yield warning(
            _SUBJECT,
            f"this worker's address, {mine}, belongs to no interface of this machine",
            "see that task.index is this machine's; a service's address in front of it is right",
        )
    known = [answer for answer in found if not isinstance(answer, OSError)]
    local = [all(addresses.is_loopback(address) for address in answer) for answer in known]
    if isinstance(found[0], OSError) or all(local):
        return
    if cluster.worker != 0 and local[0]:
        yield problem(
            _SUBJECT,
            f"the chief's address, {cluster.addresses[0]}, leads here to this machine itself, but other workers are "
            "elsewhere",
            "name the chief by an address that leads to it from all workers (see /etc/hosts)",
        )
    if environ.get("GLOO_SOCKET_IFNAME") == loopback_interface():
        yield problem(
            "GLOO_SOCKET_IFNAME",
            "is the loopback interface, by which the other workers of TF_CONFIG cannot be reached",
            "unset it: towers find the interface that leads to the chief",
        )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
