"""Waiting for a collective: it may end at any time."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

import mirrored
from towers.collectives.process_group import ProcessGroupCommunicator


class DescheduledAfterMoment:
    """A real collective, whose process stands still from the end of a moment until the collective has ended."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.wait = work.wait

    def is_completed(self) -> bool:
        while not self._work.is_completed():
            time.sleep(0.01)
        return True


def reduce_just_after_a_moment() -> tuple[float, bool]:
    communication = mirrored.CommunicationOptions(implementation="gloo")
    comm = mirrored.MirroredStrategy(communication=communication).communicator
    assert isinstance(comm, ProcessGroupCommunicator)
    total = torch.ones(3)
    comm.barrier()
    if comm.index == 1:
        time.sleep(0.8)  # longer than the moment
    began = time.monotonic()
    work = DescheduledAfterMoment(dist.all_reduce(total, async_op=True))
    comm.wait_for(work, comm.count)
    return float(total.sum()), time.monotonic() - began > 0.5


def test_a_collective_that_ends_just_after_a_moment_is_done() -> None:
    found = mirrored.launch(reduce_just_after_a_moment, devices=["cpu:0", "cpu:1"], timeout=60)
    assert found == [(6.0, True), (6.0, False)]
