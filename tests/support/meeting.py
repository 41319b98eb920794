"""Towers of a test that wait for each other without a collective, and deadlines that begin where they have met."""

from __future__ import annotations

import gc
import os
import pathlib
from datetime import timedelta

from torch.distributed import distributed_c10d

from tests.support.waiting import wait_until
from towers.collectives.process_group import ProcessGroupCommunicator
from towers.collectives.shared_memory.barrier import Barrier
from towers.topology import STATUS_RECORD

FOLDER = "TESTS_MEETING_FOLDER"
"""Names the folder where towers meet that ``mirrored.launch`` has not started."""


def _path(what: str) -> pathlib.Path:
    folder = os.environ.get(FOLDER) or os.path.dirname(os.environ[STATUS_RECORD])
    return pathlib.Path(folder, f"said {what}")


def say(what: str) -> None:
    """Let all towers of the job know."""
    _path(what).touch()


def has_said(what: str) -> bool:
    """Whether some tower has said it."""
    return _path(what).exists()


def wait_for(what: str) -> None:
    """Return when some tower has said it."""
    wait_until(lambda: has_said(what))


def meet(where: str) -> None:
    """Return when all towers have come here."""
    say(f"{where} {os.environ['RANK']}")
    for tower in range(int(os.environ["WORLD_SIZE"])):
        wait_for(f"{where} {tower}")


def shorten_deadlines(seconds: float) -> None:
    """From now on collectives of this process may take so long only.

    Called where the towers have met, so that no deadline depends on how long they take to start.
    """
    for thing in gc.get_objects():
        if type(thing) is Barrier:
            thing._timeout = seconds
        elif type(thing) is ProcessGroupCommunicator:
            thing._timeout = timedelta(seconds=seconds)
            distributed_c10d._set_pg_timeout(thing._timeout, thing._group)
