"""The strategies of several workers: for the description of a cluster, and for hosts of TPUs."""

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
    """Trains one model on all devices of all workers (machines) of a cluster.

    The first of these that exists describes the cluster: ``cluster_resolver``, ``TF_CONFIG``, torchrun's variables,
    SLURM's variables. If none exists, the cluster is this machine. With ``TF_CONFIG``, start the same script on every
    worker. Each process becomes its worker's towers, and all towers connect to the chief's address.

    Args:
        cluster_resolver: for example ``TFConfigClusterResolver()``.
        options: ``devices``, one per tower of this worker, and other options of :class:`MirroredStrategy`.

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
    """Trains one model on all TPUs of this host, or of all hosts of a slice, with one tower per TPU.

    It needs torch_tpu (the extra ``tpu``), and is otherwise the strategy of several workers. ``MirroredStrategy()``
    also supports the TPUs of one host.

    Args:
        cluster_resolver: the hosts; default ``TPUClusterResolver()``.
        options: ``devices``, to use only some of this host's TPUs (``["tpu:0", "tpu:1"]``), and other options of
            :class:`MirroredStrategy`.

    Raises:
        ValueError: torch finds no TPU; the message contains the reason and the remedy. Otherwise see
            :class:`MirroredStrategy`.
        ClusterError: the hosts' variables are wrong.
    """

    @instead_of(tpu_cluster_resolver="cluster_resolver=", experimental_device_assignment="each TPU has a tower")
    def __init__(self, cluster_resolver: ClusterResolver | None = None, **options: Any) -> None:
        if why := tpu.missing():
            raise ValueError(f"TPUStrategy: {why}. On other devices take MirroredStrategy")
        super().__init__(cluster_resolver or TPUClusterResolver(), **options)
