"""``Work`` objects that c10d receives for collectives, and the queue that runs them in call order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from towers.errors import CollectiveTimeoutError


class CompletedWork(dist.Work):
    """A collective that is done.

    Args:
        tensors: its result.
    """

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        raise RuntimeError("only a receive has a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class QueuedWork(CompletedWork):
    """A collective that runs in a thread, now or later."""

    def __init__(self, task: Callable[[], None], tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self._task: Callable[[], None] | None = task
        self._over = threading.Event()
        self._error: Exception | None = None
        self._future: Any = torch.futures.Future()

    def run(self) -> None:
        """Runs the task. It is called once."""
        assert self._task is not None
        try:
            self._task()
        except Exception as error:
            self._error = error
        self._task = None  # releases its tensors
        if self._error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(self._error)
        self._over.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        if not self._over.wait(seconds if seconds > 0 else None):
            raise CollectiveTimeoutError(f"Timed out: a collective was not done after {seconds:.3g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def exception(self) -> Any:
        return self._error

    def get_future(self) -> Any:
        return self._future


class WorkQueue:
    """Runs collectives in the order of the calls: synchronous ones in the caller, asynchronous ones in a thread.

    A callback of a future runs in that thread. Collectives that it calls run at once, and it may wait for them (DDP's
    PowerSGD hook does). They have the same position in the order on all ranks, whether or not the future was done when
    the callback was added.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[QueuedWork | None] = queue.Queue()  # None ends the thread
        self._running = threading.RLock()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], None], tensors: Sequence[Tensor]) -> CompletedWork:
        """Runs a task in the caller, after all queued ones, and raises its errors."""
        if self._queue.unfinished_tasks and not self._in_thread():
            work = self.start(task, tensors)
            work.wait()
            return work
        with self._running:
            task()
        return CompletedWork(tensors)

    def start(self, task: Callable[[], None], tensors: Sequence[Tensor]) -> QueuedWork:
        """Queues a task for the thread. :meth:`QueuedWork.wait` raises its errors."""
        work = QueuedWork(task, tensors)
        if self._in_thread():
            work.run()
            return work
        self._queue.put(work)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="towers-collectives", daemon=True)
                self._thread.start()
        return work

    def _in_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            with self._running:
                work.run()
            self._queue.task_done()  # not earlier: run() must see it in the queue until it is done
            del work

    def close(self) -> None:
        """Waits until all queued tasks are done."""
        self._queue.put(None)
        if self._thread is not None and not self._in_thread():
            self._thread.join()
