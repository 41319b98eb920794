"""Memory that all towers of one host give each other."""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

import torch

from towers.collectives.communicator import Communicator
from towers.collectives.shared_memory import semaphores
from towers.collectives.shared_memory.segment import Segment, aligned

_TOKEN = 16  # bytes


def share(comm: Communicator, nbytes: int, waiting: int = 0) -> tuple[list[Segment], list[int]]:
    """A segment of every tower's, and every tower's process id. All towers call it.

    That towers run on one host is not believed but tried: each maps the others' memory and looks for what they wrote
    there.

    Args:
        nbytes: size of a segment, at least.
        waiting: how many semaphores it begins with.

    Raises:
        OSError: on all towers with one text, when one could not make or map them.
    """
    token, at = secrets.token_bytes(_TOKEN), aligned(nbytes)
    card: dict[str, Any] = {"process": os.getpid(), "token": token.hex()}
    mine = None
    try:
        if waiting and not semaphores.available():
            raise OSError("this system has no semaphores that processes can share")
        mine = Segment.create(at + _TOKEN, reserve=False)
        for number in range(waiting):
            semaphores.create(mine.address + semaphores.BYTES * number)
        mine.tensor(torch.uint8, _TOKEN, at).copy_(torch.frombuffer(bytearray(token), dtype=torch.uint8))
        card["file"] = mine.file
    except OSError as error:
        card["problem"] = str(error)
    cards = [json.loads(text) for text in comm.all_gather_bytes(json.dumps(card).encode())]
    problem = next((f"tower {i}: {other['problem']}" for i, other in enumerate(cards) if "problem" in other), "")
    segments = []
    if mine is not None and not problem:
        try:
            segments = [mine if tower == comm.index else _open(other, at) for tower, other in enumerate(cards)]
        except OSError as error:
            problem = f"tower {comm.index}: {error}"
    verdicts = [text.decode() for text in comm.all_gather_bytes(problem.encode())]
    if mine is not None:
        mine.withdraw()  # all have mapped it who could
    if any(verdicts):
        raise OSError(next(filter(None, verdicts)))
    return segments, [other["process"] for other in cards]


def _open(card: dict[str, Any], at: int) -> Segment:
    segment = Segment.open(card["process"], card["file"])
    if segment.nbytes < at + _TOKEN or bytes(segment.memory(_TOKEN, at)).hex() != card["token"]:
        raise OSError(f"the memory of process {card['process']} is not there: it runs in another container")
    return segment
