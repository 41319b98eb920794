"""The context of running code: a strategy's scope, one of its replicas, or neither."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from mirrored.events import Events
from mirrored.seeds import TowerStreams
from mirrored.shares import KnownShares
from towers.collectives.communicator import Communicator
from towers.collectives.values import OPERATIONS, differentiable_gather, differentiable_reduce
from towers.gradients.reducer import GradientReducer
from towers.options import instead_of
from towers.topology import Topology

_ALIASES = {"avg": "mean", "product": "prod"}
_T = TypeVar("_T")


class ReduceOp(enum.Enum):
    """The operations that combine the values of several towers."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PROD = "prod"


def operation_name(op: object) -> str:
    """Returns the name of an operation given as a string in any case, as :class:`ReduceOp`, or as torch's or TF's own.

    Raises:
        ValueError: there is no such operation.
        TypeError: the argument is not an operation.
    """
    if not isinstance(getattr(op, "name", op), str):
        raise TypeError(
            f'the operation is a {type(op).__name__}, but must be a string and the first argument: reduce("sum", value)'
        )
    name = str(getattr(op, "name", op)).lower()
    name = _ALIASES.get(name, name)
    if name not in OPERATIONS:
        raise ValueError(f"unknown operation {op!r}; use one of {', '.join(OPERATIONS)}")
    return name


class ActiveEngine(Protocol):
    """The part of a strategy's :class:`mirrored.strategy.engine.Engine` that the layers below strategies use."""

    averager: GradientReducer

    @property
    def synchronises_batch_norm(self) -> bool: ...

    def attached(self, kind: type[_T]) -> _T | None: ...

    def is_inner_optimizer(self, optimizer: torch.optim.Optimizer) -> bool: ...

    def is_sharded(self, parameter: torch.Tensor) -> bool: ...


class ActiveStrategy(Protocol):
    """The part of a strategy, always a :class:`mirrored.Strategy`, that the layers below strategies use."""

    topology: Topology
    communicator: Communicator
    events: Events
    device: torch.device
    num_replicas_in_sync: int
    is_chief: bool
    accumulates: bool
    known_shares: KnownShares
    streams: TowerStreams

    @property
    def engine(self) -> ActiveEngine: ...

    @property
    def virtual_towers(self) -> int | None: ...

    def is_mirrored(self, parameter: torch.Tensor) -> bool: ...

    def reduce(self, op: str | ReduceOp, value: Any, axis: int | tuple[int, ...] | None = None) -> Any: ...

    def gather(self, value: Any, axis: int = 0) -> Any: ...

    def print(self, *args: Any, **kwargs: Any) -> None: ...

    def say_once(self, text: str) -> None: ...


class ReplicaContext:
    """The replica that runs code inside ``strategy.run``: its position among the towers, and its collectives.

    Attributes:
        strategy: the strategy that runs this code.
        replica_id_in_sync_group: this tower's index.
        num_replicas_in_sync: the number of towers that train together.
        device: this tower's device.
        arguments: the arguments of the function that ``run`` calls, as ``run`` received them.

    All towers must call ``all_reduce`` and ``all_gather`` in the same order, and must run the same backward passes
    through them.
    """

    __slots__ = ("arguments", "device", "num_replicas_in_sync", "replica_id_in_sync_group", "strategy")

    def __init__(self, strategy: ActiveStrategy, arguments: object = None) -> None:
        self.strategy = strategy
        self.arguments = arguments
        self.replica_id_in_sync_group = strategy.topology.index
        self.num_replicas_in_sync = strategy.num_replicas_in_sync
        self.device = strategy.device

    @instead_of(reduce_op='all_reduce("sum", value)', options="leave it out")
    def all_reduce(self, op: str | ReduceOp, value: Any) -> Any:
        """Reduces a nested value over all towers. It is differentiable for "sum" and "mean".

        Args:
            op: "sum", "mean", "min", "max", "prod" or :class:`ReduceOp`.
            value: nested tensors or numbers, with the same shapes and dtypes on all towers.

        Returns:
            The structure of ``value``, equal on all towers. The gradient of an all-sum is the all-sum of the gradients,
            and the gradient of an all-mean is their all-mean.

        Raises:
            DisagreementError: on all towers: the towers' values or operations do not match.
            RuntimeError: min, max or prod of a tensor that requires a gradient.
        """
        return differentiable_reduce(self.strategy.communicator, operation_name(op), value)

    @instead_of(options="leave it out")
    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenates every tower's value along ``axis``, in tower order. It is differentiable.

        Args:
            value: nested tensors. Only the size along ``axis`` may differ between towers.
            axis: the dimension; negative numbers count from the end.

        Raises:
            DisagreementError, ValueError: on all towers.
        """
        return differentiable_gather(self.strategy.communicator, value, axis)

    @instead_of(merge_fn="fn=")
    def merge_call(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls ``fn(strategy, *args, **kwargs)`` in cross-replica context: all towers draw the same random numbers."""
        with frame(self.strategy, None), self.strategy.streams.outside():
            return fn(self.strategy, *args, **(kwargs or {}))


