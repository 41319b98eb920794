"""Schedules functions on workers (after TensorFlow's ``tf.distribute.coordinator``).

[Note: at least once] A worker that is lost comes back as a new process, and what it was computing is given to whoever
is free. Some of it may have been pushed before, so it counts at least once. A call that has cost so many workers in
turn is itself the cause, and an error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError

from mirrored.parameter_server import references
from mirrored.parameter_server.errors import ServerLostError
from mirrored.parameter_server.replica import NotYet
from mirrored.parameter_server.server import Settings
from mirrored.parameter_server.strategy import ParameterServerStrategy, PerWorkerDataset
from mirrored.parameter_server.worker import Failed
from towers.system import tree as trees
from towers.system.log import get_logger
from towers.system.timeouts import clock

log = get_logger("mirrored")

_MOST_LOST = 5  # workers in turn, by one call
_PAUSE = 0.1  # seconds


class RemoteValue:
    """What a scheduled function returns, when it has."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()

    def fetch(self) -> Any:
        """Wait for the value and return it, with tensors on the CPU.

        Raises:
            BaseException: what the function has raised.
            concurrent.futures.CancelledError: another one raised before this one was called.
        """
        return self._future.result()

    get = fetch


@dataclass
class _Call:
    """A scheduled function.

    Attributes:
        lost: how many workers have been lost while they computed it.
    """

    pickled: bytes
    settings: list[Settings]
    value: RemoteValue = field(default_factory=RemoteValue)
    lost: int = 0


class ClusterCoordinator:
    """Schedules functions on the workers of a :class:`ParameterServerStrategy`.

    Every method raises the error of a function that was scheduled before, once; what was scheduled after that function
    is then cancelled, and nothing runs any more. ::

        coordinator = mirrored.ClusterCoordinator(strategy)
        batches = iter(coordinator.create_per_worker_dataset(make_dataset))
        for _ in range(1000):
            coordinator.schedule(train_step, args=(batches,))
        coordinator.join()

    Args:
        strategy: there is one coordinator for each.

    Raises:
        mirrored.parameter_server.errors.ServerLostError: by every method, from then on.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self.strategy = strategy
        self._changed = threading.Condition()
        self._queue: deque[_Call] = deque()
        self._running = 0
        self._error: BaseException | None = None
        for index in range(strategy.workers):
            threading.Thread(target=self._serve, args=(index,), name=f"mirrored-worker-{index}", daemon=True).start()

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Let some worker call ``fn(*args, **kwargs)``; returns at once.

        Models, optimizers and per-worker data that it uses are the worker's own. It is sent as it is now, with all else
        that it refers to.

        Raises:
            TypeError: something in it cannot be pickled.
        """
        self._raise_error()
        if any(isinstance(leaf, RemoteValue) for leaf in trees.leaves((args, kwargs or {}))):
            raise TypeError("a RemoteValue cannot be an argument of schedule(); give what its fetch() returns")
        pickled, settings = self.strategy.prepare((fn, tuple(args), dict(kwargs or {})))
        call = _Call(pickled, settings)
        with self._changed:
            self._queue.append(call)
            self._changed.notify_all()
        return call.value

    def join(self) -> None:
        """Wait until all that was scheduled has been called."""
        with self._changed:
            self._changed.wait_for(self._is_done)
        self._raise_error()
        self.strategy.flush()

    def done(self) -> bool:
        """Whether all that was scheduled has been called."""
        self._raise_error()
        with self._changed:
            return self._is_done()

    def fetch(self, value: Any) -> Any:
        """Wait for the remote values in a nested structure, and return it with what they are."""
        self._raise_error()
        return trees.map_leaves(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, value)

    def create_per_worker_dataset(self, dataset_fn: Callable[..., Any]) -> PerWorkerDataset:
        """Data of each worker's own; a worker that comes back begins them anew.

        Args:
            dataset_fn: returns something iterable. It is called once on each worker, with an
                :class:`mirrored.InputContext` if it takes an argument.

        Returns:
            What ``iter()`` makes an argument for :meth:`schedule` of; there it is each worker's own iterator.
        """
        return self.strategy.add_pipeline(dataset_fn)

    def _is_done(self) -> bool:
        return not self._queue and not self._running

    def _raise_error(self) -> None:
        with self._changed:
            if self._error is None:
                return
            self._changed.wait_for(self._is_done)
            error = self._error
            if not isinstance(error, ServerLostError):
                self._error = None
        raise error

    # -- one thread for each worker ----------------------------------------------------------------------

    def _serve(self, index: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                call = self._queue.popleft()
                self._running += 1
            try:
                outcome = self.strategy.call(index, call.pickled, call.settings)
            except RayActorError as error:
                call.lost += 1
                outcome = NotYet() if call.lost < _MOST_LOST else Failed(_costs_workers(call.lost, error), "")
                log.warning("worker %d was lost, and is started again", index)
            except BaseException as error:
                outcome = Failed(error, "")
            with self._changed:
                self._running -= 1
                if isinstance(outcome, NotYet) and self._error is None:
                    self._queue.appendleft(call)
                elif isinstance(outcome, Failed):
                    self._fail(call, index, outcome)
                elif isinstance(outcome, NotYet):
                    _cancel(call)
                else:
                    call.value._future.set_result(references.load(outcome))
                self._changed.notify_all()
            if isinstance(outcome, NotYet):
                clock.sleep(_PAUSE)  # so that another worker takes it, whose gradient is awaited

    def _fail(self, call: _Call, index: int, failed: Failed) -> None:
        call.value._future.set_exception(failed.error)
        if failed.trace:
            log.error("a function that was scheduled raised on worker %d:\n%s", index, failed.trace)
        while self._queue:
            _cancel(self._queue.popleft())
        if self._error is None or isinstance(failed.error, ServerLostError):
            self._error = failed.error


def _cancel(call: _Call) -> None:
    call.value._future.set_exception(CancelledError("another function that was scheduled has raised"))


def _costs_workers(count: int, error: Exception) -> RuntimeError:
    return RuntimeError(f"{count} workers were lost in turn while they computed one scheduled function: {error}")
