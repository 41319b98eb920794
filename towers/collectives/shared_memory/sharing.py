"""Exchanges segments: every tower of one host maps every other tower's."""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch

from towers.collectives.communicator import PeerGroup, from_bytes
from towers.collectives.shared_memory import semaphores
from towers.collectives.shared_memory.segment import Segment, aligned

_TOKEN = 16  # bytes


def map_segments(comm: PeerGroup, nbytes: int, waiting: int) -> tuple[list[Segment], list[int]]:
    """Returns every tower's segment, and every tower's process id. All towers call it.

    It does not assume that towers run on one host, but tries: each tower maps the others' memory and looks there for a
    token that they have sent.

    Args:
        nbytes: size of a segment, at least.
        waiting: the number of semaphores at the start of a segment.

    Raises:
        OSError: on all towers with one message, if one could not allocate or map them.
    """
    token, at = secrets.token_bytes(_TOKEN), aligned(nbytes)
    offer: dict[str, Any] = {"process": os.getpid(), "token": token.hex()}
    own = None
    try:
        if not semaphores.available():
            raise OSError("this system has no semaphores that processes can share")
        own = Segment.create(at + _TOKEN, reserve=False)
        for number in range(waiting):
            semaphores.create(own.address + semaphores.BYTES * number)
        own.tensor(torch.uint8, _TOKEN, at).copy_(from_bytes(token))
        offer["file"] = own.file
    except OSError as error:
        offer["problem"] = str(error)
    offers = comm.all_gather_json(offer)
    problem = next((f"tower {i}: {other['problem']}" for i, other in enumerate(offers) if "problem" in other), "")
    segments = []
    if own is not None and not problem:
        try:
            segments = [own if tower == comm.index else _open(other, at) for tower, other in enumerate(offers)]
        except OSError as error:
            problem = f"tower {comm.index}: {error}"
    results = [text.decode() for text in comm.all_gather_bytes(problem.encode())]
    if own is not None:
        own.close_file()  # every tower that is able to has mapped it
    if any(results):
        raise OSError(next(filter(None, results)))
    return segments, [other["process"] for other in offers]


def _open(offer: dict[str, Any], at: int) -> Segment:
    segment = Segment.open(offer["process"], offer["file"])
    if segment.nbytes < at + _TOKEN or bytes(segment.memory(_TOKEN, at)).hex() != offer["token"]:
        raise OSError(f"the memory of process {offer['process']} is not there: it runs in another container")
    return segment
