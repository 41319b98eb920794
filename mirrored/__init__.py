"""Train one PyTorch model on many devices, with the numbers of one."""

from typing import TYPE_CHECKING

from mirrored.checkpoint import CheckpointError, CheckpointManager, LoadReport, Preempted, load_weights
from mirrored.cluster import (
    ClusterError,
    ClusterResolver,
    LocalClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
)
from mirrored.context import (
    ReplicaContext,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
)
from mirrored.data.dataset import DistributedDataset
from mirrored.data.input_context import InputContext, ValueContext
from mirrored.losses import compute_average_loss, scale_regularization_loss
from mirrored.operations import ReduceOp
from mirrored.stand_in import drop_stand_in
from mirrored.strategy.base import Strategy
from mirrored.strategy.kinds import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    get_strategy,
)
from towers.errors import (
    CannotStartError,
    CollectiveTimeoutError,
    DeadlockError,
    DisagreementError,
    ForkedError,
    HandshakeError,
    MirrorError,
    NonFiniteGradientError,
    PeerLostError,
    PortInUseError,
    StartupError,
    TowerFailedError,
    TowersError,
)
from towers.launching.launch import launch
from towers.options import CommunicationOptions

if TYPE_CHECKING:
    from mirrored.verification import verify
else:

    def __getattr__(name: str) -> object:
        """``verify`` is loaded when it is used: every tower imports this package, and hardly any compares."""
        if name == "verify":
            from mirrored.verification import verify

            return verify
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CannotStartError",
    "CheckpointError",
    "CheckpointManager",
    "ClusterError",
    "ClusterResolver",
    "CollectiveTimeoutError",
    "CommunicationOptions",
    "DeadlockError",
    "DisagreementError",
    "DistributedDataset",
    "ForkedError",
    "HandshakeError",
    "InputContext",
    "LoadReport",
    "LocalClusterResolver",
    "MirrorError",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NonFiniteGradientError",
    "OneDeviceStrategy",
    "PeerLostError",
    "PortInUseError",
    "Preempted",
    "ReduceOp",
    "ReplicaContext",
    "SlurmClusterResolver",
    "StartupError",
    "Strategy",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "TowerFailedError",
    "TowersError",
    "ValueContext",
    "compute_average_loss",
    "drop_stand_in",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "launch",
    "load_weights",
    "scale_regularization_loss",
    "verify",
]
