"""What c10d gets for a collective that was started: Work, done or under way, in the order of the calls."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from towers.c10d.mail import Expected
from towers.errors import CollectiveTimeoutError


class Done(dist.Work):
    """A collective that is over.

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
        return self.exception() is None

    def exception(self) -> Any:
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        raise RuntimeError("only what receives from anybody has a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class Started(Done):
    """A collective that runs in a thread, or will."""

    def __init__(self, task: Callable[[], None], tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self._task: Callable[[], None] | None = task
        self._over = threading.Event()
        self._error: Exception | None = None
        self._future: Any = torch.futures.Future()

    def run(self) -> None:
        """Do it; called once."""
        assert self._task is not None
        try:
            self._task()
        except Exception as error:
            self._error = error
        self._task = None  # lets go of the tensors it has
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

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error

    def get_future(self) -> Any:
        return self._future


class Receiving(Done):
    """A message that is to come, into ``tensors``.

    Args:
        arrived: called once when it is there.
    """

    def __init__(self, expected: Expected, tensors: Sequence[Tensor], arrived: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._expected, self._arrived = expected, arrived
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._over = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._over:
                try:
                    self._expected.wait(seconds if seconds > 0 else None)
                except Exception as error:
                    self._error = error
                    raise
                self._arrived()
                self._over = True
        return True

    def is_completed(self) -> bool:
        if not self._over and self._error is None and self._expected.look():
            with contextlib.suppress(Exception):  # kept for who asks for it
                self.wait()
        return self._over or self._error is not None

    def is_success(self) -> bool:
        return self._over

    def exception(self) -> Any:
        return self._error

    def source_rank(self) -> int:
        assert self._expected.source is not None
        return self._expected.source

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()

        def wait() -> None:
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._tensors)

        threading.Thread(target=wait, name="towers-receive", daemon=True).start()
        return future


class Line:
    """Runs collectives in the order they were called in: in the caller, or for who does not wait in a thread.

    What is called in that thread, by a function that was to run when a future is there, runs at once: the function may
    wait for it (DDP's PowerSGD hook does), and so it has the same place in the order on all ranks, whether the future
    was there when it got the function or came later.
    """

    def __init__(self) -> None:
        self._waiting: deque[Started] = deque()
        self._changed = threading.Condition()
        self._running = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, task: Callable[[], None], tensors: Sequence[Tensor]) -> Done:
        """Do it, after all that was started; errors are raised."""
        if self._waiting and not self._in_thread():
            work = self.start(task, tensors)
            work.wait()
            return work
        with self._running:
            task()
        return Done(tensors)

    def start(self, task: Callable[[], None], tensors: Sequence[Tensor]) -> Started:
        """Do it beside the caller; errors are raised by who waits for it."""
        work = Started(task, tensors)
        if self._in_thread():
            work.run()
            return work
        with self._changed:
            self._waiting.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="towers-collectives", daemon=True)
                self._thread.start()
            self._changed.notify()
        return work

    def _in_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                work = self._waiting[0]
            with self._running:
                work.run()
            with self._changed:
                self._waiting.popleft()  # only now: who looks whether anything is waiting must see it until it is done
            del work

    def close(self) -> None:
        """Return when all that was started is done."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and not self._in_thread():
            self._thread.join()
