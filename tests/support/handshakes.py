"""Processes that meet in a store, played by threads of the tests' process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed import Store, TCPStore

from tests.support.waiting import HANG
from towers.joining.participant import Participant
from towers.joining.store import Message, serve_store

TOKEN = "a secret of the tests"
KEYS = ("tower/0", "tower/1", "tower/number", "tower/answer1", "tower/met")
TOWER: Message = {"device": "cpu", "gpu": None}


def tower(index: int, *, port: int = 0, host: str = "127.0.0.1", **fields: Any) -> Participant:
    """The tower with this index of two."""
    process = Participant("tower", index, ("rank 0", "rank 1"), (host, port), index > 0, "a test", TOKEN, HANG)
    return dataclasses.replace(process, **fields)


def meet(store: Store, index: int, message: Message | None = None, **fields: Any) -> list[Message]:
    """Come to a handshake as :func:`tower` does; returns the messages of all."""
    message = {**TOWER, "index": index} if message is None else message
    answer = tower(index, **fields).handshake(store, message, {}, lambda *_: None, facts=lambda all_: {"all": all_})
    return list(answer["all"])


def together(come: Callable[..., Any], *stores: Store) -> list[Any]:
    """``come(store, 0)`` and ``come(other store, 1)`` at the same time."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(come, stores, range(2)))


def both_meet(first: Store, second: Store) -> None:
    """Two towers meet, each in its own view of a store, and read the same messages of both."""
    found, other = together(meet, first, second)
    assert found == other
    assert [message["index"] for message in found] == [0, 1]


def serve(host: str = "127.0.0.1") -> TCPStore:
    return serve_store(host, 0, "a test", TOKEN)


def join(store: TCPStore, host: str = "127.0.0.1", token: str = TOKEN) -> TCPStore:
    return tower(1, host=host, port=store.port, token=token).open_store()
