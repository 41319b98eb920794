"""Schedules functions on workers (after TensorFlow's ``tf.distribute.coordinator``).

[Note: exactly once] A lost worker is replaced by a new process, and its call is run again by the next free worker. If
gradients of the first attempt have reached a server, it drops those of the second. So every step is counted once, if
the function makes the same steps again. A call in which 5 workers were lost, one after another, is taken as the cause
and raises an error.

[Note: turns] If each step needs a gradient of every worker, with the same parameters, the workers take calls in turn:
each takes one before any takes a second one. Otherwise, a fast worker could take two calls in a row, and wait in the
second one, while the gradient of a later call is used in its place.

[Note: the end] The thread of a worker has a strong reference to the coordinator only during a call. So a strategy and
its coordinator are freed when the script drops them, and Ray ends the processes without a handle.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager
from threading import Condition, Thread
from typing import Any
from weakref import ref

from mirrored.parameter_server.servers import ActorLostError, ServerLostError
from mirrored.parameter_server.strategy import ParameterServerStrategy, PerWorkerDataset
from towers.system import tree as trees
from towers.system.messages import get_logger

log = get_logger("mirrored")

_MOST_LOST = 5  # workers lost one after another by one call


class RemoteValue:
    """The future result of a scheduled function."""

    def __init__(self, number: int, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        self._number = number
        self._waiting = waiting
        self._future: Future[Any] = Future()
        self._lost = 0  # the number of workers lost while they computed it

    def fetch(self) -> Any:
        """Waits for the value and returns it, with tensors on the CPU.

        Raises:
            BaseException: the exception that the function raised.
            concurrent.futures.CancelledError: another function raised an exception before this one was called.
        """
        with self._waiting():
            return self._future.result()

    get = fetch


_Call = tuple[RemoteValue, bytes]
"""The future result of a scheduled function, and the pickled function."""


class ClusterCoordinator:
    """Schedules functions on the workers of a :class:`ParameterServerStrategy`.

    If a scheduled function raises an error, the functions after it are cancelled. When no function is running any more,
    the next call of a method raises that error, once. ::

        coordinator = mirrored.ClusterCoordinator(strategy)
        batches = iter(coordinator.create_per_worker_dataset(make_dataset))
        for _ in range(1000):
            coordinator.schedule(train_step, args=(batches,))
        coordinator.join()

    Args:
        strategy: the strategy, which has at most one coordinator.

    Raises:
        RuntimeError: the strategy already has a coordinator.
        mirrored.parameter_server.servers.ServerLostError: a server has ended. From then on, every method raises it.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if strategy.coordinator() is not None:
            raise RuntimeError("the strategy has a ClusterCoordinator already: schedule by that one")
        self.strategy = strategy
        self._changed = Condition()
        self._queue: deque[_Call] = deque()
        self._running = 0
        self._awaited = 0  # calls of join() and fetch() that wait
        self._unfinished: dict[int, None] = {}  # numbers of calls, in order
        self._error: BaseException | None = None
        self._taken = [0] * strategy.workers  # calls of each worker since the last join()
        shared = self._changed, self._queue, self._taken if strategy.takes_turns else []
        reference = strategy.coordinator = ref(self, functools.partial(_abandon, self._changed, self._queue))
        for index in range(strategy.workers):
            arguments = (*shared, reference, index)
            Thread(target=_serve, args=arguments, name=f"mirrored-worker-{index}", daemon=True).start()

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Schedules ``fn(*args, **kwargs)`` on a worker, and returns at once.

        Models, optimizers and per-worker data in the call refer to the worker's own. All other objects that the
        function refers to are sent in their current state.

        Raises:
            TypeError: an object in the call cannot be pickled.
        """
        if any(isinstance(leaf, RemoteValue) for leaf in trees.leaves((args, kwargs or {}))):
            raise TypeError("a RemoteValue cannot be an argument of schedule(); pass the result of its fetch()")
        with self._changed:
            self._raise_error()
            pickled = self.strategy.prepare(fn, tuple(args), dict(kwargs or {}))
            value = RemoteValue(next(self.strategy.numbers_of_calls), functools.partial(_waiting, ref(self)))
            self._queue.append((value, pickled))
            self._unfinished[value._number] = None
            self._changed.notify_all()
        return value

    def join(self) -> None:
        """Waits until all scheduled functions have finished. Then the chief's variables have the servers' values."""
        with _waiting(ref(self)), self._changed:
            self._changed.wait_for(self._is_done)
            self._taken[:] = [0] * len(self._taken)
        self._raise_error()
        self.strategy.flush()
        self.strategy.replica.refresh()

    def done(self) -> bool:
        """Returns whether all scheduled functions have finished."""
        self._raise_error()
        with self._changed:
            if self._is_done():
                return True
        with _waiting(ref(self)):
            self._step_if_all_wait()
        return False

    def fetch(self, value: Any) -> Any:
        """Waits for the remote values in a nested structure, and returns the structure with their results."""
        self._raise_error()
        return trees.map_leaves(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, value)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Creates separate data for each worker. A restarted worker starts them from the beginning.

        Args:
            dataset_fn: a function that returns an iterable. It is called once on each worker (for a generator: once for
                each iterator), with an :class:`mirrored.InputContext` if it takes an argument. Or the data themselves,
                which are sent to each worker.

        Returns:
            A dataset whose ``iter()`` is an argument for :meth:`schedule`. On a worker, it is the worker's own
            iterator. Each call of ``iter()`` starts from the beginning.
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
        with self._changed:
            call = value._number, next(iter(self._unfinished))
        try:
            value._future.set_result(self.strategy.call(index, pickled, call, self._step_if_all_wait))
        except ActorLostError as lost:
            value._lost += 1
            if value._lost == _MOST_LOST:
                error = RuntimeError(f"{_MOST_LOST} workers were lost in turn in one scheduled function: {lost}")
            log.warning("worker %d (%s) was lost and is restarted", index, lost)
        except BaseException as raised:
            error = raised.with_traceback(None)  # the traceback would keep the coordinator; its cause is the worker's
        with self._changed:
            self._running -= 1
            if error is not None:
                value._future.set_exception(error)
                if self._error is None or isinstance(error, ServerLostError):
                    self._error = error
            elif not value._future.done():
                self._queue.appendleft((value, pickled))
                self._taken[index] -= 1
            if value._future.done():
                del self._unfinished[value._number]
            if self._error is not None:
                for cancelled, _ in self._queue:
                    del self._unfinished[cancelled._number]
                _cancel_all(self._queue, "another function that was scheduled has raised")
            self._changed.notify_all()
        if value._lost:
            self.strategy.await_worker(index)

    def _step_if_all_wait(self) -> None:
        """Makes servers step with fewer gradients if every call waits for others and no worker is free.

        If no function is queued, the chief must wait, too: otherwise, it may be about to schedule the next one.
        """
        with self._changed:
            if not (self._queue or self._awaited):
                return
            most = self.strategy.workers if self._queue else self._running
        self.strategy.flush(most)


class ShortQueue:
    """Schedules functions of a loop, at most two for each worker at a time: one runs, and one waits."""

    def __init__(self, coordinator: ClusterCoordinator) -> None:
        self.coordinator = coordinator
        self._values: deque[RemoteValue] = deque()

    def schedule(self, fn: Callable[..., Any], args: Sequence[Any]) -> Iterator[Any]:
        """Schedules ``fn(*args)``. Returns the results of earlier functions for which it had to wait."""
        self._values.append(self.coordinator.schedule(fn, args))
        return self._results(2 * self.coordinator.strategy.workers)

    def finish(self) -> Iterator[Any]:
        """Returns the results of all functions, in the order of their ``schedule``."""
        yield from self._results(0)
        self.coordinator.join()

    def _results(self, most: int) -> Iterator[Any]:
        while len(self._values) > most:
            yield self._values.popleft().fetch()


@contextmanager
def _waiting(reference: ref[ClusterCoordinator]) -> Iterator[None]:
    """Counts a wait of the chief."""
    coordinator = reference()
    if coordinator is not None:
        with coordinator._changed:
            coordinator._awaited += 1
    try:
        del coordinator
        yield
    finally:
        if (coordinator := reference()) is not None:
            with coordinator._changed:
                coordinator._awaited -= 1


def _serve(
    changed: Condition, queue: deque[Any], taken: list[int], reference: ref[ClusterCoordinator], index: int
) -> None:
    """Runs calls on a worker until the coordinator is dropped.

    Args:
        taken: the number of calls of each worker, if they take turns; see [Note: turns].
    """
    while True:
        with changed:
            changed.wait_for(lambda: queue and (queue[0] is None or not taken or taken[index] <= min(taken)))
            if (coordinator := reference()) is None:
                return
            value, pickled = queue.popleft()
            coordinator._running += 1
            coordinator._taken[index] += 1
            changed.notify_all()  # another worker may have the next turn
        coordinator._compute(index, value, pickled)
        del coordinator


def _abandon(changed: Condition, queue: deque[Any], _: object) -> None:
    """Ends the threads of a dropped coordinator, and cancels the calls that have not started."""
    with changed:
        _cancel_all(queue, "the coordinator is gone")
        queue.append(None)  # wakes all threads and ends them
        changed.notify_all()


def _cancel_all(queue: deque[_Call], reason: str) -> None:
    while queue:
        queue.popleft()[0]._future.set_exception(CancelledError(reason))
