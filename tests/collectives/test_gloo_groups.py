"""Groups that Gloo connects: forming and leaving them, and waiting for their collectives, which may end at any time."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mirrored
from tests.support.jobs import GLOO, towers
from tests.support.late import take_turns
from tests.support.meeting import has_said, say, wait_for
from tests.support.processes import has_ended
from tests.support.waiting import wait_until
from towers.collectives import process_group
from towers.collectives.process_group import ProcessGroupCommunicator

pytestmark = pytest.mark.extended


def leave_channels(strategy: mirrored.Strategy) -> None:
    channels: list[Any] = []

    def leave() -> None:
        dist.destroy_process_group(channels[0]._group)
        channels.clear()
        gc.collect()
        process_group._unused.clear()  # where c10d's group would wait for the next one to be made

    take_turns([0, 1] * 3, lambda: channels.append(strategy.communicator.channel()), leave)


def test_a_tower_that_leaves_once_it_has_a_channel_cuts_nobody_off() -> None:
    """As one does whose script ends when it has made its strategy, which makes a channel at last."""
    towers(leave_channels, settings=GLOO)


def return_while_gathering(strategy: mirrored.Strategy) -> list[list[float]]:
    """Tower 0 takes part in tower 1's gather when that tower ends: it runs its exit handlers, or is gone."""
    comm = strategy.communicator
    process = int(comm.all_gather(torch.tensor([os.getpid()]))[1])
    if comm.index == 1:
        atexit.register(say, "tower 1 ends")
        _, rows = comm.start_all_gather(torch.ones(2))
    else:
        wait_until(lambda: has_said("tower 1 ends") or has_ended(process))
        rows = comm.all_gather(torch.zeros(2))
    return rows.tolist()


def test_a_launched_tower_that_is_done_takes_part_in_collectives_that_it_has_started() -> None:
    assert towers(return_while_gathering, settings=GLOO)[0] == [[0, 0], [1, 1]]


class DescheduledAfterMoment:
    """A real collective, whose process stands still from the end of a moment until the collective has ended."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.wait = work.wait
        self.moments = 0

    def is_completed(self) -> bool:
        self.moments += 1
        say("a moment has passed")
        wait_until(self._work.is_completed)
        return True


def reduce_just_after_a_moment(strategy: mirrored.Strategy) -> tuple[float, int]:
    comm = strategy.communicator
    assert isinstance(comm, ProcessGroupCommunicator)
    total = torch.ones(3)
    comm.barrier()
    if comm.index == 1:
        wait_for("a moment has passed")
    work = DescheduledAfterMoment(dist.all_reduce(total, async_op=True))
    comm.wait_for(work, comm.count)
    return float(total.sum()), work.moments


def test_a_collective_that_ends_just_after_a_moment_is_done() -> None:
    assert towers(reduce_just_after_a_moment, settings=GLOO) == [(6.0, 1), (6.0, 0)]


def sockets_after_a_barrier(strategy: mirrored.Strategy) -> int:
    strategy.barrier()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    strategy.barrier()
    return found


def test_towers_connect_to_those_that_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    some = towers(sockets_after_a_barrier, count=5, settings=GLOO)
    monkeypatch.setenv(process_group.LAZY, "0")
    all_pairs = towers(sockets_after_a_barrier, count=5, settings=GLOO)
    assert sum(some) < sum(all_pairs)


def groups_of_parts(strategy: mirrored.Strategy, of_the_script: bool) -> tuple[int, list[float]]:
    """The script may have made a group of towers 0 and 1 alone, so that c10d counts more groups on these."""
    comm = strategy.communicator
    assert isinstance(comm, ProcessGroupCommunicator)
    if of_the_script and comm.index < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    part = comm.among([[0, 2], [1]])
    assert part is not None
    sizes = torch.tensor([float(comm.index)])
    part.all_reduce(sizes)
    return part.size, sizes.tolist()


@pytest.mark.parametrize("of_the_script", [False, True])
def test_towers_make_the_groups_of_their_parts_whichever_groups_they_have(of_the_script: bool) -> None:
    assert towers(groups_of_parts, of_the_script, count=3, settings=GLOO) == [(2, [2.0]), (1, [1.0]), (2, [2.0])]
