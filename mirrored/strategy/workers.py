"""The strategies of several workers: those of a cluster's description, and the hosts of TPUs."""

from __future__ import annotations

import os
from typing import Any

from mirrored import cluster
from mirrored.cluster.resolver import ClusterError, ClusterResolver
from mirrored.cluster.tpu import TPUClusterResolver
from mirrored.strategy.kinds import COMMUNICATION, MirroredStrategy
from towers.options import instead_of
from towers.system import tpu


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """One model on all devices of all workers (machines) of a cluster.

    The cluster comes from ``cluster_resolver``, else ``TF_CONFIG``, else torchrun's variables, else SLURM's,
    else it is this machine alone. With ``TF_CONFIG`` the same script is started on every worker; each becomes
    its towers, and they meet at the chief's address.

    Args:
        cluster_resolver: for example ``TFConfigClusterResolver()``.
        options: ``devices``, one per tower of this worker, and others of :class:`MirroredStrategy`.

    Raises:
        ClusterError: the cluster's description is wrong, or two descriptions contradict each other.
        ValueError, CannotStartError, StartupError, HandshakeError: see :class:`MirroredStrategy`.
    """

    @instead_of(communication_options=COMMUNICATION)
    def __init__(self, cluster_resolver: ClusterResolver | None = None, **options: Any) -> None:
        self._own_resolver = cluster_resolver
        super().__init__(**options)

    def _resolve(self) -> ClusterResolver:
        resolver = cluster.resolve(os.environ, self._own_resolver)
        if "ps" in resolver.cluster_spec():
            raise ClusterError(
                f"{resolver.origin}: cluster has 'ps' tasks, but mirrored training has no parameter servers: use "
                "mirrored.ParameterServerStrategy, or remove the job 'ps' and give its machines to 'worker'"
            )
        return resolver


class TPUStrategy(MultiWorkerMirroredStrategy):
    """One model on all TPUs of this host, or of all hosts of a slice: one tower per TPU.

    It needs torch_tpu (the extra ``tpu``), and is otherwise the strategy of several workers. ``MirroredStrategy()``
    takes the TPUs of one host, too.

    Args:
        cluster_resolver: the hosts; default ``TPUClusterResolver()``.
        options: ``devices``, where not all of this host's TPUs are to be used (``["tpu:0", "tpu:1"]``), and others of
            :class:`MirroredStrategy`.

    Raises:
        ValueError: torch sees no TPU; the text says why, and what to do. Else see :class:`MirroredStrategy`.
        ClusterError: the hosts' variables are wrong.
    """

    @instead_of(tpu_cluster_resolver="cluster_resolver=", experimental_device_assignment="each TPU has a tower")
    def __init__(self, cluster_resolver: ClusterResolver | None = None, **options: Any) -> None:
        if why := tpu.missing():
            raise ValueError(f"TPUStrategy: {why}. On other devices take MirroredStrategy")
        super().__init__(cluster_resolver or TPUClusterResolver(), **options)
