"""Memory that all towers of one host give each other."""

from __future__ import annotations

import json
import os

from towers.collectives import semaphores
from towers.collectives.communicator import Communicator
from towers.collectives.segment import Segment


def share(comm: Communicator, nbytes: int, waiting: int = 0) -> tuple[list[Segment], list[int]]:
    """A segment of every tower's, and every tower's process id.

    Args:
        nbytes: size of a segment.
        waiting: how many semaphores it begins with.

    Raises:
        OSError: on all towers, when one could not make or map them.
    """
    card: dict[str, object] = {"process": os.getpid()}
    mine = None
    try:
        mine = Segment.create(nbytes, reserve=False)
        for number in range(waiting):
            semaphores.create(mine.address + semaphores.BYTES * number)
        card["file"] = mine.file
    except OSError as error:
        card["problem"] = str(error)
    cards = [json.loads(text) for text in comm.all_gather_bytes(json.dumps(card).encode())]
    problem = next((f"tower {i}: {other['problem']}" for i, other in enumerate(cards) if "problem" in other), "")
    segments = []
    if mine is not None and not problem:
        try:
            for tower, other in enumerate(cards):
                segments.append(mine if tower == comm.index else Segment.open(other["process"], other["file"]))
        except OSError as error:
            problem = f"tower {comm.index}: {error}"
    verdicts = [text.decode() for text in comm.all_gather_bytes(problem.encode())]
    if mine is not None:
        mine.withdraw()  # all have mapped it who could
    if any(verdicts):
        raise OSError(next(filter(None, verdicts)))
    return segments, [other["process"] for other in cards]
