"""c10d groups that one of two towers forms late: what it still has to do when the other one leaves them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.support.meeting import has_said, meet, say
from tests.support.waiting import wait_until


class _Late(dist.Store):
    """A store that first answers when somebody has said ``what``, or after a second."""

    def __init__(self, store: dist.Store, what: str) -> None:
        super().__init__()
        self._store, self._what = store, what

    def get(self, key: str) -> bytes:
        what, self._what = self._what, ""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not what or has_said(what), 1.0)
        return self._store.get(key)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, number: int) -> int:
        return self._store.add(key, number)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, *(() if timeout is None else (timeout,)))


def take_turns(late: Sequence[int], form: Callable[[], object], leave: Callable[[], object]) -> None:
    """Form c10d groups beside the default one, each on one tower ``late``, and leave each as soon as it is formed.

    Which of two towers connects to the other is Gloo's choice, and only the other one can be cut off: so each tower has
    to be late several times.
    """
    stores: Any = dist.distributed_c10d._world.pg_map
    backend, store = stores[dist.group.WORLD]
    rank, kept = int(os.environ["RANK"]), []
    for number, tower in enumerate(late):
        if rank == tower:
            kept.append(_Late(store, f"left {number}"))
            stores[dist.group.WORLD] = (backend, kept[-1])
        form()
        stores[dist.group.WORLD] = (backend, store)
        leave()
        say(f"left {number}")
        meet(f"round {number}")
