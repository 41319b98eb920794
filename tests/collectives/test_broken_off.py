"""Collectives that are broken off: a tower that dies, an interrupt, a failure between two stages."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch

import mirrored
from tests.support.jobs import towers
from tests.support.meeting import meet, say, wait_for
from tests.support.waiting import wait_until
from towers import errors as towers_errors
from towers.collectives import values
from towers.collectives.shared_memory import regions, semaphores
from towers.collectives.shared_memory.barrier import PeerProcesses


def die_while_others_wait(strategy: mirrored.Strategy) -> None:
    record = strategy.health.record
    if strategy.topology.index == 1:
        others = [record.of_peer(tower) for tower in (0, 2)]
        wait_until(lambda: all(other is not None and other.read().call for other in others))
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.reduce("sum", torch.ones(100_000))


def test_a_tower_that_dies_in_a_collective_is_named() -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        towers(die_while_others_wait, count=3)
    assert caught.value.tower == 1
    others = [failure for failure in caught.value.failures if failure.tower != 1]
    assert len(others) == 2
    for failure in others:
        assert failure.consequence
        assert "tower 1 (process" in failure.traceback
        assert f"ended while tower {failure.tower} waited for it in a collective" in failure.traceback


class InterruptError(Exception):
    """As a signal handler raises it: of a watchdog, of a test's time-out, of Ctrl-C."""


def interrupted(number: int, frame: object) -> None:
    raise InterruptError


def result_of(call: Callable[[], object]) -> str:
    """What comes of a collective: "done", or what it raises. It is called in a handler, where errors are not final."""
    try:
        raise LookupError
    except LookupError:
        try:
            call()
            return "done"
        except (InterruptError, towers_errors.TowersError) as error:
            return str(error) or type(error).__name__


def interrupt_when_it_waits(strategy: mirrored.Strategy) -> None:
    wait_until(lambda: strategy.health.waits is not None)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)


def go_on_after_an_interrupt(strategy: mirrored.Strategy, size: int) -> list[object]:
    """Tower 0 is interrupted while it waits for tower 1; both go on with further all-reduces."""
    comm = strategy.communicator
    comm.barrier()
    if comm.index == 0:
        signal.signal(signal.SIGALRM, interrupted)
        threading.Thread(target=interrupt_when_it_waits, args=(strategy,)).start()
    else:
        wait_for("tower 0 is interrupted")
    found: list[object] = []
    for value in range(1, 5):
        total = torch.full((size,), float(value))
        found.append(result_of(lambda total=total: comm.all_reduce(total)))
        if found[-1] == "done":
            found[-1] = total.unique().tolist()
        else:
            say(f"tower {comm.index} is interrupted")
    meet("the end")  # of a tower that has ended the others would say that
    return found


@pytest.mark.parametrize("size", [1000, 100_000])  # one barrier, and several
def test_after_a_collective_was_broken_off_there_is_no_other(size: int) -> None:
    first, second = towers(go_on_after_an_interrupt, size)
    assert first[0] == "InterruptError"
    assert all("tower 0 is out of step with the others" in text and "InterruptError" in text for text in first[1:])
    if size == 1000:  # tower 0 had come before it was interrupted, and one barrier was all that tower 1 needed
        assert second.pop(0) == [2.0]
    assert "tower 0 broke off a collective in which tower 1 waits for it" in second[0]
    assert "InterruptError" in second[0]
    assert all("tower 1 is out of step with the others" in text for text in second[1:])


def fail_between(strategy: mirrored.Strategy, where: str) -> list[str]:
    """Tower 0 fails between two stages of what towers do together; both go on with all-reduces."""
    comm = strategy.communicator
    comm.all_gather(torch.zeros(1))  # all have come to this line
    if comm.index == 0:
        if where == "average":
            regions.add_by_tree = regions.reduce_into = interrupted_call
        else:
            values.all_reduce_together = values.concatenate = interrupted_call
    region = comm.allocate(0, 100_000, torch.float32, comm.device).fill_(1.0)
    calls = {
        "average": lambda: comm.submit_average(region).wait(),
        "reduce": lambda: strategy.reduce("sum", torch.ones(1000)),
        "gather": lambda: strategy.gather(torch.ones(1000)),
    }
    found = [result_of(calls[where]) for _ in range(3)]
    meet("the end")
    return found


def interrupted_call(*args: object, **kwargs: object) -> None:
    raise InterruptError


@pytest.mark.parametrize("where", ["average", "reduce", "gather"])
def test_what_fails_between_two_stages_is_broken_off(where: str) -> None:
    first, second = towers(fail_between, where)
    assert first[0] == "InterruptError"
    assert all("tower 0 is out of step with the others" in text for text in first[1:])
    assert "tower 0 broke off a collective in which tower 1 waits for it" in second[0]
    assert all("tower 1 is out of step with the others" in text for text in second[1:])


def go_on_in_different_collectives(strategy: mirrored.Strategy) -> list[str]:
    """Tower 0 sends a message, tower 1 is in an all-reduce; both go on with messages."""
    comm = strategy.communicator
    message = lambda: comm.all_gather_bytes(b"here")  # noqa: E731
    first = message if comm.index == 0 else lambda: comm.all_reduce(torch.ones(32, dtype=torch.float64))
    found = [result_of(call) for call in (first, message, message)]
    meet("the end")
    return found


def test_different_collectives_are_an_error_of_the_towers() -> None:
    first, second = towers(go_on_in_different_collectives)
    assert first[0].startswith("another tower is in another collective than 0")
    assert all("tower 0 is out of step with the others" in text for text in first[1:])
    assert "another tower is in another collective than 0" in second[1]
    assert "tower 1 is out of step with the others" in second[2]


def fail_across_hosts(strategy: mirrored.Strategy) -> str:
    """The first tower of host "a" cannot reach the other host; the second waits for its result."""
    result = "no error"
    try:
        strategy.communicator.all_reduce(torch.zeros(3, dtype=torch.int16))  # Gloo has none
    except RuntimeError as error:
        result = str(error)
    meet("the end")
    return result


def test_what_fails_across_hosts_ends_for_all_towers_of_a_host() -> None:
    leader, follower, elsewhere = towers(fail_across_hosts, count=3, hosts="aab")
    assert "Invalid scalar type" in leader
    assert "tower 0 broke off a collective in which tower 1 waits for it" in follower
    assert "Invalid scalar type" in elsewhere


def end_before_another_has_left(strategy: mirrored.Strategy) -> int:
    """Tower 2 signals its arrival to tower 0, and to tower 1 only when that one has seen the end of tower 0."""
    comm = strategy.communicator
    comm.barrier()
    if comm.index == 1:
        gone = PeerProcesses.gone

        def gone_announced(peers: PeerProcesses) -> list[int]:
            if found := gone(peers):
                say("tower 1 has seen the end of tower 0")
            return found

        PeerProcesses.gone = gone_announced
    if comm.index == 2:
        post = semaphores.post

        def post_late(address: int) -> None:
            post(address)
            wait_for("tower 1 has seen the end of tower 0")

        semaphores.post = post_late
    comm.barrier()
    return comm.index


def test_a_tower_may_end_before_another_has_left_the_last_barrier() -> None:
    assert towers(end_before_another_has_left, count=3) == [0, 1, 2]
