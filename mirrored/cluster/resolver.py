"""The common interface of all descriptions of a cluster, and checks for the variables of launchers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from towers.topology import Topology

_MOST = 1_000_000  # towers, far more than any cluster has; each tower keeps a list of all


class ClusterError(ValueError):
    """A cluster's description is wrong. The message names its source, the field and the fix."""


class ClusterResolver:
    """Describes the workers of a cluster and the position of this process among them.

    Attributes:
        origin: the source of the description, for messages and the log.
        task_type: "chief", "worker" or "evaluator".
        task_id: the index among the tasks of that type.
        workers: the number of workers (machines) that train together.
        worker: this worker's index among them.
        addresses: ``host:port`` of each worker if they are known, otherwise empty.
        topology: this tower's position if a launcher has already started the towers, otherwise None.
    """

    origin: str
    task_type: str = "worker"
    task_id: int = 0
    worker: int = 0
    workers: int = 1
    addresses: tuple[str, ...] = ()
    topology: Topology | None = None

    def cluster_spec(self) -> dict[str, list[str]]:
        """Returns job names and the addresses of their tasks, as in TensorFlow. Empty if addresses are unknown."""
        return {"worker": list(self.addresses)} if self.addresses else {}


class LocalClusterResolver(ClusterResolver):
    """A cluster of one worker, with as many towers as it has devices."""

    def __init__(self, origin: str = "this machine") -> None:
        self.origin = origin


class Numbers(dict[str, int]):
    """The whole numbers in a launcher's variables, by name, with checks of these numbers.

    Args:
        environ: the variables.
        origin: the name of the variables in messages.

    Raises:
        ClusterError: by every method, with the names and values of the wrong variables.
    """

    def __init__(self, environ: Mapping[str, str], origin: str) -> None:
        super().__init__()
        self._environ, self._origin = environ, origin

    def read(self, *names: str) -> None:
        """Reads variables that must hold whole numbers from 0. One error names all missing variables."""
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
        """Reads such a variable, which may be absent or empty, and returns its number or the default."""
        if self._environ.get(name):
            self.read(name)
        return self.setdefault(name, default)

    def check_port(self, name: str) -> None:
        """Checks that a port is from 1 to 65535."""
        if not 1 <= self[name] <= 65535:
            raise self.error(f"{name} is {self[name]}; ports go from 1 to 65535")

    def check_index(self, index: str, size: str) -> None:
        """Checks that an index is below its size, and that the size is from 1 to a million."""
        if not 1 <= self[size] <= _MOST:
            raise self.error(f"{size} is {self[size]}, but must be from 1 to {_MOST}")
        if self[index] >= self[size]:
            raise self.error(
                f"{index} is {self[index]}, but {size} is {self[size]}: it goes from 0 to {self[size] - 1}"
            )

    def check_at_most(self, number: str, limit: str) -> None:
        """Checks that ``number`` is not above ``limit``."""
        if self[number] > self[limit]:
            raise self.error(f"{number} is {self[number]}, but {limit} is only {self[limit]}")

    def error(self, text: str) -> ClusterError:
        """Returns an error with the message ``text`` and the source of the variables."""
        return ClusterError(f"{self._origin}: {text}")