@dataclass(frozen=True)
class Frame:
    """One level of the current context: a strategy, and its replica context inside ``run``."""

    strategy: ActiveStrategy
    replica: ReplicaContext | None


_current: Frame | None = None
"""The innermost frame of the process. It is not per thread, because autograd recomputes checkpoints in its own threads.
"""

_newest_with_towers: weakref.ref[ActiveStrategy] | None = None

_library = ""
"""The step of a library's training loop that this code is in, which computes means and averages gradients itself."""

_make_default: Callable[[], ActiveStrategy]
"""Returns the strategy outside all scopes; :mod:`mirrored.strategy.kinds` sets it."""


class frame:
    """A context manager that makes a strategy's context the current one."""

    __slots__ = ("_frame", "_outer")

    def __init__(self, strategy: ActiveStrategy, replica: ReplicaContext | None) -> None:
        self._frame = Frame(strategy, replica)

    def __enter__(self) -> None:
        global _current
        self._outer, _current = _current, self._frame

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._outer


def current_frame() -> Frame | None:
    """Returns the innermost scope or run that this code is in."""
    return _current


def current_replica() -> ReplicaContext | None:
    """Returns the replica context of the ``run`` that this code is in. None in a scope and outside both."""
    return _current.replica if _current is not None else None


def refuse_inside_run(call: str, instead: str = "call it outside") -> None:
    """Checks that this code is not inside ``run``, for calls that concern all towers or the whole training.

    Raises:
        RuntimeError: it is inside. The message contains ``instead``.
    """
    if current_replica() is not None:
        raise RuntimeError(f"{call} was called inside strategy.run(...): {instead}")


@contextlib.contextmanager
def in_step_of(library: str) -> Iterator[None]:
    """Marks code as a step of a library's training loop, such as "Keras' train_step"."""
    global _library
    before, _library = _library, library
    try:
        yield
    finally:
        _library = before


def refuse_in_library(call: str) -> None:
    """Checks that this code is not in a step of a library's loop, where a call of a custom loop would count twice.

    Raises:
        RuntimeError: it is.
    """
    if _library:
        raise RuntimeError(
            f"{call} was called in {_library}, whose loss must be a plain mean over the examples of the batch: the "
            "loop weights it by the tower's share and averages the gradients. Use keras.losses or torch.nn.functional "
            f"there, and {call} in your own training loop only"
        )


def current_strategy() -> ActiveStrategy | None:
    """Returns the strategy whose scope or run this code is in, otherwise an existing strategy of several towers."""
    return _current.strategy if _current is not None else strategy_with_towers()


def note_towers_of(strategy: ActiveStrategy) -> None:
    """Records that a strategy with several towers exists (see :func:`strategy_with_towers`)."""
    global _newest_with_towers
    _newest_with_towers = weakref.ref(strategy)


def strategy_with_towers() -> ActiveStrategy | None:
    """Returns the newest strategy of several towers, if it still exists, whether or not this code is in its scope."""
    return _newest_with_towers() if _newest_with_towers is not None else None


def set_default_strategy(make: Callable[[], ActiveStrategy]) -> None:
    """Sets the function that returns the strategy outside all scopes and runs. It always returns the same strategy."""
    global _make_default
    _make_default = make


def has_strategy() -> bool:
    """Returns whether this code is in a strategy's scope or run."""
    return current_frame() is not None


def get_replica_context() -> ReplicaContext | None:
    """Returns the replica context of the current ``run``. In a scope: None. Outside both: the default strategy's."""
    return _current.replica if _current is not None else ReplicaContext(_make_default())


def in_cross_replica_context() -> bool:
    """Returns whether this code is in a scope but not in a replica. Outside every scope: False, as in TensorFlow."""
    return _current is not None and _current.replica is None


def require_replica_context(caller: str) -> ReplicaContext:
    """Returns the current replica context, for functions whose result depends on the number of towers.

    Raises:
        RuntimeError: called outside ``run`` although a strategy with several towers exists, or in a library's step.
    """
    refuse_in_library(caller)
    replica = get_replica_context()
    if replica is None or (current_frame() is None and strategy_with_towers() is not None):
        raise RuntimeError(
            f"{caller} was called outside strategy.run(...), where the number of towers it has to divide by is "
            "not that of the strategy; call it inside the function given to strategy.run"
        )
    return replica
