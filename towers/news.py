"""What the agents of several workers tell each other: which tower of the job failed first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch.distributed import PrefixStore, Store

from towers import cards
from towers.cards import NotACardError

_FIRST = "first"
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
        self.heard = self._read(self._store.get(_FIRST))
        self._store.add("heard", 1)

    def say(self, sentence: str) -> str:
        """Tell the others what has failed here; returns what failed first anywhere.

        The worker that serves the store stays until the others have heard it.
        """
        if self._store is None or self.heard is not None:
            return self.heard or sentence
        found: list[str] = []

        def say() -> None:
            assert self._store is not None
            card = cards.seal(self._token, _FIRST, {"sentence": sentence})
            found.append(self._read(self._store.compare_set(_FIRST, "", card)))

        self._in_thread(say).join(_PATIENCE)
        self.heard = found[0] if found else sentence
        return self.heard

    def _read(self, card: bytes) -> str:
        try:
            return cards.plain(cards.unseal(self._token, _FIRST, card).get("sentence"))
        except NotACardError:
            return "towers: another process, which is none of this job, says that something has failed"

    def await_what_was_said(self) -> str | None:
        """What another worker says has failed first; None when none says anything for a moment."""
        end = time.monotonic() + _PATIENCE
        while self._store is not None and self.heard is None and time.monotonic() < end:
            time.sleep(0.05)
        return self.heard

    def wait_until_heard(self) -> None:
        """Where this worker serves the store: until all have heard what was said, for a moment at most."""
        if self._store is None or self._worker != 0 or self.heard is None:
            return

        def wait() -> None:
            assert self._store is not None
            while self._store.add("heard", 0) < self._workers:
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
