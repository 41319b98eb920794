"""Train one PyTorch model on many devices, with the numbers of one."""

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
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from mirrored.data.dataset import DistributedDataset
from mirrored.data.input_context import InputContext, ValueContext
from mirrored.losses import compute_average_loss, scale_regularization_loss
from mirrored.operations import ReduceOp
from mirrored.options import CommunicationOptions
from mirrored.strategies import MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy
from mirrored.strategy import Strategy
from mirrored.verification import verify
from towers import (
    CannotStartError,
    CollectiveTimeoutError,
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
    launch,
)

__all__ = [
    "CannotStartError",
    "ClusterError",
    "ClusterResolver",
    "CollectiveTimeoutError",
    "CommunicationOptions",
    "DisagreementError",
    "DistributedDataset",
    "ForkedError",
    "HandshakeError",
    "InputContext",
    "LocalClusterResolver",
    "MirrorError",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NonFiniteGradientError",
    "OneDeviceStrategy",
    "PeerLostError",
    "PortInUseError",
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
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "launch",
    "scale_regularization_loss",
    "verify",
]
