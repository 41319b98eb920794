"""What is wrong on one tower is an error on all of them, with one text."""

from __future__ import annotations

from mirrored.checkpoint.errors import CheckpointError
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator

_LONGEST = 4000  # letters of a problem, which may quote what a stranger has written


def first_problem(comm: Communicator, call: str, problem: str) -> str:
    """The problem of the first tower that has one, with its name where there are several; empty when none has."""
    problems = [said.details for said in announce(comm, call, problem[:_LONGEST])]
    return next((f"tower {i}: {p}" if comm.size > 1 else p for i, p in enumerate(problems) if p), "")


def raise_first(comm: Communicator, call: str, problem: str) -> None:
    """Raise the first tower's problem on all towers, if any has one.

    Raises:
        CheckpointError: some tower has.
    """
    if found := first_problem(comm, call, problem):
        raise CheckpointError(found)
