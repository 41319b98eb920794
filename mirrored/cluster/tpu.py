"""The hosts of a TPU slice, as Cloud TPU and Kubernetes describe them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mirrored.cluster.resolver import ClusterResolver, Numbers


class TPUClusterResolver(ClusterResolver):
    """Reads TPU_WORKER_HOSTNAMES, and this host's index in it: NODE_RANK, TPU_WORKER_ID or JOB_COMPLETION_INDEX.

    The towers of all hosts connect to the first host, on port MASTER_PORT or 29500. With fewer than two names, the
    cluster is this host only.

    Raises:
        ClusterError: the index is missing or not below the number of hosts, or the port is invalid.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.origin = "TPU_WORKER_HOSTNAMES"
        hosts = list(filter(None, environ.get(self.origin, "").split(",")))
        if len(hosts) > 1:
            number = Numbers(environ, self.origin)
            index = next(filter(environ.get, ("NODE_RANK", "TPU_WORKER_ID", "JOB_COMPLETION_INDEX")), "TPU_WORKER_ID")
            number.read(index)
            number["its number of hosts"] = self.workers = len(hosts)
            number.check_index(index, "its number of hosts")
            self.worker = self.task_id = number[index]
            number.optional("MASTER_PORT", 29500)
            number.check_port("MASTER_PORT")
            self.addresses = tuple(f"{host}:{number['MASTER_PORT']}" for host in hosts)
