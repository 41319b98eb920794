"""Towers that torchrun starts, or another launcher that sets torchrun's variables."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mirrored.cluster.resolver import ClusterError, ClusterResolver, Numbers
from towers.topology import JOB_TOKEN, RUN_ID, STARTED_BY, Topology

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchrunClusterResolver(ClusterResolver):
    """Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE.

    The last two may both be absent (one process per machine, as Kubeflow's PyTorchJob starts them).

    Raises:
        ClusterError: variables are missing (one message names all of them), are not numbers, or contradict each other.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        by_torchrun = RUN_ID in environ
        started_by = environ.get(STARTED_BY) or ("torchrun" if by_torchrun else "RANK and WORLD_SIZE")
        self.origin = "torchrun's variables" if by_torchrun else "the variables RANK, WORLD_SIZE, …"
        if started_by.startswith("mirrored "):
            self.origin = started_by
        missing = [name for name in REQUIRED if not environ.get(name)]
        local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if any(environ.get(name) for name in local):
            missing += [name for name in local if not environ.get(name)]
        if missing:
            raise ClusterError(
                f"{self.origin}: {', '.join(missing)} not set; start with torchrun, which sets all of "
                f"{', '.join(REQUIRED + local)}, or set the missing ones"
            )
        towers = environ.get("PET_NPROC_PER_NODE", "1")
        if towers.isdecimal() and towers != "1" and not environ.get("LOCAL_RANK"):
            raise ClusterError(
                f"{self.origin}: PET_NPROC_PER_NODE is {towers}, so RANK counts machines and WORLD_SIZE towers, as "
                "Kubeflow sets them for torchrun: put torchrun in place of python"
            )
        number = Numbers(environ, self.origin)
        number.read("RANK", "WORLD_SIZE", "MASTER_PORT")
        index, size = number["RANK"], number["WORLD_SIZE"]
        local_index, local_size = number.optional("LOCAL_RANK"), number.optional("LOCAL_WORLD_SIZE", 1)
        number.check_index("RANK", "WORLD_SIZE")
        number.check_index("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        number.check_at_most("LOCAL_WORLD_SIZE", "WORLD_SIZE")
        number.check_at_most("LOCAL_RANK", "RANK")
        number.check_port("MASTER_PORT")
        self.worker, self.workers = index // local_size, -(-size // local_size)
        if environ.get("GROUP_RANK") and environ.get("GROUP_WORLD_SIZE"):
            number.read("GROUP_RANK", "GROUP_WORLD_SIZE")
            number.check_at_most("GROUP_WORLD_SIZE", "WORLD_SIZE")
            number.check_index("GROUP_RANK", "GROUP_WORLD_SIZE")
            self.worker, self.workers = number["GROUP_RANK"], number["GROUP_WORLD_SIZE"]
        self.task_id = self.worker
        # The agents of mirrored's workers have different run ids. All agents of torchrun have the same run id.
        run_id = "" if environ.get(STARTED_BY) else environ.get(RUN_ID, "")
        self.topology = Topology(
            index=index,
            size=size,
            local_index=local_index,
            local_size=local_size,
            worker=self.worker,
            workers=self.workers,
            started_by=started_by,
            address=(environ["MASTER_ADDR"], number["MASTER_PORT"]),
            chief_serves=environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=number.optional("TORCHELASTIC_RESTART_COUNT"),
            origin=self.origin,
            token=environ.get(JOB_TOKEN) or run_id,
        )


def present(environ: Mapping[str, str]) -> bool:
    """Returns whether a launcher of this kind has set RANK or WORLD_SIZE."""
    return bool(environ.get("RANK") or environ.get("WORLD_SIZE"))
