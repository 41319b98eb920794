"""Waiting for a collective: it may end at any time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import mirrored
from tests.support.meeting import say, wait_for
from tests.support.waiting import HANG, wait_until
from towers.collectives.process_group import ProcessGroupCommunicator


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


def reduce_just_after_a_moment() -> tuple[float, int]:
    communication = mirrored.CommunicationOptions(implementation="gloo")
    comm = mirrored.MirroredStrategy(communication=communication).communicator
    assert isinstance(comm, ProcessGroupCommunicator)
    total = torch.ones(3)
    comm.barrier()
    if comm.index == 1:
        wait_for("a moment has passed")
    work = DescheduledAfterMoment(dist.all_reduce(total, async_op=True))
    comm.wait_for(work, comm.count)
    return float(total.sum()), work.moments


def test_a_collective_that_ends_just_after_a_moment_is_done() -> None:
    found = mirrored.launch(reduce_just_after_a_moment, devices=["cpu:0", "cpu:1"], timeout=HANG)
    assert found == [(6.0, 1), (6.0, 0)]
