"""Towers started by torchrun, or by anything else that sets its variables."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mirrored.cluster.resolver import (
    ClusterError,
    ClusterResolver,
    check_at_most,
    check_index,
    check_port,
    read_optional,
    read_whole_numbers,
)
from towers.topology import JOB_TOKEN, RUN_ID, STARTED_BY, Topology

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchrunClusterResolver(ClusterResolver):
    """Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE.

    The last two may both be absent (one process per machine, as Kubeflow's PyTorchJob starts them).

    Raises:
        ClusterError: variables are missing (all are named at once), are no numbers, or contradict each other.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        by_torchrun = RUN_ID in environ
        started_by = environ.get(STARTED_BY) or ("torchrun" if by_torchrun else "RANK and WORLD_SIZE")
        self.origin = "torchrun's variables" if by_torchrun else "the variables RANK, WORLD_SIZE, …"
        missing = [name for name in REQUIRED if not environ.get(name)]
        local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if any(environ.get(name) for name in local):
            missing += [name for name in local if not environ.get(name)]
        if missing:
            raise ClusterError(
                f"{self.origin}: {', '.join(missing)} not set; start with torchrun, which sets all of "
                f"{', '.join(REQUIRED + local)}, or set the missing ones"
            )
        numeric = [n for n in ("RANK", "WORLD_SIZE", "MASTER_PORT", *local) if environ.get(n)]
        number = read_whole_numbers(environ, numeric, self.origin)
        index, size = number["RANK"], number["WORLD_SIZE"]
        local_index, local_size = number.get("LOCAL_RANK", 0), number.get("LOCAL_WORLD_SIZE", 1)
        check_index("RANK", index, "WORLD_SIZE", size, self.origin)
        check_index("LOCAL_RANK", local_index, "LOCAL_WORLD_SIZE", local_size, self.origin)
        check_at_most("LOCAL_WORLD_SIZE", local_size, "WORLD_SIZE", size, self.origin)
        check_at_most("LOCAL_RANK", local_index, "RANK", index, self.origin)
        check_port("MASTER_PORT", number["MASTER_PORT"], self.origin)
        self.worker, self.workers = _worker(environ, index, size, local_size, self.origin)
        self.task_id = self.worker
        self.topology = Topology(
            index=index,
            size=size,
            local_index=local_index,
            local_size=local_size,
            worker=self.worker,
            workers=self.workers,
            started_by=started_by,
            address=(environ["MASTER_ADDR"], number["MASTER_PORT"]),
            serves_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=read_optional(environ, "TORCHELASTIC_RESTART_COUNT", self.origin),
            origin=self.origin,
            token=_token(environ),
        )


def present(environ: Mapping[str, str]) -> bool:
    """Whether a launcher of this kind has set anything."""
    return bool(environ.get("RANK") or environ.get("WORLD_SIZE"))


def _token(environ: Mapping[str, str]) -> str:
    # The agents of several workers each have a run id of their own; torchrun's have one.
    torchruns = "" if environ.get(STARTED_BY) else environ.get(RUN_ID, "")
    return environ.get(JOB_TOKEN) or torchruns


def _worker(environ: Mapping[str, str], index: int, size: int, local_size: int, origin: str) -> tuple[int, int]:
    if environ.get("GROUP_RANK") and environ.get("GROUP_WORLD_SIZE"):
        number = read_whole_numbers(environ, ["GROUP_RANK", "GROUP_WORLD_SIZE"], origin)
        check_at_most("GROUP_WORLD_SIZE", number["GROUP_WORLD_SIZE"], "WORLD_SIZE", size, origin)
        check_index("GROUP_RANK", number["GROUP_RANK"], "GROUP_WORLD_SIZE", number["GROUP_WORLD_SIZE"], origin)
        return number["GROUP_RANK"], number["GROUP_WORLD_SIZE"]
    return index // local_size, -(-size // local_size)
