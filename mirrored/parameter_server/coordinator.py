"""Schedules functions on workers (after TensorFlow's ``tf.distribute.coordinator``).

[Note: at least once] A worker that is lost comes back as a new process, and what it was computing is given to whoever
is free. Some of it may have been pushed before, so it counts at least once. A call that has cost so many workers in
turn is itself the cause, and an error.

[Note: the end] A thread for each worker knows the coordinator weakly, but while it has a call. So a strategy and its
coordinator that a script drops are freed, and Ray ends the processes that nobody has a handle of.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from threading import Condition, Thread
from typing import Any
from weakref import ref

from mirrored.parameter_server.errors import ServerLostError
from mirrored.parameter_server.servers import ActorLostError
from mirrored.parameter_server.strategy import ParameterServerStrategy, PerWorkerDataset
from towers.system import tree as trees
from towers.system.log import get_logger

log = get_logger("mirrored")

_MOST_LOST = 5  # workers in turn, by one call


class RemoteValue:
    """What a scheduled function returns, when it has."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()
        self._lost = 0  # workers, while they computed it

    def fetch(self) -> Any:
        """Wait for the value and return it, with tensors on the CPU.

        Raises:
            BaseException: what the function has raised.
            concurrent.futures.CancelledError: another one raised before this one was called.
        """
        return self._future.result()

    get = fetch


_Call = tuple[RemoteValue, bytes]
"""What a scheduled function is to return, and the function, pickled."""


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
        RuntimeError: the strategy has another one.
        mirrored.parameter_server.errors.ServerLostError: a server has ended; by every method, from then on.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if strategy.coordinator() is not None:
            raise RuntimeError("the strategy has a ClusterCoordinator already: schedule by that one")
        self.strategy = strategy
        self._changed = Condition()
        self._queue: deque[_Call] = deque()
        self._running = 0
        self._error: BaseException | None = None
        shared = self._changed, self._queue
        reference = strategy.coordinator = ref(self, functools.partial(_abandon, *shared))
        for index in range(strategy.workers):
            arguments = (*shared, reference, index)
            Thread(target=_serve, args=arguments, name=f"mirrored-worker-{index}", daemon=True).start()

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Let some worker call ``fn(*args, **kwargs)``; returns at once.

        Models, optimizers and per-worker data that it uses are the worker's own. It is sent as it is now, with all else
        that it refers to.

        Raises:
            TypeError: something in it cannot be pickled.
        """
        if any(isinstance(leaf, RemoteValue) for leaf in trees.leaves((args, kwargs or {}))):
            raise TypeError("a RemoteValue cannot be an argument of schedule(); pass the result of its fetch()")
        with self._changed:
            self._raise_error()
            pickled = self.strategy.prepare(fn, tuple(args), dict(kwargs or {}))
            self._queue.append((value := RemoteValue(), pickled))
            self._changed.notify_all()
        return value

    def join(self) -> None:
        """Wait until all that was scheduled has finished; then the chief's variables are what servers have."""
        with self._changed:
            self._changed.wait_for(self._is_done)
        self._raise_error()
        self.strategy.flush()
        self.strategy.replica.refresh()

    def done(self) -> bool:
        """Whether all that was scheduled has finished."""
        self._raise_error()
        with self._changed:
            return self._is_done()

    def fetch(self, value: Any) -> Any:
        """Wait for the remote values in a nested structure, and return it with what they are."""
        self._raise_error()
        return trees.map_leaves(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, value)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Data of each worker's own; a worker that comes back begins them anew.

        Args:
            dataset_fn: returns something iterable. It is called once on each worker (for a generator: for each
                iterator), with an :class:`mirrored.InputContext` if it takes an argument. Or the data themselves, which
                are sent to each worker.

        Returns:
            What ``iter()`` makes an argument for :meth:`schedule` of; there it is each worker's own iterator. Another
            ``iter()`` is another iterator, from the beginning.
        """
        with self._changed:
            return self.strategy.add_pipeline(dataset_fn)

    def _is_done(self) -> bool:
        return not self._queue and not self._running

    def _raise_error(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is None or self._is_done())
            error = self._error
            if not isinstance(error, ServerLostError):
                self._error = None
            if error is not None:
                raise error

    # -- one thread for each worker ----------------------------------------------------------------------

    def _compute(self, index: int, value: RemoteValue, pickled: bytes) -> None:
        error: BaseException | None = None
        try:
            value._future.set_result(self.strategy.call(index, pickled, self._step_if_all_wait))
        except ActorLostError as lost:
            value._lost += 1
            if value._lost == _MOST_LOST:
                error = RuntimeError(f"{_MOST_LOST} workers were lost in turn in one scheduled function: {lost}")
            log.warning("worker %d (%s) was lost and is restarted", index, lost)
        except BaseException as raised:
            error = raised.with_traceback(None)  # which would keep the coordinator; the worker's is its cause
        with self._changed:
            self._running -= 1
            if error is not None:
                value._future.set_exception(error)
                if self._error is None or isinstance(error, ServerLostError):
                    self._error = error
            elif not value._future.done():
                self._queue.appendleft((value, pickled))
            if self._error is not None:
                _cancel_all(self._queue, "another function that was scheduled has raised")
            self._changed.notify_all()
        if value._lost:
            self.strategy.await_worker(index)

    def _step_if_all_wait(self) -> None:
        """Let servers step with fewer gradients where every call waits for others, and no worker could take another."""
        with self._changed:
            most = self.strategy.workers if self._queue else self._running
        self.strategy.flush(most)


def _serve(changed: Condition, queue: deque[Any], reference: ref[ClusterCoordinator], index: int) -> None:
    """Let a worker compute calls until the coordinator is dropped."""
    while True:
        with changed:
            changed.wait_for(lambda: queue)
            if (coordinator := reference()) is None:
                return
            value, pickled = queue.popleft()
            coordinator._running += 1
        coordinator._compute(index, value, pickled)
        del coordinator


def _abandon(changed: Condition, queue: deque[Any], _: object) -> None:
    """End the threads of a coordinator that is gone, and cancel what they have not begun."""
    with changed:
        _cancel_all(queue, "the coordinator is gone")
        queue.append(None)  # no thread waits any more
        changed.notify_all()


def _cancel_all(queue: deque[_Call], reason: str) -> None:
    while queue:
        queue.popleft()[0]._future.set_exception(CancelledError(reason))
