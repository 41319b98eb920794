"""The common interface of all descriptions of a cluster."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping

from towers.topology import Topology

_MOST = 1_000_000  # towers: more than anybody has; whoever comes keeps a list of all


class ClusterError(ValueError):
    """A cluster's description is wrong. The message names where it was read, the field and the fix."""


class ClusterResolver(ABC):
    """Knows the workers of a cluster and which of them this process belongs to.

    Attributes:
        origin: where it was read from, for messages and the log.
        task_type: "chief", "worker" or "evaluator".
        task_id: index among the tasks of that type.
        workers: number of workers (machines) that train together.
        worker: this one's index among them.
        addresses: ``host:port`` of each worker where that is known, else empty.
        topology: this tower's place where a launcher has started the towers already, else None.
    """

    origin: str
    task_type: str = "worker"
    task_id: int = 0
    worker: int = 0
    workers: int = 1
    addresses: tuple[str, ...] = ()
    topology: Topology | None = None

    def cluster_spec(self) -> dict[str, list[str]]:
        """Job names and the addresses of their tasks, as in TensorFlow; empty where addresses are unknown."""
        return {"worker": list(self.addresses)} if self.addresses else {}


def read_whole_numbers(environ: Mapping[str, str], names: list[str], origin: str) -> dict[str, int]:
    """Read environment variables that must hold whole numbers from 0.

    Raises:
        ClusterError: names every variable that is missing, or the first that holds something else.
    """
    missing = [name for name in names if not environ.get(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ClusterError(f"{origin}: {', '.join(missing)} {verb} not set; a launcher sets all of {', '.join(names)}")
    numbers = {}
    for name in names:
        text = environ[name].strip()
        if not re.fullmatch("[0-9]{1,18}", text):
            raise ClusterError(f"{origin}: {name}={environ[name]!r} is not a whole number from 0")
        numbers[name] = int(text)
    return numbers


def read_optional(environ: Mapping[str, str], name: str, origin: str, default: int = 0) -> int:
    """One such variable that may be absent or empty.

    Raises:
        ClusterError: it holds something else than a whole number from 0.
    """
    return read_whole_numbers(environ, [name], origin)[name] if environ.get(name) else default


def check_port(name: str, port: int, origin: str) -> None:
    """See that a port is one.

    Raises:
        ClusterError: it is not.
    """
    if not 1 <= port <= 65535:
        raise ClusterError(f"{origin}: {name} is {port}; ports go from 1 to 65535")


def check_index(index_name: str, index: int, size_name: str, size: int, origin: str) -> None:
    """See that an index lies below its size.

    Raises:
        ClusterError: it does not, or the size is 0 or absurd.
    """
    if not 1 <= size <= _MOST:
        raise ClusterError(f"{origin}: {size_name} is {size}, but must be from 1 to {_MOST}")
    if index >= size:
        raise ClusterError(
            f"{origin}: {index_name} is {index}, but {size_name} is {size}: it goes from 0 to {size - 1}"
        )


def check_at_most(part_name: str, part: int, size_name: str, size: int, origin: str) -> None:
    """See that there are not more of one than of the other.

    Raises:
        ClusterError: there are.
    """
    if part > size:
        raise ClusterError(f"{origin}: {part_name} is {part}, but {size_name} is only {size}")
