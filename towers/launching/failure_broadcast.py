"""What the agents of several workers tell each other: which tower of the job failed first, and whose have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import PrefixStore, Store

from towers.joining import messages
from towers.joining.messages import NotACardError

_FIRST, _HEARD, _ENDED = "first", "heard", "ended"
_INTERVAL = 0.5  # seconds between two looks
_PATIENCE = 1.5  # seconds for the store to answer, and for the others to read what is said


class News:
    """One worker's part of it. With one worker there is nothing to tell.

    Args:
        token: the job's.

    Attributes:
        heard: what another worker has said, once it has been heard.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self.heard: str | None = None
        self._store: Store | None = None
        self._workers = 1
        self._worker = 0

    def listen(self, store: Store | None, worker: int, workers: int) -> None:
        """Listen from now on, in a thread: a store whose host is gone may not answer.

        Args:
            store: the agents' own.
            worker, workers: this one, and how many there are.
        """
        if store is None or workers == 1:
            return
        self._store = PrefixStore("towers/news", store.clone())  # type: ignore[attr-defined]
        self._worker, self._workers = worker, workers
        self._in_thread(self._listen)

    def _listen(self) -> None:
        assert self._store is not None
        while not self._store.check([_FIRST]):
            time.sleep(_INTERVAL)
        self.heard = self._read(_FIRST, self._store.get(_FIRST))
        self._store.add(_HEARD, 1)

    def say(self, sentence: str) -> str:
        """Tell the others what has failed here; returns what failed first anywhere.

        The worker that serves the store stays until the others have heard it.
        """
        if self._store is None or self.heard is not None:
            return self.heard or sentence
        found: list[str] = []

        def say() -> None:
            assert self._store is not None
            card = messages.seal(self._token, _FIRST, {"sentence": sentence})
            found.append(self._read(_FIRST, self._store.compare_set(_FIRST, "", card)))

        self._in_thread(say).join(_PATIENCE)
        self.heard = found[0] if found else sentence
        return self.heard

    def _read(self, place: str, card: bytes) -> str:
        try:
            return messages.plain(messages.unseal(self._token, place, card).get("sentence"))
        except NotACardError:
            return "towers: another process, which is none of this job, says that something has failed"

    def await_what_was_said(self) -> str | None:
        """What another worker says has failed first; None when none says anything for a moment."""
        end = time.monotonic() + _PATIENCE
        while self._store is not None and self.heard is None and time.monotonic() < end:
            time.sleep(0.05)
        return self.heard

    def say_ended(self, sentence: str) -> None:
        """Tell the others that the towers of this worker have ended well, and where the first of them was."""

        def say() -> None:
            assert self._store is not None
            place = f"{_ENDED}{self._worker}"
            self._store.set(place, messages.seal(self._token, place, {"sentence": sentence}))

        if self._store is not None:
            self._in_thread(say).join(_PATIENCE)

    def ended(self) -> Sequence[str]:
        """What the others have told of towers that have ended well."""
        found: list[str] = []

        def look() -> None:
            assert self._store is not None
            for place in (f"{_ENDED}{worker}" for worker in range(self._workers) if worker != self._worker):
                if self._store.check([place]):
                    found.append(self._read(place, self._store.get(place)))

        if self._store is not None:
            self._in_thread(look).join(_PATIENCE)
        return list(found)

    def await_ends(self, seconds: float) -> None:
        """Wait until all workers have told that their towers have ended well, or one that something has failed."""
        end = time.monotonic() + seconds

        def all_ended() -> bool:
            return len(self.ended()) == self._workers - 1

        while self._store is not None and self.heard is None and time.monotonic() < end and not all_ended():
            time.sleep(_INTERVAL / 2)
        if self._store is not None and self.heard is None:
            self._leave_together()

    def _leave_together(self) -> None:
        """The store stays until all have seen that all have ended, for a moment at most."""

        def leave() -> None:
            assert self._store is not None
            self._store.add("left", 1)
            while self._worker == 0 and self._store.add("left", 0) < self._workers:
                time.sleep(0.05)

        self._in_thread(leave).join(_PATIENCE)

    def wait_until_heard(self) -> None:
        """Where this worker serves the store: until all have heard what was said, for a moment at most."""
        if self._store is None or self._worker != 0 or self.heard is None:
            return

        def wait() -> None:
            assert self._store is not None
            while self._store.add(_HEARD, 0) < self._workers:
                time.sleep(0.05)

        self._in_thread(wait).join(_PATIENCE)

    @staticmethod
    def _in_thread(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception:  # the store is gone, and with it the worker that served it
                return

        thread = threading.Thread(target=run, name="towers-news", daemon=True)
        thread.start()
        return thread
