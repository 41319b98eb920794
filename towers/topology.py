"""A tower's position among the towers of its job, and the environment variables that launchers set."""

from __future__ import annotations

import dataclasses

STARTED_BY = "TOWERS_STARTED_BY"
"""Environment variable with the kind of launcher, for the log: ``python``, ``launch``, ``TF_CONFIG`` …"""

DEVICES = "TOWERS_DEVICES"
"""Environment variable with the devices of this worker's towers, comma-separated, one per tower."""

FEWER_WORKERS = "TOWERS_FEWER_WORKERS"
"""Environment variable that the agent sets if not all workers of the cluster take part (``min_towers``)."""

AGENT = "TOWERS_AGENT_PID"
"""Environment variable with the process id of the agent that started a tower."""

TOWER = "TOWERS_TOWER"
"""Environment variable that a tower sets for its children: its process id, and the variables of its launcher."""

STATUS_RECORD = "TOWERS_STATUS_RECORD"
"""Environment variable with the file of a tower's status record, which the starter of the tower reads."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file for the report of a tower that fails, in torchrun's format."""

RUN_ID = "TORCHELASTIC_RUN_ID"
"""Environment variable with the id of the job. An agent, torchrun's or mirrored's, has started this tower."""

MEMORY = "TOWERS_MEMORY"
"""Environment variable with a folder of links ``file…`` to empty files in the memory of the agent, for its towers."""

JOB_TOKEN = "MIRRORED_JOB_TOKEN"
"""Environment variable with a secret that only the processes of one job share."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """The position of a tower. Indices start at 0; tower 0 is the chief.

    Attributes:
        index, size: this tower's index among all towers, and the number of towers.
        local_index, local_size: the same among the towers of this worker (this machine).
        worker, workers: this worker's index, and the number of workers.
        started_by: the command that the user typed, for the log.
        address: (host, port) of the store where the towers meet; None if this process was not started as a tower.
        chief_serves: whether tower 0's process serves that store; otherwise a launcher does.
        attempt: the number of restarts of the job so far. It separates the attempts' keys in the store.
        origin: the source of these values, for messages (``"RANK, WORLD_SIZE, …"``).
        token: a secret that only the processes of this job share. Without one, torchrun's run id ("none" in every job
            of several hosts without ``--rdzv-id``), or empty.
    """

    index: int = 0
    size: int = 1
    local_index: int = 0
    local_size: int = 1
    worker: int = 0
    workers: int = 1
    started_by: str = "python"
    address: tuple[str, int] | None = None
    chief_serves: bool = False
    attempt: int = 0
    origin: str = "this process"
    token: str = dataclasses.field(default="", repr=False)

    def __post_init__(self) -> None:
        for name, value, bound in (
            ("index", self.index, self.size),
            ("local_index", self.local_index, self.local_size),
            ("worker", self.worker, self.workers),
        ):
            if not 0 <= value < bound:
                raise ValueError(f"{name} is {value}, but must be from 0 to {bound - 1} (from {self.origin})")
        if self.local_size > self.size:
            raise ValueError(f"local_size is {self.local_size}, more than all {self.size} towers (from {self.origin})")

    @property
    def is_chief(self) -> bool:
        """Whether this is tower 0, the one that writes and prints."""
        return self.index == 0
