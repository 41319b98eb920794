"""Announcements: every communicating call of user code first compares the calls of all towers.

If towers call different collectives, backends return garbage, abort or hang. After an announcement, the mistake is one
error with the same message on all towers.

[Note: requests are answered a step later] A tower's request to all towers at a step, such as to save or to stop, is
sent while the next step runs. So no tower waits for it, and all towers receive it at the same step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from towers.collectives.communicator import Communicator, Pending
from towers.errors import DECIDE_TOGETHER, DisagreementError
from towers.system.messages import digest_of, name_towers

_T = TypeVar("_T")


@dataclass(frozen=True)
class Announcement:
    """One tower's announcement.

    Attributes:
        details: JSON values.
        body: bytes that were sent with it.
    """

    details: Any
    body: bytes


def announce(comm: Communicator, call: str, details: Any = None, *, error: Exception | None = None) -> list[Any]:
    """Makes an announcement without a body, see :func:`announce_with_body`. Returns all towers' details, in order."""
    return [announcement.details for announcement in announce_with_body(comm, call, details, error=error)]


def announce_with_body(
    comm: Communicator, call: str, details: Any = None, body: bytes = b"", error: Exception | None = None
) -> list[Announcement]:
    """Announces this tower's call to all towers, and returns all announcements, in tower order.

    Args:
        call: a description of the call for users; must be the same on all towers.
        details: JSON values that may differ.
        error: why this tower cannot continue; it is raised on all towers.

    Raises:
        DisagreementError: towers make different calls.
        TypeError: some tower's ``error`` is one.
        ValueError: some tower has another ``error``.
    """
    header = {"call": call, "details": details, "error": error and [type(error).__name__, str(error)]}
    description = json.dumps(header, default=str).encode()
    with comm.health.at(call):
        messages = comm.all_gather_messages(description, body)
    if error is None and all(other is description for other, _ in messages):
        details = None if details is None else json.loads(description)["details"]
        return [Announcement(details, body) for _, body in messages]
    try:
        headers = [json.loads(other) for other, _ in messages]
    except ValueError:  # the message of a collective that is not announced
        others = [tower for tower, (other, _) in enumerate(messages) if not other.startswith(b'{"call"')]
        whose = name_towers(others) if others else "another tower"
        raise DisagreementError(
            f"the towers made different calls: tower {comm.index} {call}, and {whose} something else; every tower "
            "must "
            f"make the same calls in the same order. {DECIDE_TOGETHER}"
        ) from None
    for tower, other in enumerate(headers):
        if other["error"] is not None:
            kind, text = other["error"]
            raise (TypeError if kind == "TypeError" else ValueError)(f"{other['call']} on tower {tower}: {text}")
    for tower, other in enumerate(headers):
        if other["call"] != headers[0]["call"]:
            raise DisagreementError(
                f"the towers made different calls: tower {tower} {other['call']}, tower 0 {headers[0]['call']}; "
                f"every tower must make the same calls in the same order. {DECIDE_TOGETHER}"
            )
    return [Announcement(other["details"], body) for other, (_, body) in zip(headers, messages, strict=True)]


def agree(comm: Communicator, call: str, options: dict[str, Any]) -> None:
    """Checks that all towers have the same ``options``, JSON values by name.

    Raises:
        DisagreementError: on all towers, with the name of the first option that differs.
    """
    towers = announce(comm, call, options)
    for tower, other in enumerate(towers):
        for name, value in towers[0].items():
            if other[name] != value:
                raise DisagreementError(
                    f"{call}: {name} is {value!r} on tower 0, but {other[name]!r} on tower {tower}; give all towers one"
                )


_REPEATS = 8  # backwards
_LONGEST = 64  # calls between two backwards that are kept one by one


class RepeatedCalls:
    """Calls that scripts repeat in their steps, for which hosts of accelerators do not wait for each other each time.

    A call is announced, unless the tower has also run it during the last :data:`_REPEATS` backwards. Then it is only
    noted, and the towers' notes are compared together with their next backwards
    (:class:`towers.gradients.flags.Comparison`). A tower whose host waits in another call detects the difference
    sooner, in heartbeats (:mod:`towers.health.deadlock`).

    Args:
        comm: a communicator of the towers.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._backwards = 0
        self._noted: list[str] = []  # since the last backward
        self._newest: dict[str, int] = {}  # by call: the number of backwards before its last run

    def compare(self, call: str) -> None:
        """Compares a call with the other towers': announces it, or notes it.

        Raises:
            DisagreementError: on all towers, if it is new and others make another call.
        """
        self.compare_by(call, lambda: self.announce(call))

    def compare_by(self, call: str, announce: Callable[[], _T]) -> _T | None:
        """Returns the result of ``announce``, or None if the call was only noted.

        If ``announce`` raises an exception, it does so on all towers, and none of them counts the call.
        """
        before = self._comm.health.calls
        self._comm.health.number(call)
        result = None
        if call not in self._newest:
            try:
                result = announce()
            except BaseException:
                self._comm.health.calls = before
                raise
        self._newest[call] = self._backwards
        self._noted.append(call)
        if len(self._noted) == _LONGEST:
            self._noted = [f"runs {_LONGEST} calls ({digest_of(self._noted)})"]
        return result

    def announce(self, call: str) -> None:
        """Announces a call in any case (:func:`announce`)."""
        announce(self._comm, call)

    def take(self) -> list[str]:
        """Returns the calls since the last backward, when the next one begins."""
        self._backwards += 1
        if not self._newest:
            return []
        self._newest = {call: at for call, at in self._newest.items() if at > self._backwards - _REPEATS}
        noted, self._noted = self._noted, []
        return noted


class StepRequests:
    """Collects the requests of any tower to all towers at a step; see [Note: requests are answered a step later].

    Args:
        call: a description of the call for users.
    """

    def __init__(self, comm: Communicator, call: str) -> None:
        self._comm, self._call = comm, call
        self._in_flight: tuple[Pending, torch.Tensor] | None = None

    def collect(self, local: int) -> int:
        """Sends this tower's requests to all towers, and returns the union of the requests of the call before.

        With one tower, it returns this call's requests.

        Args:
            local: a bit mask, less than 256.
        """
        if self._comm.size == 1:
            return local
        requests = 0
        if self._in_flight is None:  # a call that is missing on a tower is mostly missing from the first step on
            announce(self._comm, self._call)
        else:
            pending, rows = self._in_flight
            pending.wait()
            for reported in rows.view(-1).tolist():
                requests |= reported
        self._in_flight = self._comm.start_all_gather(torch.tensor([local], dtype=torch.uint8, device="cpu"))
        return requests
