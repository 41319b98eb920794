"""Unauthenticated peers in the store where towers meet: with replayed messages, forged ones, or none at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore, Store

import mirrored
from tests.support.clocks import Jumps
from tests.support.handshakes import KEYS, TOKEN, both_meet, join, meet, serve, together
from tests.support.jobs import towers
from tests.support.meeting import has_said, say, shorten_deadlines, wait_for
from tests.support.waiting import HANG, wait_until
from towers import HandshakeError, StartupError
from towers.joining.store import NotAMessageError, sign, verify
from towers.system.timeouts import clock

# -- replayed messages -----------------------------------------------------------------------------------------------


def recorded() -> dict[str, bytes]:
    """All that was stored in an earlier handshake of a job with the same token."""
    store = HashStore()
    both_meet(store, store)
    return {key: store.get(key) for key in KEYS if store.check([key])}


@pytest.mark.parametrize("live", [0, 1])
@pytest.mark.parametrize("all_of_it", [False, True])
def test_a_replayed_message_does_not_stand_for_a_tower_that_is_not_there(live: int, all_of_it: bool) -> None:
    store, gone = HashStore(), 1 - live
    old = recorded()
    store.set(f"tower/{gone}", old[f"tower/{gone}"])
    if all_of_it:
        for key in ("tower/number", "tower/answer1", "tower/met") if live else ():  # a chief's
            store.set(key, old[key])
    with pytest.raises(
        StartupError, match=rf"1 of 2 towers did not join within \d+ s: tower {gone} \(rank {gone}\)"
    ) as e:
        meet(store, live, seconds=0.3)
    assert "its entry in the store is a message of an earlier handshake, or of a process that has ended" in str(e.value)


def test_towers_that_have_read_different_messages_do_not_go_on() -> None:
    """An unauthenticated peer shows one tower a replayed message, and another one a new message."""
    old, first, second = recorded(), HashStore(), HashStore()
    first.set("tower/1", old["tower/1"])
    second.set("tower/0", old["tower/0"])
    for store in (first, second):
        with pytest.raises(StartupError, match="1 of 2 towers did not join"):
            meet(store, 0 if store is first else 1, seconds=0.2)


@pytest.mark.extended
def test_a_tower_that_is_missing_is_named_by_towers_that_wait_for_the_first() -> None:
    store, old = HashStore(), recorded()
    store.set("tower/2", sign(TOKEN, "tower/2", {**verify(TOKEN, "tower/1", old["tower/1"]), "index": 2}))

    def come(store: Store, index: int) -> str:
        wait_until(lambda: index == 0 or store.check(["tower/0"]))
        with pytest.raises(StartupError) as caught:
            meet(store, index, seconds=HANG if index == 0 else 1, names=["a", "b", "c"])
        return str(caught.value)

    first, second = together(come, store, store)
    assert first == second
    assert re.search(r"1 of 3 towers did not join within \d+ s: tower 2 \(c\) \(its entry in the store is", first)


# -- forged messages ---------------------------------------------------------------------------------------------


def test_a_message_that_is_overwritten_is_published_again() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as threads:
        second = threads.submit(meet, store, 1)
        for _ in range(5):
            wait_until(lambda: is_message(store, "tower/1"))
            store.set("tower/1", "overwritten")
        wait_until(lambda: is_message(store, "tower/1"))
        assert [message["index"] for message in meet(store, 0)] == [0, 1]
        assert [message["index"] for message in second.result()] == [0, 1]


def is_message(store: Store, key: str) -> bool:
    with contextlib.suppress(NotAMessageError):
        return store.check([key]) and bool(verify(TOKEN, key, store.get(key)))
    return False


def test_a_second_job_at_the_address_of_the_first_is_refused_before_and_after() -> None:
    store = serve()
    for _ in range(2):
        with pytest.raises(HandshakeError, match="tower 1 .* does not belong to the job that meets at"):
            join(store, token="another")
        both_meet(store, join(store))
        for key in KEYS:
            store.delete_key(key)


# -- no messages ------------------------------------------------------------------------------------------------

LINES = {
    "silence": b"",
    "a web browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "garbage": bytes(range(256)) * 8,
    "half a greeting": b"\x00\x3c",
    "a value of 2**60 bytes": b"\x00" + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 2**60),
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("kind", LINES)
def test_foreign_connections_hold_nobody_up(kind: str) -> None:
    """They come before the towers, and while these meet; they say something, and stay."""
    store = serve()
    with contextlib.ExitStack() as lines:

        def come(count: int) -> None:
            for _ in range(count):
                line = lines.enter_context(socket.create_connection(("127.0.0.1", store.port), timeout=HANG))
                with contextlib.suppress(OSError):  # it may have been hung up on
                    line.sendall(LINES[kind])

        come(30)
        with ThreadPoolExecutor() as threads:
            second = threads.submit(lambda: meet(join(store), 1))
            come(30)
            assert len(meet(store, 0)) == len(second.result()) == 2
        come(5)
        assert store.check(["tower/0"])


# -- other addresses, other times ----------------------------------------------------------------------------


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as line:
        line.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "0:0:0:0:0:0:0:1", "ip6-localhost"])
def test_towers_meet_by_ipv6(host: str) -> None:
    try:
        socket.getaddrinfo(host, 1, socket.AF_INET6)
    except OSError:
        pytest.skip(f"{host} is no name here")
    store = serve(host)
    both_meet(store, join(store, host))


def test_a_clock_that_is_set_decides_nothing_of_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "wall_time", Jumps())
    store = serve()
    both_meet(store, join(store))
    with pytest.raises(StartupError, match=r"did not join within \d+ s"):
        meet(HashStore(), 0, seconds=0.1)


# -- processes that are suspended ----------------------------------------------------------------------------


def _suspended(strategy: mirrored.Strategy, seconds: float, timeout: float) -> float:
    """Tower 0 waits for tower 1 while somebody suspends both: for ``seconds``, by tower 0's clock."""
    processes = strategy.gather(torch.tensor([os.getpid()])).tolist()
    if strategy.topology.index == 1:
        wait_for("waits")
        numbers = " ".join(map(str, processes))
        subprocess.run(["sh", "-c", f"kill -STOP {numbers}; sleep 0.5; kill -CONT {numbers}"], check=True)
        say("was suspended")
        wait_for("has waited on")
        return float(strategy.reduce("sum", 1.0))
    shorten_deadlines(timeout)
    waiting, looks = threading.get_ident(), 0

    def monotonic() -> float:
        """Stands still, but for the suspension, while the barrier looks at its deadline again and again."""
        nonlocal looks
        if strategy.health.waits is not None and threading.get_ident() == waiting:
            say("waits")
            looks += has_said("was suspended")
        if looks > 10:
            say("has waited on")
        return 1000.0 + (seconds if looks else 0.0)

    clock.monotonic = monotonic  # type: ignore[method-assign]
    try:
        return float(strategy.reduce("sum", 1.0))
    finally:
        say("has waited on")
        del clock.monotonic


@pytest.mark.extended
def test_a_job_that_was_suspended_for_longer_than_the_deadline_goes_on() -> None:
    assert towers(_suspended, 12.0, 10.0) == [2.0, 2.0]


def _stopped(strategy: mirrored.Strategy) -> str:
    """Tower 0 stops tower 1; what both come to."""
    _, other = strategy.gather(torch.tensor([os.getpid()])).tolist()
    if strategy.topology.index == 0:
        os.kill(other, signal.SIGSTOP)
        wait_until(lambda: pathlib.Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        shorten_deadlines(2)
    try:
        for _ in range(3):  # tower 1 may have come to the first one, and finds tower 0 in the second
            strategy.reduce("sum", 1.0)
    except (mirrored.CollectiveTimeoutError, mirrored.PeerLostError) as error:
        return str(error)
    return "no error"


@pytest.mark.extended
def test_a_stopped_tower_is_woken_to_hear_that_the_others_end() -> None:
    """torchrun would wait half a minute for it to end."""
    first, second = towers(_stopped)
    assert "tower 0 waited 2 s for tower 1" in first
    assert "tower 0" in second
    assert "broke off" in second or "ended" in second
