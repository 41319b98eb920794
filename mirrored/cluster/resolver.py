"""The common interface of all descriptions of a cluster, and what those of launchers read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from towers.topology import Topology

_MOST = 1_000_000  # towers: more than anybody has; each of them keeps a list of all


class ClusterError(ValueError):
    """A cluster's description is wrong. The message names where it was read, the field and the fix."""


class ClusterResolver:
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


class LocalClusterResolver(ClusterResolver):
    """A cluster of one worker, with as many towers as it has devices."""

    def __init__(self, origin: str = "this machine") -> None:
        self.origin = origin


class Numbers(dict[str, int]):
    """The whole numbers in a launcher's variables, by name, and checks of what has been read.

    Args:
        environ: the variables.
        origin: what they are called in messages.

    Raises:
        ClusterError: by every method, with the names and values of what is wrong.
    """

    def __init__(self, environ: Mapping[str, str], origin: str) -> None:
        super().__init__()
        self._environ, self._origin = environ, origin

    def read(self, *names: str) -> None:
        """Read variables that must hold whole numbers from 0; all that are missing are named at once."""
        missing = [name for name in names if not self._environ.get(name)]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise self.error(f"{', '.join(missing)} {verb} not set; a launcher sets all of {', '.join(names)}")
        for name in names:
            text = self._environ[name].strip()
            if not re.fullmatch("[0-9]{1,18}", text):
                raise self.error(f"{name}={self._environ[name]!r} is not a whole number from 0")
            self[name] = int(text)

    def optional(self, name: str, default: int = 0) -> int:
        """One such variable that may be absent or empty."""
        if self._environ.get(name):
            self.read(name)
        return self.setdefault(name, default)

    def check_port(self, name: str) -> None:
        """Check that a port is from 1 to 65535."""
        if not 1 <= self[name] <= 65535:
            raise self.error(f"{name} is {self[name]}; ports go from 1 to 65535")

    def check_index(self, index: str, size: str) -> None:
        """Check that an index lies below its size, which is neither 0 nor absurd."""
        if not 1 <= self[size] <= _MOST:
            raise self.error(f"{size} is {self[size]}, but must be from 1 to {_MOST}")
        if self[index] >= self[size]:
            raise self.error(
                f"{index} is {self[index]}, but {size} is {self[size]}: it goes from 0 to {self[size] - 1}"
            )

    def check_at_most(self, number: str, limit: str) -> None:
        """Check that ``number`` is not above ``limit``."""
        if self[number] > self[limit]:
            raise self.error(f"{number} is {self[number]}, but {limit} is only {self[limit]}")

    def error(self, text: str) -> ClusterError:
        """``text`` as an error that says where the variables come from."""
        return ClusterError(f"{self._origin}: {text}")
