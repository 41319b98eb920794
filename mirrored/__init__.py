"""Trains one PyTorch model on many devices, with the losses, gradients and weights of one device.

Each name is imported when it is first used, so that ``import mirrored`` and ``mirrored --help`` do not load torch.
"""

import importlib
from typing import TYPE_CHECKING

from mirrored import foreign_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mirrored.central import CentralStorageStrategy as CentralStorageStrategy
    from mirrored.checkpoint import CheckpointError as CheckpointError
    from mirrored.checkpoint import CheckpointManager as CheckpointManager
    from mirrored.checkpoint import LoadReport as LoadReport
    from mirrored.checkpoint import Preempted as Preempted
    from mirrored.checkpoint import load_weights as load_weights
    from mirrored.cluster.inherited import clean_environment as clean_environment
    from mirrored.cluster.launchers import SlurmClusterResolver as SlurmClusterResolver
    from mirrored.cluster.launchers import TorchrunClusterResolver as TorchrunClusterResolver
    from mirrored.cluster.launchers import TPUClusterResolver as TPUClusterResolver
    from mirrored.cluster.resolver import ClusterError as ClusterError
    from mirrored.cluster.resolver import ClusterResolver as ClusterResolver
    from mirrored.cluster.resolver import LocalClusterResolver as LocalClusterResolver
    from mirrored.cluster.tf_config import TFConfigClusterResolver as TFConfigClusterResolver
    from mirrored.context import ReduceOp as ReduceOp
    from mirrored.context import ReplicaContext as ReplicaContext
    from mirrored.context import get_replica_context as get_replica_context
    from mirrored.context import has_strategy as has_strategy
    from mirrored.context import in_cross_replica_context as in_cross_replica_context
    from mirrored.data.dataset import DistributedDataset as DistributedDataset
    from mirrored.data.distribute import InputContext as InputContext
    from mirrored.data.distribute import ValueContext as ValueContext
    from mirrored.empty_shares import drop_stand_in as drop_stand_in
    from mirrored.evaluation.evaluator import train_and_evaluate as train_and_evaluate
    from mirrored.local import DiLoCo as DiLoCo
    from mirrored.local import LocalSGD as LocalSGD
    from mirrored.losses import compute_average_loss as compute_average_loss
    from mirrored.losses import scale_regularization_loss as scale_regularization_loss
    from mirrored.monitor.monitor import Monitor as Monitor
    from mirrored.parameter_server.coordinator import ClusterCoordinator as ClusterCoordinator
    from mirrored.parameter_server.strategy import ParameterServerStrategy as ParameterServerStrategy
    from mirrored.strategy.base import Strategy as Strategy
    from mirrored.strategy.kinds import MirroredStrategy as MirroredStrategy
    from mirrored.strategy.kinds import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from mirrored.strategy.kinds import OneDeviceStrategy as OneDeviceStrategy
    from mirrored.strategy.kinds import TPUStrategy as TPUStrategy
    from mirrored.strategy.kinds import get_strategy as get_strategy
    from mirrored.verification.verify import verify as verify
    from towers.errors import CannotStartError as CannotStartError
    from towers.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from towers.errors import DeadlockError as DeadlockError
    from towers.errors import DisagreementError as DisagreementError
    from towers.errors import ForkedError as ForkedError
    from towers.errors import HandshakeError as HandshakeError
    from towers.errors import MirrorError as MirrorError
    from towers.errors import NonFiniteGradientError as NonFiniteGradientError
    from towers.errors import PeerLostError as PeerLostError
    from towers.errors import PortInUseError as PortInUseError
    from towers.errors import StartupError as StartupError
    from towers.errors import TowerFailedError as TowerFailedError
    from towers.errors import TowersError as TowersError
    from towers.gradients.powersgd import PowerSGD as PowerSGD
    from towers.launching.starting.launch import launch as launch
    from towers.options import CommunicationOptions as CommunicationOptions

_NAMES = {
    "mirrored.central": "CentralStorageStrategy",
    "mirrored.checkpoint": "CheckpointError CheckpointManager LoadReport Preempted load_weights",
    "mirrored.cluster.inherited": "clean_environment",
    "mirrored.cluster.resolver": "ClusterError ClusterResolver LocalClusterResolver",
    "mirrored.cluster.launchers": "SlurmClusterResolver TorchrunClusterResolver TPUClusterResolver",
    "mirrored.cluster.tf_config": "TFConfigClusterResolver",
    "mirrored.context": "ReduceOp ReplicaContext get_replica_context has_strategy in_cross_replica_context",
    "mirrored.data.dataset": "DistributedDataset",
    "mirrored.data.distribute": "InputContext ValueContext",
    "mirrored.evaluation.evaluator": "train_and_evaluate",
    "mirrored.local": "DiLoCo LocalSGD",
    "mirrored.losses": "compute_average_loss scale_regularization_loss",
    "mirrored.monitor.monitor": "Monitor",
    "mirrored.empty_shares": "drop_stand_in",
    "mirrored.strategy.base": "Strategy",
    "mirrored.strategy.kinds": (
        "MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy TPUStrategy get_strategy"
    ),
    "mirrored.verification": "verify",
    "towers.errors": (
        "CannotStartError CollectiveTimeoutError DeadlockError DisagreementError ForkedError HandshakeError "
        "MirrorError NonFiniteGradientError PeerLostError PortInUseError StartupError TowerFailedError TowersError"
    ),
    "towers.gradients.powersgd": "PowerSGD",
    "towers.launching.starting.launch": "launch",
    "towers.options": "CommunicationOptions",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)

_MODULE_OF |= {  # excluded from "import *", because Ray may not be installed
    "ClusterCoordinator": "mirrored.parameter_server.coordinator",
    "ParameterServerStrategy": "mirrored.parameter_server.strategy",
}

if not TYPE_CHECKING:  # otherwise, a type checker would accept any name

    def __getattr__(name):
        if name not in _MODULE_OF:
            raise foreign_names.missing("mirrored", name)
        return globals().setdefault(name, getattr(importlib.import_module(_MODULE_OF[name]), name))

    def __dir__():
        return [*__all__, "__version__"]
